"""Detection of slow workers: one that delays the others is found, and none that is late for another reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.elastic.slow import Look, Reading, find_slow_worker
from engine.launch.elastic.job_watch import SlowWatch
from engine.metrics import names

from ..metrics.fake_pages import FakePage, training

LIMIT = 0.05  # seconds per step
EVERY = 10.0  # seconds between two observations
STEPS = 20  # steps of each worker between two observations


def looks(
    number: int,
    lag: Callable[[int, int], float],
    crossing: Callable[[int, int], float] = lambda worker, look: 0.0,
    steps: Callable[[int], int] = lambda look: STEPS,
    world: Callable[[int], int] = lambda look: 1,
) -> list[Look]:
    """Return observations of three workers, whose `lag` and `crossing` grow by these seconds per step."""
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
    found = find_slow_worker(looks(7, one_is_slow), LIMIT, 60.0)
    assert found is not None and found.worker == 2 and found.lag == pytest.approx(0.08)
    assert str(found) == "the others wait 80 ms for it in each step"


def test_not_before_the_time_is_over() -> None:
    assert find_slow_worker(looks(6, one_is_slow), LIMIT, 60.0) is None
    assert find_slow_worker([], LIMIT, 60.0) is None


def test_what_was_before_the_time_does_not_matter() -> None:
    found = find_slow_worker(looks(9, lambda worker, look: 0.0 if look < 3 else one_is_slow(worker, look)), LIMIT, 60.0)
    assert found is not None and found.worker == 2


@pytest.mark.parametrize("look", range(1, 7))
def test_one_good_interval_clears_it(look: int) -> None:
    assert (
        find_slow_worker(looks(7, lambda worker, at: 0.01 if at == look else one_is_slow(worker, at)), LIMIT, 60.0)
        is None
    )


def test_a_single_pause_is_none() -> None:
    """Rank 0 saves once for a long time."""
    assert (
        find_slow_worker(looks(7, lambda worker, look: 5.0 if (worker, look) == (0, 3) else 0.01), LIMIT, 60.0) is None
    )


def test_two_slow_ones_are_an_uneven_program() -> None:
    assert find_slow_worker(looks(7, lambda worker, look: 0.08 if worker else 0.01), LIMIT, 60.0) is None


def test_the_next_slowest_must_be_below_half_the_limit() -> None:
    assert find_slow_worker(looks(7, lambda worker, look: (0.01, 0.026, 0.08)[worker]), LIMIT, 60.0) is None
    assert find_slow_worker(looks(7, lambda worker, look: (0.01, 0.024, 0.08)[worker]), LIMIT, 60.0) is not None


def test_another_one_each_time_is_none() -> None:
    assert find_slow_worker(looks(7, lambda worker, look: 0.08 if worker == look % 3 else 0.01), LIMIT, 60.0) is None


def test_a_slow_link_is_not_a_slow_worker() -> None:
    assert (
        find_slow_worker(looks(7, one_is_slow, lambda worker, look: 0.06 if worker == 2 else 0.0), LIMIT, 60.0) is None
    )


def test_time_without_a_step_proves_nothing() -> None:
    """All ranks wait for one loader, or for a checkpoint."""
    assert find_slow_worker(looks(7, one_is_slow, steps=lambda look: 0 if look == 4 else STEPS), LIMIT, 60.0) is None


def test_each_world_is_looked_at_by_itself() -> None:
    assert find_slow_worker(looks(7, one_is_slow, world=lambda look: 1 + (look > 2)), LIMIT, 60.0) is None


@pytest.mark.parametrize(("limit", "seconds"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_limits_that_cannot_be_are_refused(limit: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        find_slow_worker([], limit, seconds)


def with_waits(made: list[Look], waits: tuple[float, float, float]) -> list[Look]:
    """Return the same observations, with each worker's blocked seconds per step."""
    return [
        replace(
            look,
            readings={
                worker: replace(reading, blocked=reading.steps * waits[worker])
                for worker, reading in look.readings.items()
            },
        )
        for look in made
    ]


def test_one_delay_that_many_collectives_have_seen_counts_once() -> None:
    """Lags of 80 ms per step are eight collectives that were 10 ms late, if the others wait no longer than 10 ms."""
    made = looks(7, one_is_slow)
    assert find_slow_worker(with_waits(made, (0.03, 0.03, 0.02)), LIMIT, 60.0) is None
    found = find_slow_worker(with_waits(made, (0.09, 0.08, 0.01)), LIMIT, 60.0)
    assert found is not None and found.worker == 2 and found.lag == pytest.approx(0.07)


@given(
    lags=st.lists(
        st.lists(st.sampled_from([0.0, 0.02, 0.03, 0.06, 0.3]), min_size=3, max_size=3), min_size=2, max_size=9
    ),
    crossing=st.lists(st.sampled_from([0.0, 0.04]), min_size=3, max_size=3),
    pauses=st.sets(st.integers(0, 9)),
)
def test_who_is_found_was_the_only_late_one_in_each_interval(
    lags: list[list[float]], crossing: list[float], pauses: set[int]
) -> None:
    """Such a worker is always found, if it was late in all intervals and nothing else explains the lag."""
    made = looks(
        len(lags),
        lambda worker, look: lags[look][worker],
        lambda worker, look: crossing[worker],
        steps=lambda look: 0 if look in pauses else STEPS,
    )
    seconds = EVERY * (len(lags) - 1)
    found = find_slow_worker(made, LIMIT, seconds)
    guilty = [
        worker
        for worker in range(3)
        if crossing[worker] < LIMIT / 2
        and all(
            look not in pauses
            and of[worker] > LIMIT
            and all(other < LIMIT / 2 for each, other in enumerate(of) if each != worker)
            for look, of in enumerate(lags)
            if look > 0
        )
    ]
    assert ([] if found is None else [found.worker]) == guilty


class Members:
    """Counters pages of two workers, as an agent sends them, and their observer."""

    def __init__(self) -> None:
        self.pages = [FakePage(training(rank, 2)) for rank in range(2)]
        self.watch = SlowWatch(LIMIT, 60.0, [each.descriptor for each in self.pages])
        self.numbers = {7: 0, 9: 1}  # slots of the workers
        self._steps, self._late = 0, 0.0

    def train(self, steps: int, lag: float) -> None:
        """Make steps on both workers, for which worker 9 was late."""
        self._steps += steps
        self._late += steps * lag
        for late, each in enumerate(self.pages):
            each.set("steps", self._steps)
            each.set("lag_ns", int(1e9 * self._late * late))
            each.set("blocked_ns", int(1e9 * self._late * (1 - late)))

    def close(self) -> None:
        for each in self.pages:
            each.close()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    made.close()


def test_pages_are_looked_at_for_as_long_as_one_world_trains(members: Members) -> None:
    found = []
    for second in range(200):
        members.train(2, 0.08)
        world = 0 if second == 40 else 1 if second < 40 else 2  # a reset
        if (slow := members.watch.take_sample(float(second), world, members.numbers)) is not None:
            found.append((second, slow))
    ((second, slow),) = found  # at most once in a world
    assert slow.worker == 9 and slow.lag == pytest.approx(0.08) and 41 + 60 <= second <= 41 + 60 + 13


def test_steps_that_are_longer_than_the_time_between_looks_are_steps_all_the_same(members: Members) -> None:
    for second in range(400):
        if second % 20 == 0:
            members.train(1, 0.08)
        if (slow := members.watch.take_sample(float(second), 1, members.numbers)) is not None:
            assert slow.worker == 9
            return
    raise AssertionError("nobody was found")


def test_a_page_that_nobody_writes_to_is_no_member_s(members: Members) -> None:
    members.pages[1].set("state", names.STATES.index("resetting"))
    for second in range(200):
        members.train(2, 0.08)
        assert members.watch.take_sample(float(second), 1, members.numbers) is None
