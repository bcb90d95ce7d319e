"""Hosts, limits and the blacklist: where workers may be started, and when again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.elastic.hosts import LONGEST_REST, HostRegistry
from engine.elastic.limits import JobLimits
from engine.elastic.places import Slot

FOUND = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3))


def hosts(cooldown: tuple[float, float] | None = None, **slots: int) -> HostRegistry:
    made = HostRegistry(JobLimits(1, 1, 1, cooldown=cooldown))
    made.update(slots)
    return made


@given(st.lists(FOUND, min_size=1))
def test_in_which_order_hosts_are_told_means_nothing(answers: list[Mapping[str, int]]) -> None:
    one, other = hosts(a=1, b=1, c=1), hosts(a=1, b=1, c=1)
    for answer in answers:
        one.update(answer)
        other.update(answer)
        other.update(dict(reversed(answer.items())))
    assert one.find_free_slots((), 0.0) == other.find_free_slots((), 0.0)


@given(st.lists(FOUND))
def test_a_host_that_stays_keeps_its_age(answers: list[Mapping[str, int]]) -> None:
    known = hosts(a=1, b=1)
    for answer in answers:
        known.update({**answer, "b": 2})
    assert all(known.get_age("b") < known.get_age(name) for name in "ac" if known.knows_host(name) and name != "a")


def test_a_host_that_comes_back_is_a_new_one() -> None:
    known = hosts(a=1, b=1)
    known.update({"b": 1})
    assert known.departure_reason(Slot("a", 0)) == "host a is not among the hosts any more"
    known.update({"a": 1, "b": 1})
    assert known.departure_reason(Slot("a", 0)) == ""
    assert known.find_free_slots((), 0.0) == [Slot("b", 0), Slot("a", 0)]


def test_a_slot_rests_longer_each_time() -> None:
    known = hosts(a=2)
    assert not known.record_failure(Slot("a", 1), 10.0)
    assert known.find_free_slots((), 10.9) == [Slot("a", 0)] and known.next_free((), 10.9) == 11.0
    assert known.find_free_slots((), 11.0) == [Slot("a", 0), Slot("a", 1)]
    assert not known.record_failure(Slot("a", 1), 20.0)
    assert known.next_free((), 20.0) == 22.0


def test_the_third_failure_in_a_row_blacklists_the_host() -> None:
    known = hosts(a=2, b=1)
    assert [known.record_failure(Slot("a", 1), now) for now in (1.0, 2.0, 3.0)] == [False, False, True]
    assert known.find_free_slots((), 1e9) == [Slot("b", 0)] and known.next_free((), 3.0) is None
    assert known.departure_reason(Slot("a", 0)) == ""  # its worker goes on
    assert known.describe_blacklist(3.0) == ["a (for good)"]


def test_a_commit_between_failures_forgives() -> None:
    known = hosts(a=1)
    for now in range(10):
        assert not known.record_failure(Slot("a", 0), float(now))
        known.reset_failures([Slot("a", 0)])


def test_a_commit_of_other_slots_starts_the_count_anew() -> None:
    known = hosts(a=2)
    for now in range(0, 100, 20):
        assert not known.record_failure(Slot("a", 0), float(now))
        assert not known.record_failure(Slot("a", 0), now + 5.0)
        known.reset_failures([Slot("a", 1)])
    assert known.next_free({Slot("a", 1)}, 86.0) == 85.0 + LONGEST_REST  # the cooldown grows on, up to a bound


def test_newcomers_that_end_by_themselves_are_not_forgiven_by_commits_of_others() -> None:
    known = hosts(a=2)
    told = []
    for now in (1.0, 2.0, 3.0):
        told.append(known.record_failure(Slot("a", 0), now, unproven=True))
        known.reset_failures([Slot("a", 1)])
    assert told == [False, False, True]


def test_absurd_slots_make_no_long_lists() -> None:
    known = hosts(a=10**11)
    taken = {Slot("a", number) for number in range(40)}
    assert len(known.find_free_slots((), 0.0)) < 100
    assert next(slot for slot in known.find_free_slots(taken, 0.0) if slot not in taken) == Slot("a", 40)
    assert known.next_free(taken, 0.0) is None


def test_a_cooldown_doubles_and_has_a_bound() -> None:
    known = hosts((10.0, 35.0), a=1)
    now = 0.0
    for seconds in (10.0, 20.0, 35.0, 35.0):
        known.blacklist_host("a", now)
        known.blacklist_host("a", now + 1)  # it is excluded already
        assert known.next_free((), now) == now + seconds
        assert known.describe_blacklist(now) == [f"a (for {seconds:.0f} s)"]
        now += seconds
        assert known.find_free_slots((), now) == [Slot("a", 0)]


def test_coming_and_going_takes_no_host_off_the_blacklist() -> None:
    known = hosts(a=1)
    known.blacklist_host("a", 0.0)
    known.update({})
    known.update({"a": 1})
    assert known.find_free_slots((), 1e9) == []


def test_slots_that_are_gone_are_left() -> None:
    known = hosts(a=3)
    known.update({"a": 2})
    assert [known.departure_reason(Slot("a", number)) for number in (1, 2)] == ["", "host a has 2 slots now"]
    assert known.find_free_slots({Slot("a", 0)}, 0.0) == [Slot("a", 1)]


def test_a_host_that_leaves_is_started_on_no_more_until_it_was_away() -> None:
    known = hosts(a=1)
    known.mark_leaving("a")
    known.update({"a": 1})
    assert known.find_free_slots((), 0.0) == [] and known.departure_reason(Slot("a", 0)) == "host a leaves"
    known.update({})
    known.update({"a": 1})
    assert known.find_free_slots((), 0.0) == [Slot("a", 0)]


def test_slots_below_0_are_refused() -> None:
    with pytest.raises(ValueError, match="host 'b' has -1 slots"):
        hosts(a=1, b=-1)


@pytest.mark.parametrize(
    ("limits", "workers", "size"),
    [
        (JobLimits(4, 2, 8), 9, 8),
        (JobLimits(4, 2, 8), 1, 0),
        (JobLimits(4, 4, 8, multiple=4), 7, 4),
        (JobLimits(4, 1, 8, sizes=frozenset({1, 2, 4, 8})), 7, 4),
        (JobLimits(6, 3, 8, multiple=3, sizes=frozenset({2, 6})), 5, 0),
    ],
)
def test_the_largest_allowed_size(limits: JobLimits, workers: int, size: int) -> None:
    assert limits.find_largest_size(workers) == size


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"size": 2, "min_size": 3, "max_size": 4}, "min_size is 3, size 2"),
        ({"size": 2, "min_size": 0, "max_size": 4}, "min_size is 0"),
        ({"size": 3, "min_size": 1, "max_size": 4, "multiple": 2}, "not an allowed size: a multiple of 2"),
        ({"size": 3, "min_size": 1, "max_size": 4, "sizes": frozenset({1, 2})}, r"one of \[1, 2\]"),
        ({"size": 1, "min_size": 1, "max_size": 1, "multiple": 0}, "multiple is 0"),
        ({"size": 1, "min_size": 1, "max_size": 1, "lease": 0.0}, "lease is 0"),
        ({"size": 1, "min_size": 1, "max_size": 1, "grow_wait": float("nan")}, "grow_wait is nan"),
        ({"size": 1, "min_size": 1, "max_size": 1, "reset_limit": -1}, "reset_limit is -1"),
        ({"size": 1, "min_size": 1, "max_size": 1, "cooldown": (9.0, 3.0)}, "cooldown is"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        JobLimits(**given)
