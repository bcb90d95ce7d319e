"""Two trainings give the same bits, whatever the fusion, the timing and the order of ready gradients."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch")

from ..ranks import run_ranks
from . import determinism_program

# Two jobs, with different settings from the start.
JOBS = ({}, {"ENGINE_FUSION_THRESHOLD": "0", "ENGINE_CYCLE_TIME_MS": "0", "ENGINE_SPIN_US": "0"})


@pytest.mark.slow
def test_two_trainings_give_the_same_bits() -> None:
    found = [
        run_ranks(3, determinism_program.digests, env={"ENGINE_STALL_LIMIT": "60", **settings}).values
        for settings in JOBS
    ]
    for ranks in found:
        assert ranks == [ranks[0]] * 3
    first = found[0][0]
    assert found[1][0] == first
    halves = {digest for name, digest in first.items() if name.startswith("bfloat16")}
    assert len(halves) == 1, first
    assert len(set(first.values()) - halves) == 1, first


def test_bits_would_show_another_order_of_summation() -> None:
    assert determinism_program.order_of_summation_matters()
