"""An `init` that fails on one rank, at each step: all ranks are told why, nothing is left, and a second one works."""

from __future__ import annotations

import pytest

from ..ranks import run_ranks
from . import init_programs

STEPS = [*init_programs.STEPS]
ONE_HOST = [step for step in STEPS if step != "links"]
HOSTS = [step for step in STEPS if step not in ("hosting", "passing", "passed")]  # at those steps other hosts go on
ALONE = [step for step in HOSTS if step not in init_programs.WITHIN_HOST]


@pytest.mark.parametrize(
    ("size", "hosts", "steps"),
    [
        pytest.param(2, 1, ONE_HOST, id="2"),
        pytest.param(3, 2, HOSTS[::5], id="3 on 2 hosts, some steps"),
        pytest.param(3, 1, ONE_HOST, id="3", marks=pytest.mark.slow),
        pytest.param(2, 2, ALONE, id="2 on 2 hosts", marks=pytest.mark.slow),
        pytest.param(3, 2, HOSTS, id="3 on 2 hosts", marks=pytest.mark.slow),
    ],
)
def test_init_that_fails_on_one_rank_fails_on_all_and_works_again(size: int, hosts: int, steps: list[str]) -> None:
    finished = run_ranks(size, init_programs.fail_at, steps, hosts, timeout=250)
    rows = {(row["step"], row["culprit"], row["rank"]): row for value in finished.values for row in value}
    assert len(rows) == len(steps) * size * size
    failed = {(step, culprit) for (step, culprit, _), row in rows.items() if row["raised"]}
    assert {step for step, _ in failed} == set(steps), "each step is one of some rank's"
    for (step, culprit, rank), row in rows.items():
        if (step, culprit) in failed:
            assert "a step is broken" in str(row["error"]), row
            assert rank == culprit or f"rank {culprit}" in row["error"], row
            assert not row["left"] and row["state"][0] == row["state"][1], row
            assert row["again"] is None, row
            assert row["seconds"] < 8.0, row
        assert row["sum"] == size, row


def test_failed_init_tells_the_other_ranks_although_an_end_raises() -> None:
    """Regression: an exception at the end of a step hid the cause, and the others waited for the start timeout."""
    for error, notes, seconds, again in run_ranks(2, init_programs.broken_end).values:
        assert "a step is broken" in error and seconds < 30.0 and again is None, (error, seconds, again)
        assert notes == ["Then the end of the session raised OSError: an end is broken"], notes


def test_init_works_again_on_ranks_that_have_called_it_unequally_often() -> None:
    """Regression: each process counted its calls, and ranks with different counts never met."""
    assert run_ranks(2, init_programs.unequal_calls).values == [2.0, 2.0]


def test_ranks_that_give_different_process_sets_are_told_before_they_start() -> None:
    errors = run_ranks(2, init_programs.different_sets).values
    for error in errors:
        assert error.startswith("IncompatibleRanksError") and "process_sets ProcessSet([0])" in error, errors


@pytest.mark.slow
def test_init_with_a_wrong_process_set_raises_the_same_on_all_ranks_and_can_be_corrected() -> None:
    """Each rank finds the error itself. Regression: a rank that heard of another's failure first raised that one."""
    for errors, initialized, right in run_ranks(2, init_programs.wrong_set).values:
        assert all(error.startswith("ValueError: ") for error in errors) and len(errors) == 4, errors
        assert not initialized and right


@pytest.mark.slow
def test_process_sets_that_wait_share_one_shutdown_timeout() -> None:
    seconds = run_ranks(3, init_programs.stuck_sets, 3.0).values
    assert 2.5 < max(seconds) < 5.5, seconds


def test_an_exception_that_cannot_tell_its_text_is_told_all_the_same() -> None:
    finished = run_ranks(2, init_programs.unspeakable, check=False)
    assert "rank 1 raised" in finished.values[0] or "rank 1 failed" in finished.values[0], finished
    assert "Unspeakable" in finished.values[0], finished
