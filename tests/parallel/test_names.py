"""Names, orders, threads and handles: in whatever order the ranks work, the n-th use of a name meets the n-th."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from ..ranks import run_ranks
from . import name_program
from .marks import needs_memory_back

SIZES = [1, 2, 3, 4]
LIMIT = {"ENGINE_STALL_LIMIT": "20"}

STEP = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["allreduce", "allreduce", "allreduce", "broadcast", "allgather", "barrier"]),
        "dtype": st.sampled_from(["float32", "float32", "float16", "float64", "int8", "int64", "bool"]),
        "op": st.sampled_from(["Sum", "Min", "Max", "Product"]),
        "shape": st.sampled_from([(), (1,), (0,), (3, 4), (257,), (5000,), (9000,), (70_001,), (300_000,)]),
        "rows": st.lists(st.integers(0, 3), min_size=1, max_size=4),
        "root": st.integers(0, 3),
        "prescale": st.just(1.0),
        "in_place": st.booleans(),
        "name": st.sampled_from(["a", "b"]),
    }
)


def drawn(strategy: st.SearchStrategy[Any], count: int, seed: int) -> list[Any]:
    """Examples, the same ones in every run."""
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_many_names(size: int) -> None:
    run_ranks(size, name_program.many_names, env=LIMIT)


@pytest.mark.parametrize("size", [2, 3])
def test_evictions_of_names_that_come_again(size: int) -> None:
    run_ranks(size, name_program.evictions, env=LIMIT)


@pytest.mark.parametrize("size", SIZES)
def test_odd_names(size: int) -> None:
    run_ranks(size, name_program.odd_names, env=LIMIT)


@pytest.mark.parametrize("size", [*SIZES, 8])
@pytest.mark.parametrize("settings", [{}, {"ENGINE_FUSION_THRESHOLD": "100k", "ENGINE_CYCLE_TIME_MS": "0.5"}])
def test_every_order_of_submission(size: int, settings: dict[str, str]) -> None:
    plans = drawn(st.lists(STEP, min_size=1, max_size=30), 40, seed=size)
    run_ranks(size, name_program.plans, plans, env={**LIMIT, **settings})


@pytest.mark.parametrize("size", SIZES)
def test_threads(size: int) -> None:
    run_ranks(size, name_program.threads, env=LIMIT)


@needs_memory_back
@pytest.mark.parametrize("size", [1, 3])
def test_dropped_handles_leave_no_memory(size: int) -> None:
    for before, after in run_ranks(size, name_program.dropped, env=LIMIT).values:
        # Kept tensors would be 480,000 kB. What grows is the ranks' slots: they count when they are first touched,
        # 2 MB a rank at the default chunk, as far as one rank happens to run ahead of the others.
        assert after - before < 32_000, f"{before} kB, then {after} kB"
