"""Random programs on ranks that stay up from one to the next, compared with NumPy.

DRAWN_EXAMPLES=5000 draws that many instead, others in each run: `make soak`.
"""

from __future__ import annotations

import os
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import pytest

from . import drawn_operations
from .drawn_operations import KINDS, cut_kinds, problems
from .rank_pool import Pool

EXAMPLES = int(os.environ.get("DRAWN_EXAMPLES", "0"))


@pytest.mark.sample(1)
@pytest.mark.timeout(300 + EXAMPLES)
@pytest.mark.parametrize("size", [pytest.param(2, marks=[pytest.mark.slow] * (not EXAMPLES)), 4, 3])
def test_drawn_programs(size: int) -> None:
    seen: Counter[str] = Counter()
    sets: set[tuple[int, ...]] = set()
    cut: set[str] = set()
    joins = 0
    with Pool(size) as pool:

        @hypothesis.settings(
            max_examples=EXAMPLES or 150,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(drawn_operations.program(st, size, drawn_operations.subsets(size)))
        def run(program: drawn_operations.Program) -> None:
            nonlocal joins
            seen.update(each.kind for phase in program for each in phase.operations)
            sets.update(each.ranks for phase in program for each in phase.operations)
            cut.update(cut_kinds(program))
            joins += any(phase.joined for phase in program)
            found = problems(pool.run(program))
            assert not found, "\n".join(found)

        run()
    assert set(seen) == set(KINDS), f"only these kinds were drawn: {seen}"
    assert cut, "odd chunks cut nothing"  # Any change of the source changes draws; see test_no_setting_changes_a_bit.
    assert sets == {(), *drawn_operations.subsets(size)} and joins, f"only these sets, and {joins} joins: {sets}"
