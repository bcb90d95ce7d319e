"""Slow workers: one that holds up the others is found, and nobody who is late for another reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.elastic.slow import Look, Reading, find

LIMIT = 0.05  # seconds a step
EVERY = 10.0  # seconds between two looks
STEPS = 20  # of each worker between two looks


def looks(
    number: int,
    lag: Callable[[int, int], float],
    crossing: Callable[[int, int], float] = lambda worker, look: 0.0,
    steps: Callable[[int], int] = lambda look: STEPS,
    world: Callable[[int], int] = lambda look: 1,
) -> list[Look]:
    """Looks at three workers; `lag` and `crossing` say by how many seconds a step they grow before a look."""
    made, total = [], {worker: Reading(0, 0.0, 0.0) for worker in range(3)}
    for look in range(number):
        total = {
            worker: Reading(
                reading.steps + steps(look),
                reading.lag + steps(look) * lag(worker, look),
                reading.crossing + steps(look) * crossing(worker, look),
            )
            for worker, reading in total.items()
        }
        made.append(Look(look * EVERY, world(look), total))
    return made


def one_is_slow(worker: int, look: int) -> float:
    return 0.08 if worker == 2 else 0.01


def test_one_that_is_slow_all_the_time_is_found() -> None:
    found = find(looks(7, one_is_slow), LIMIT, 60.0)
    assert found is not None and found.worker == 2 and found.lag == pytest.approx(0.08)
    assert str(found) == "the others wait 80 ms for it in each step"


def test_not_before_the_time_is_over() -> None:
    assert find(looks(6, one_is_slow), LIMIT, 60.0) is None
    assert find([], LIMIT, 60.0) is None


def test_what_was_before_the_time_does_not_matter() -> None:
    found = find(looks(9, lambda worker, look: 0.0 if look < 3 else one_is_slow(worker, look)), LIMIT, 60.0)
    assert found is not None and found.worker == 2


@pytest.mark.parametrize("look", range(1, 7))
def test_one_good_interval_clears_it(look: int) -> None:
    assert find(looks(7, lambda worker, at: 0.01 if at == look else one_is_slow(worker, at)), LIMIT, 60.0) is None


def test_a_single_pause_is_none() -> None:
    """Rank 0 saves for a long time, once."""
    assert find(looks(7, lambda worker, look: 5.0 if (worker, look) == (0, 3) else 0.01), LIMIT, 60.0) is None


def test_two_slow_ones_are_an_uneven_program() -> None:
    assert find(looks(7, lambda worker, look: 0.08 if worker else 0.01), LIMIT, 60.0) is None


def test_the_next_slowest_must_be_below_half_the_limit() -> None:
    assert find(looks(7, lambda worker, look: (0.01, 0.026, 0.08)[worker]), LIMIT, 60.0) is None
    assert find(looks(7, lambda worker, look: (0.01, 0.024, 0.08)[worker]), LIMIT, 60.0) is not None


def test_another_one_each_time_is_none() -> None:
    assert find(looks(7, lambda worker, look: 0.08 if worker == look % 3 else 0.01), LIMIT, 60.0) is None


def test_a_slow_link_is_not_a_slow_worker() -> None:
    assert find(looks(7, one_is_slow, lambda worker, look: 0.06 if worker == 2 else 0.0), LIMIT, 60.0) is None


def test_time_without_a_step_proves_nothing() -> None:
    """All wait for one loader, or for a checkpoint."""
    assert find(looks(7, one_is_slow, steps=lambda look: 0 if look == 4 else STEPS), LIMIT, 60.0) is None


def test_each_world_is_looked_at_by_itself() -> None:
    assert find(looks(7, one_is_slow, world=lambda look: 1 + (look > 2)), LIMIT, 60.0) is None


@pytest.mark.parametrize(("limit", "seconds"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_limits_that_cannot_be_are_refused(limit: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        find([], limit, seconds)
