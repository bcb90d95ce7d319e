"""Random lists of operations that test_names.py has ranks submit, each in an order of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import hypothesis
import hypothesis.strategies as st

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
PLANS = 40


@cache
def plans(seed: int) -> list[list[dict[str, Any]]]:
    """Random lists of steps, the same in every run and on every rank."""
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=PLANS,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.lists(STEP, min_size=1, max_size=30))
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found
