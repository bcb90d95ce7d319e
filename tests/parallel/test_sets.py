"""Process sets and join."""

from __future__ import annotations

import pytest

from ..ranks import run_ranks
from . import set_program

LIMIT = {"ENGINE_STALL_LIMIT": "20"}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("program", [set_program.process_sets, set_program.joins])
def test_on_ranks(program: object, size: int) -> None:
    run_ranks(size, program, size, env=LIMIT)


def test_sets_that_share_no_rank_do_not_wait_for_each_other() -> None:
    slow, slept, *others = [value["seconds"] for value in run_ranks(4, set_program.independence).values]
    assert slow > 0.9 and slept > 0.9
    assert max(others) < 0.8, others


def test_a_set_does_not_wait_for_another_that_shares_a_rank() -> None:
    both, slept, other = [value["seconds"] for value in run_ranks(3, set_program.overlap).values]
    assert slept > 0.9
    assert both < 0.8 and other < 0.8, (both, other)
