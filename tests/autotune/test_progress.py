"""Fields about the tuner on the counters page."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine.metrics.names import PHASES
from engine.tuning.progress import Progress


class Page:
    """Counters page that keeps the fields that it is given."""

    def __init__(self) -> None:
        self.fields: dict[str, int] = {}

    def tell(self, **fields: int) -> None:
        assert all(isinstance(value, int) and value >= 0 for value in fields.values())
        self.fields |= fields

    def scores(self) -> tuple[float, ...]:
        return tuple(self.fields[f"tuner_{name}_ps"] / 1e9 for name in ("default", "score", "best"))


@pytest.fixture
def page() -> Page:
    return Page()


def progress_of(page: Page) -> Progress:
    fake: Any = page
    return Progress(fake)


def test_a_search_is_told_from_its_beginning_to_its_end(page: Page) -> None:
    progress = progress_of(page)
    progress.enter("waiting")
    assert page.fields == {"tuner_phase": PHASES.index("waiting")}
    progress.record_search_start()
    assert page.fields["tuner_phase"] == PHASES.index("searching") and page.fields["tuner_searches"] == 1
    assert page.scores() == (0, 0, 0)
    for milliseconds, whole, best in ((10, True, 10), (12, False, 10), (8, True, 8), (5, False, 8)):
        progress.record_trial(milliseconds / 1e3, whole=whole)
        assert page.scores() == (10, milliseconds, best)
    assert page.fields["tuner_trials"] == 4
    progress.record_search_end(0.25)
    assert page.scores() == (10, 5, 7.5) and page.fields["tuner_phase"] == PHASES.index("watching")
    progress.record_search_start()
    assert page.fields["tuner_searches"] == 2 and page.scores() == (0, 0, 0)
    progress.record_trial(0.02, whole=True)
    progress.record_search_end(None)
    assert page.scores() == (20, 20, 20) and page.fields["tuner_trials"] == 5


def test_a_search_that_its_budget_ends_is_told_apart_from_a_whole_one(page: Page) -> None:
    progress = progress_of(page)
    progress.record_search_start()
    progress.record_trial(0.02, whole=True)
    progress.record_search_end(None, resting=True)
    assert page.fields["tuner_phase"] == PHASES.index("resting") and page.scores() == (20, 20, 20)


def test_changes_have_a_time(page: Page) -> None:
    progress, before = progress_of(page), time.time_ns()
    progress.record_change()
    progress.record_change()
    assert page.fields["tuner_changes"] == 2 and before <= page.fields["tuner_changed_ns"] <= time.time_ns()
