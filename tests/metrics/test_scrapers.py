"""Who should come once more after a failure."""

from __future__ import annotations

import pytest

from engine.metrics.export.scrapers import LONGEST_PERIOD, MARGIN, UNKNOWN_PERIOD, Scrapers


def visited(**times: list[float]) -> Scrapers:
    scrapers = Scrapers()
    for client, each in times.items():
        for time in each:
            scrapers.note(client, time)
    return scrapers


def test_nobody_is_awaited_where_nobody_came() -> None:
    assert visited().awaited(5.0) == {}
    assert not visited().missing({}, 5.0, 5.0)


@pytest.mark.parametrize(
    ("times", "now", "late"),
    [
        ([0.0, 15.0, 30.0], 31.0, 31.0 + 1.5 * 15 + MARGIN),
        ([0.0, 60.0], 61.0, 61.0 + LONGEST_PERIOD),
        ([0.0], 1.0, 1.0 + UNKNOWN_PERIOD),
        ([0.0, 15.0], 100.0, None),  # gone
        ([0.0], 100.0, None),
    ],
)
def test_a_client_is_awaited_by_its_own_period(times: list[float], now: float, late: float | None) -> None:
    assert visited(it=times).awaited(now) == ({} if late is None else {"it": late})


def test_one_that_comes_often_does_not_stand_in_for_one_that_comes_seldom() -> None:
    scrapers = visited(curl=[9.0, 9.5, 10.0], prometheus=[0.0, 5.0, 10.0])
    awaited = scrapers.awaited(10.1)
    assert awaited.keys() == {"curl", "prometheus"} and awaited["prometheus"] - awaited["curl"] > 5
    scrapers.note("curl", 10.5)
    assert scrapers.missing(awaited, 10.1, 10.6)
    assert scrapers.missing(awaited, 10.1, 17.0)  # whoever is late is not waited for, and the other still is
    scrapers.note("prometheus", 15.0)
    assert not scrapers.missing(awaited, 10.1, 15.1)


def test_nobody_is_waited_for_who_is_late() -> None:
    scrapers = visited(prometheus=[0.0, 5.0, 10.0])
    awaited = scrapers.awaited(10.1)
    assert scrapers.missing(awaited, 10.1, 18.0) and not scrapers.missing(awaited, 10.1, 19.0)
