"""Watching of what a search deployed, however slow the job's steps are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.tuning.steps import Sample, Score
from engine.tuning.trial_loop import ABORT_AFTER, OBSERVED, Tuning

DEPLOYED = 3  # the version of the knobs


def observed(looks: Iterator[list[Sample]], unsettled: int = 0) -> list[float]:
    """Return what one observation after the search yields, if each pause brings the next samples of `looks`."""
    tuning: Any = object.__new__(Tuning)
    tuning._version, tuning._unsettled, tuning._sleep_unless_ended = DEPLOYED, unsettled, lambda seconds: None
    tuning._steps = SimpleNamespace(read=lambda: next(looks))
    return list(tuning._observe_steps())


def test_the_first_steps_under_a_setting_are_not_looked_at() -> None:
    looks = [[Sample(9.0, DEPLOYED, 0.0)], [Sample(9.0, DEPLOYED, 0.0), *[Sample(1.0, DEPLOYED, 0.0)] * ABORT_AFTER]]
    assert observed(iter(looks), unsettled=2) == [1.0] * ABORT_AFTER


@pytest.mark.parametrize("per_look", [0, 1, 2])
def test_steps_longer_than_a_look_are_kept_until_there_are_enough(per_look: int) -> None:
    samples = [Sample(12.0 + k, DEPLOYED, 0.0) for k in range(ABORT_AFTER + 1)]
    looks: list[list[Sample]] = [[Sample(1.0, DEPLOYED - 1, 0.0)]]
    for start in range(0, len(samples), per_look or 1):
        looks += [samples[start : start + (per_look or 1)]] + [[]] * (per_look == 0)
    assert observed(iter(looks))[:ABORT_AFTER] == [sample.value for sample in samples[:ABORT_AFTER]]


def test_of_many_steps_the_last_ones_count() -> None:
    samples = [Sample(float(k), DEPLOYED, 0.0) for k in range(2 * OBSERVED)]
    assert observed(iter([samples])) == [sample.value for sample in samples[-OBSERVED:]]


def test_a_search_that_its_budget_ends_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    phases: list[bool] = []
    tuning: Any = object.__new__(Tuning)
    tuning._space, tuning._concluded, tuning._apply_knobs = {"size": {}}, None, lambda knobs: None
    tuning._steps = SimpleNamespace(score=Score())
    tuning._progress = SimpleNamespace(record_search_end=lambda gain, resting: phases.append(resting))
    because = "the search ended: its trials have lost the time of 22 steps"
    done = {"best": {"size": 1}, "resting": True, "gain": None, "sure": None, "trials": 9, "because": because}
    with caplog.at_level(logging.WARNING, "engine"):
        tuning._deploy_result(done)
    assert f"nothing is proven faster than this, with which it began, after 9 trials; {because}" in caplog.text
    assert phases == [True] and not tuning.concluded and tuning._state.startswith("after its search")
