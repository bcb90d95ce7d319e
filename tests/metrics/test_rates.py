"""Rates between two readings of a job's pages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.metrics.page import PageError, Snapshot
from engine.metrics.report.rates import (
    COUNTERS,
    GroupRates,
    JobReading,
    Page,
    compute_rates,
    find_straggler,
    pending,
    waits_by_host,
)

from .written_pages import groups_of, snapshot

NUMBERS = st.integers(0, 2**64 - 1)
PAGES = st.one_of(
    st.none(),
    st.just(PageError("is damaged")),
    st.builds(
        lambda pid, values: snapshot(pid=pid, **dict(zip(COUNTERS, values, strict=True))),
        st.integers(1, 3),
        st.lists(st.one_of(st.integers(0, 5), NUMBERS), min_size=len(COUNTERS), max_size=len(COUNTERS)),
    ),
)
READINGS = st.dictionaries(st.integers(0, 4), PAGES, max_size=4)


def test_rates_are_what_grew_by_the_time_that_passed() -> None:
    before = {"pid": 5, "steps": 10, "step_ns": 10**9, "lags": 4, "lag_ns": 4_000_000, "collective_bytes": [0, 1000]}
    after = {"pid": 5, "steps": 14, "step_ns": 3 * 10**9, "step_durations": [3, 1], "lags": 6, "lag_ns": 10_000_000}
    after |= {"collective_bytes": [500, 4500], "blocked_ns": 10**9, "exposed_ns": 5 * 10**8, "collectives": [1, 2, 3]}
    found = compute_rates(JobReading(1.0, {0: snapshot(**before)}), JobReading(3.0, {0: snapshot(**after)}))[0]
    assert (found.steps, found.step, found.lag, found.nbytes) == (2.0, 0.5, 0.003, 2000.0)
    assert (found.blocked, found.exposed, found.collectives) == (0.5, 0.25, 3.0)


def test_samples_of_a_gpu_are_means_of_the_interval() -> None:
    before = snapshot(pid=5, device_samples=[2, 0, 1], device_ns=[2000, 0, 7])
    after = snapshot(pid=5, device_samples=[4, 0, 1, 0, 2], device_ns=[8000, 0, 7, 0, 6000])
    found = compute_rates(JobReading(1.0, {0: before}), JobReading(3.0, {0: after}))[0]
    assert found.device == {"queue": 3e-6, "exposed": 3e-6}


def test_a_group_has_rates_as_long_as_it_is_the_same() -> None:
    before = snapshot(pid=5, group_names=groups_of("a", "b", "c"), group_collectives=[2, 9, 1], group_bytes=[10, 90, 1])
    after = snapshot(pid=5, group_names=groups_of("a", "b", "d"), group_collectives=[6, 1, 2], group_bytes=[30, 99, 2])
    found = compute_rates(JobReading(1.0, {0: before}), JobReading(3.0, {0: after}))[0]
    assert found.groups == {"a": GroupRates(collectives=2.0, nbytes=10.0)}


def test_a_rank_that_did_nothing_has_no_step_time_and_no_lag() -> None:
    found = compute_rates(JobReading(0.0, {0: snapshot(pid=1)}), JobReading(1.0, {0: snapshot(pid=1)}))[0]
    assert found.step is None and found.lag is None and found.steps == 0


@pytest.mark.slow
@given(READINGS, READINGS, st.floats(-10, 10))
def test_rates_are_finite_and_not_negative_whatever_ranks_do(
    earlier: dict[int, Page], later: dict[int, Page], seconds: float
) -> None:
    found = compute_rates(JobReading(100.0, earlier), JobReading(100.0 + seconds, later))
    if 100.0 + seconds <= 100.0:
        assert found == {}
    for rank, rate in found.items():
        before, after = earlier[rank], later[rank]
        assert isinstance(before, Snapshot) and isinstance(after, Snapshot)
        assert all(new >= old for n in COUNTERS for old, new in zip(before.fields[n], after.fields[n], strict=True))
        numbers = [rate.steps, rate.collectives, rate.nbytes, rate.blocked, rate.exposed, rate.step or 0, rate.lag or 0]
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert rate.exposed <= rate.blocked <= 1


@given(READINGS, READINGS)
def test_ranks_that_come_or_go_have_no_rates_and_take_none_from_others(
    earlier: dict[int, Page], later: dict[int, Page]
) -> None:
    both = compute_rates(JobReading(0.0, earlier), JobReading(1.0, later))
    shared = earlier.keys() & later.keys()
    assert both == compute_rates(
        JobReading(0.0, {r: earlier[r] for r in shared}), JobReading(1.0, {r: later[r] for r in shared})
    )


@pytest.mark.parametrize("name", COUNTERS)
def test_counters_that_begin_anew_give_no_rates(name: str) -> None:
    assert compute_rates(JobReading(0.0, {0: snapshot(**{name: 9})}), JobReading(1.0, {0: snapshot(**{name: 8})})) == {}


def test_another_process_in_a_ranks_place_gives_no_rates() -> None:
    assert compute_rates(JobReading(0.0, {0: snapshot(pid=1)}), JobReading(1.0, {0: snapshot(pid=2, steps=5)})) == {}


@pytest.mark.parametrize(
    ("lags", "step", "expected"),
    [
        ({}, None, None),
        ({0: 1.0}, None, None),
        ({0: 0.0, 1: 0.02}, 0.1, 1),
        ({0: 0.0, 1: 0.0009}, None, None),  # a difference of a millisecond is not enough
        ({0: 0.0, 1: 0.002}, None, 1),
        ({0: 0.0, 1: 0.002}, 0.1, None),  # negligible in a long step
        ({0: 0.010, 1: 0.018}, 0.1, None),  # the ranks are late in turn
        ({0: 0.0, 1: 0.001, 2: 0.05, 3: 0.002}, 0.1, 2),
    ],
)
def test_a_straggler_stands_out(lags: dict[int, float], step: float | None, expected: int | None) -> None:
    assert find_straggler(lags, step) == expected


def test_counters_that_were_read_at_two_moments_leave_nothing_pending() -> None:
    assert pending(snapshot(submitted=4, completed=6)) == 0
    assert pending(snapshot(submitted=9, completed=6)) == 3


def test_a_page_with_an_absurd_number_of_hosts_tells_of_no_more_than_it_has_counters_of() -> None:
    pages = [snapshot(hosts=hosts, host=host) for hosts, host in ((10_000, 0), (2, 1))]
    counters = len(pages[0].fields["crossing_ns"])
    assert sorted(waits_by_host((page, {}) for page in pages)) == list(range(counters))
