"""A call that fails on one rank, or is left out there, is told to every rank, and unnamed operations stay in step."""

from __future__ import annotations

import pytest

from ..ranks import run_ranks
from . import failing_program

SIZES = [2, 3]
LIMIT = {"ENGINE_STALL_LIMIT": "20"}


@pytest.mark.parametrize("size", SIZES)
def test_a_call_that_fails_on_one_rank_fails_on_all(size: int) -> None:
    run_ranks(size, failing_program.failing, env=LIMIT)


@pytest.mark.parametrize("size", SIZES)
def test_a_call_that_one_rank_alone_makes_and_that_fails_harms_nothing(size: int) -> None:
    run_ranks(size, failing_program.lonely, env={"ENGINE_STALL_LIMIT": "1", "ENGINE_STALL_WARNING": "0.5"})


def test_a_call_that_failed_alone_and_is_made_again_alone_does_not_wait_for_ever() -> None:
    run_ranks(2, failing_program.again, env=LIMIT)


def test_all_failures_are_told_before_a_join_ends() -> None:
    run_ranks(2, failing_program.many, env=LIMIT)


@pytest.mark.parametrize("size", SIZES)
def test_what_one_rank_leaves_out_fails_on_the_others_and_all_go_on(size: int) -> None:
    run_ranks(size, failing_program.left_out, env=LIMIT)


def test_process_sets_have_failures_of_their_own() -> None:
    run_ranks(3, failing_program.in_process_set, env=LIMIT)


def test_threads_never_share_the_number_of_an_unnamed_operation() -> None:
    run_ranks(2, failing_program.threads, env=LIMIT)


def test_a_rank_with_a_second_thread_is_not_thought_to_have_left_anything_out() -> None:
    run_ranks(2, failing_program.late_thread, env=LIMIT)
