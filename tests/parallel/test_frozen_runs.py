"""Random programs travel in the same frozen batches in every run; a test fails if the coordinator omits one check."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ..gpu.mutants import FROZEN, changed
from ..standins import ROOT
from ..waiting import be_late
from .frozen_worlds import COUNTS, Passes, world
from .pretended_gpu import Optimizer, PretendedGpu, PretendedTensor

EXAMPLES = int(os.environ.get("DRAWN_EXAMPLES", "0"))
EVERY_CALL = bool(os.environ.get("EVERY_CALL"))


# ---- drawn programs --------------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """One backward pass as the program determines it, without the ranks' delays."""

    without: frozenset[int]  # parameters that the optimizer does not have in it
    lacking: list[frozenset[int]]  # by rank: those that get no gradient
    widened: int  # the one whose gradient is a float64 one, if every rank has it
    metrics: frozenset[int]  # behind which gradients a rank averages something by a blocking call


def drawn_passes(size: int) -> st.SearchStrategy[list[Pass]]:
    """Strategy of passes, most of them alike, as in training."""
    places = st.integers(0, len(COUNTS) - 1)
    few = st.frozensets(places, max_size=3)
    seldom = st.sampled_from([frozenset[int]()] * 4 + [frozenset({5}), frozenset({5, 30})])
    one = st.builds(Pass, seldom, st.lists(few, min_size=size, max_size=size), st.sampled_from([-1] * 5 + [9]), few)
    return st.lists(
        st.tuples(one, st.integers(1, 3)).map(lambda each: [each[0]] * each[1]), min_size=2, max_size=5
    ).map(lambda runs: list(itertools.chain(*runs)))


def train(rank: int, native: Any, gpu: PretendedGpu, program: list[Pass], seed: int) -> Passes:
    """Run a program with random delays; return the tensors that travelled together in each pass, without metrics."""
    late, found = random.Random(f"{rank} {seed}"), []
    optimizers = {without: Optimizer(native, COUNTS, without=without) for without in {each.without for each in program}}
    for each in program:
        begin, optimizer = gpu.count(), optimizers[each.without]
        everywhere = each.widened >= 0 and not any(each.widened in lacking for lacking in each.lacking)
        for k in reversed(range(len(COUNTS))):
            if late.random() < 0.1:
                be_late(late.random() * 0.002)
            if k not in each.without and k not in each.lacking[rank]:
                optimizer.bring(k, np.float64 if everywhere and k == each.widened else np.float32)
            if k in each.metrics:
                for tensor in (np.ones(3, np.float32), PretendedTensor(3)):
                    native.allreduce(tensor, tensor, f"metric {type(tensor)}", 0, 1.0, 1.0, True).wait()
        optimizer.finish()
        found.append(sorted(batch for batch in gpu.travelled(begin, gpu.count()) if batch != (3,)))
    return found


@pytest.mark.timeout(120 + EXAMPLES)
@pytest.mark.parametrize("hosts", [(0, 0), (0, 1, 1)])
def test_drawn_programs_have_the_same_batches_in_every_run(hosts: tuple[int, ...]) -> None:
    """Holds for any sets of parameters, absent gradients, dtypes and metrics, and for any delays of ranks."""

    @hypothesis.settings(
        max_examples=EXAMPLES or 8,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(drawn_passes(len(hosts)))
    def compare(program: list[Pass]) -> None:
        runs = []
        for seed in range(2):
            with world(hosts) as each:
                runs += each.run(lambda *rank: train(*rank, program, seed))  # noqa: B023
        for run in runs[1:]:
            assert run == runs[0]

    compare()


# ---- what would happen otherwise -------------------------------------------------------------------------------------

KILLERS = {
    "awaited_members_are_held": "test_awaited_member_is_not_held",
    "members_that_cannot_come_are_waited_for": "test_set_that_has_changed_is_not_waited_for",
    "batches_are_held_for_ever": "test_what_nobody_waits_for_is_not_held_for_ever",
    "batches_are_broken_by_time": "test_batches_recur_whoever_is_late",
    "late_ranks_break_batches": "test_rank_that_is_late_for_seconds_breaks_no_batch",
    "frozen_batches_have_no_deadline": "test_what_nobody_waits_for_is_not_held_for_ever",
    "broken_batches_take_members_in": "test_what_nobody_waits_for_is_not_held_for_ever",
    "what_fuses_by_time_takes_gradients_in": "test_batches_recur_whoever_is_late",
    "optimizers_share_batches": "test_two_optimizers_share_no_batch",
    "batches_outlive_a_change": "test_gradient_that_changes_its_dtype",
    "batches_are_never_made_anew": "test_set_that_has_changed_is_not_waited_for",
}
RUN = """if True:
    import sys
    from tests.gpu import mutants
    mutants.take_native_place()
    import pytest
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.skipif(not EVERY_CALL, reason="takes minutes: make gpu-faults")
@pytest.mark.parametrize("mutant", [*KILLERS, "none"])
def test_mutant_is_killed(mutant: str, tmp_path: Path) -> None:
    tests = [KILLERS[mutant]] if mutant != "none" else sorted(set(KILLERS.values()))
    named = [f"tests/parallel/test_frozen.py::{test}" for test in tests]
    environment = {**os.environ, **changed(mutant, tmp_path, FROZEN), "EVERY_CALL": ""}
    run = subprocess.run(
        [sys.executable, "-c", RUN, *named], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300
    )
    assert (run.returncode == 0) == (mutant == "none"), f"{run.stdout}\n{run.stderr}"
    assert "passed" in run.stdout or "failed" in run.stdout or run.returncode < 0, run.stderr
