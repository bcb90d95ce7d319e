"""The tests' own helpers for waiting for a state, and for repeating a measurement."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..ranks import RanksFailed
from ..waiting import NotWithin, be_late, measured, until


def failing(times: int, error: type[Exception] = AssertionError) -> tuple[Callable[[], None], list[int]]:
    """Function that fails so many times, and the count of its calls."""
    calls = [0]

    def measure() -> None:
        calls[0] += 1
        if calls[0] <= times:
            raise error(f"call {calls[0]}")

    return measure, calls


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_measurement_is_repeated_until_it_is_as_it_should_be(times: int) -> None:
    measure, calls = failing(times)
    measured(measure)
    assert calls == [times + 1]


def test_the_third_failure_counts() -> None:
    measure, calls = failing(9)
    with pytest.raises(AssertionError, match="call 3"):
        measured(measure)
    assert calls == [3]


@pytest.mark.parametrize("error", [NotWithin, RanksFailed, ValueError])
def test_what_is_no_measurement_is_not_repeated(error: type[Exception]) -> None:
    measure, calls = failing(1, error)
    with pytest.raises(error):
        measured(measure)
    assert calls == [1]


def test_a_state_is_awaited_until_it_comes_or_the_time_is_over() -> None:
    looks = iter([0, "", "it"])
    assert until(lambda: next(looks), "it") == "it"
    with pytest.raises(NotWithin, match=r"not within 0\.01 s: what never comes"):
        until(lambda: False, "what never comes", 0.01)


def test_who_stands_still_beyond_the_time_looks_once_more() -> None:
    looks = iter([0, "it"])

    def look() -> object:
        be_late(0.05)
        return next(looks)

    assert until(look, "it", 0.01) == "it"
