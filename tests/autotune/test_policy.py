"""The tuner on surfaces whose best setting is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from autotune import Integer, Real, Settings, Space, Tuner

from .surfaces import DEFAULT, SPACE, Surface, bowl, cliff, flat, measured, search, search_on, shares


@pytest.mark.parametrize("seed", range(6))
def test_the_bottom_of_a_valley_is_found_from_a_default_on_its_side(seed: int) -> None:
    rng = np.random.default_rng(seed)
    surface = bowl(0.25 + 0.05 * seed, 0.6, streaming=bool(seed % 2))
    tuner = Tuner(SPACE, DEFAULT, seed=seed, max_trials=20)
    assert search(tuner, surface, rng) <= 20
    assert surface(tuner.best()) < 1.02 * 0.1 < surface(DEFAULT)


@pytest.mark.parametrize("seed", range(6))
def test_the_default_stays_where_nothing_matters(seed: int) -> None:
    tuner = Tuner(SPACE, DEFAULT, seed=seed, max_trials=20)
    search(tuner, flat, np.random.default_rng(seed))
    assert tuner.best() == DEFAULT


@pytest.mark.parametrize("seed", range(3))
def test_the_default_stays_where_everything_else_is_worse(seed: int) -> None:
    at = shares(DEFAULT)
    tuner = Tuner(SPACE, DEFAULT, seed=seed, max_trials=20)
    search(tuner, bowl(*at), np.random.default_rng(seed), sd=0.1)
    assert bowl(*at)(tuner.best()) <= 1.01 * bowl(*at)(DEFAULT)


@pytest.mark.parametrize("seed", range(4))
def test_a_cliff_costs_little(seed: int) -> None:
    surface, rng, lost = cliff(0.5), np.random.default_rng(seed), 0.0
    tuner = Tuner(SPACE, DEFAULT, seed=seed, max_trials=20)
    while not tuner.done:
        trial = tuner.ask()
        samples = measured(surface, trial.knobs, rng)
        cut = float(np.median(samples[:3])) > trial.limit
        samples = samples[:3] if cut else samples
        lost += max(0.0, surface(trial.knobs) / surface(DEFAULT) - 1.0) * len(samples)
        tuner.tell(trial.id, samples, "aborted" if cut else "ok")
    assert lost < 0.025 * 2000  # steps
    assert surface(tuner.best()) < 0.97 * surface(DEFAULT)


def many_hosts(total: float, backward: float, latency: float) -> Surface:
    """Return a surface of 2000 tensors, steep towards small thresholds and cycles; a batch costs `latency` seconds."""

    def seconds(knobs: dict[str, Any]) -> float:
        threshold, cycle = knobs["fusion_threshold"], 1e-3 * knobs["cycle_time_ms"]
        batches = min(2000.0, max(1.0, total / threshold) + backward / cycle)
        overlapped = max(0.0, latency * batches + total / 1e9 - 0.8 * backward)
        last = min(threshold, total) / 1e9 + latency + 0.5 * cycle
        return float(backward * (1.04 if knobs["stores"] == "streaming" else 1.0) + max(last, overlapped))

    return seconds


@pytest.mark.sample(1)
@pytest.mark.parametrize("cycle", [1.0, 5.0])
@pytest.mark.parametrize("latency", [1e-3, 3e-3, 8e-3])
def test_a_search_grows_along_a_slope_where_steps_may_take_a_hundred_times_the_best(
    cycle: float, latency: float
) -> None:
    """Small tensors on many hosts: corners of the space are terrible, and the best setting is next to the slope."""
    surface, default = many_hosts(8e6, 0.2, latency), DEFAULT | {"cycle_time_ms": cycle}
    thresholds, cycles = 2.0 ** np.linspace(16, 30, 57), np.geomspace(0.05, 50.0, 121)
    settings = ({**default, "fusion_threshold": round(a), "cycle_time_ms": b} for a in thresholds for b in cycles)
    least = min(map(surface, settings))
    regrets, lost = [], []
    for seed in range(6):
        tuner = Tuner(SPACE, default, seed=seed, max_trials=30)
        search_on(tuner, surface, np.random.default_rng(seed), sd=0.05)
        regrets.append(surface(tuner.best()) / least - 1.0)
        lost.append(tuner.lost)
    assert np.median(regrets) < 0.04 and max(regrets) < 0.08
    assert max(lost) < 100  # steps; a terrible trial takes up to 3 x 100


@pytest.mark.parametrize("seed", range(3))
def test_a_drift_opens_the_search_again_and_it_finds_the_new_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    before, after = bowl(0.3, 0.3, streaming=False), bowl(0.7, 0.7, streaming=True)
    tuner = Tuner(SPACE, DEFAULT, seed=seed, max_trials=20, settings=Settings(background=0))
    search(tuner, before, rng)
    deployed = tuner.best()
    assert not any(tuner.observe(measured(before, deployed, rng)) for _ in range(40))
    assert any(tuner.observe(measured(after, deployed, rng)) for _ in range(10))
    assert not tuner.done
    assert tuner.best() == deployed  # until another setting is proven better
    assert search(tuner, after, rng) <= 15
    assert after(tuner.best()) < 1.02 * 0.1


def test_one_disturbance_is_no_drift() -> None:
    rng = np.random.default_rng(0)
    tuner = Tuner(SPACE, DEFAULT, max_trials=4, settings=Settings(background=0))
    search(tuner, flat, rng)
    for k in range(60):
        samples = measured(flat, DEFAULT, rng)
        assert not tuner.observe([10 * each for each in samples] if k % 20 == 10 else samples)


def test_equal_seeds_and_samples_give_equal_proposals() -> None:
    def proposals(seed: int) -> list[dict[str, object]]:
        rng, asked = np.random.default_rng(1), []
        tuner = Tuner(SPACE, DEFAULT, seed=seed, max_trials=12)
        while not tuner.done:
            trial = tuner.ask()
            asked.append(trial.knobs)
            tuner.tell(trial.id, measured(bowl(0.4, 0.4, True), trial.knobs, rng))
        return asked

    assert proposals(3) == proposals(3) != proposals(4)


def test_the_default_comes_first_then_what_was_best_before() -> None:
    known = {"fusion_threshold": 1 << 20, "cycle_time_ms": 5.0, "stores": "streaming"}
    tuner = Tuner(SPACE, DEFAULT, first=[known])
    first = tuner.ask()
    tuner.tell(first.id, [0.1] * 5)
    second = tuner.ask()
    assert (first.knobs, first.phase, first.limit) == (DEFAULT, "default", math.inf)
    assert second.knobs == known
    assert second.limit == pytest.approx(0.15)


@pytest.mark.parametrize("allowed", [1, 2, 3, 5])
def test_the_number_of_trials_is_kept(allowed: int) -> None:
    tuner = Tuner(SPACE, DEFAULT, max_trials=allowed)
    assert search(tuner, bowl(0.3, 0.3, True), np.random.default_rng(0)) == allowed
    with pytest.raises(RuntimeError, match="the search is over"):
        tuner.ask()


def test_trials_may_be_in_flight_at_once() -> None:
    rng, surface = np.random.default_rng(0), bowl(0.3, 0.3, True)
    tuner = Tuner(SPACE, DEFAULT, max_trials=18)
    while not tuner.done:
        flying = [tuner.ask() for _ in range(3)]
        assert len({repr(trial.knobs) for trial in flying if trial.phase == "search"}) == sum(
            trial.phase == "search" for trial in flying
        )
        for trial in reversed(flying):
            tuner.tell(trial.id, measured(surface, trial.knobs, rng))
    assert surface(tuner.best()) < surface(DEFAULT)


def test_a_trial_with_outliers_counts_as_its_usual_steps() -> None:
    rng, surface = np.random.default_rng(0), bowl(0.3, 0.3, True)
    tuner = Tuner(SPACE, DEFAULT, max_trials=20)
    while not tuner.done:
        trial = tuner.ask()
        samples = measured(surface, trial.knobs, rng)
        for k in rng.choice(30, size=4, replace=False):
            samples[k] *= 20
        tuner.tell(trial.id, samples)
    assert surface(tuner.best()) < 1.03 * 0.1


def test_a_value_that_means_off_is_tried_and_chosen() -> None:
    space = Space(cycle_time_ms=Real(0.05, 50.0, log=True, off=0.0), chunk_bytes=Integer(1, 64))

    def surface(knobs: dict[str, float]) -> float:
        return 0.1 if knobs["cycle_time_ms"] == 0.0 else 0.12 + 0.0001 * knobs["chunk_bytes"]

    tuner = Tuner(space, {"cycle_time_ms": 1.0, "chunk_bytes": 8}, max_trials=20)
    search(tuner, surface, np.random.default_rng(0))
    assert tuner.best()["cycle_time_ms"] == 0.0


def test_what_is_not_worth_it_is_not_deployed() -> None:
    surface = bowl(0.5, 0.5, streaming=False)
    tuner = Tuner(SPACE, DEFAULT, max_trials=20, settings=Settings(worth=0.5))
    search(tuner, surface, np.random.default_rng(0))
    assert tuner.best() == DEFAULT


@pytest.mark.parametrize(
    ("samples", "said"),
    [([], "no samples"), ([0.1, math.nan], "sample 1 is nan"), ([0.0], "sample 0 is 0.0"), ([math.inf], "is inf")],
)
def test_samples_that_are_no_times_are_refused(samples: list[float], said: str) -> None:
    tuner = Tuner(SPACE, DEFAULT)
    trial = tuner.ask()
    with pytest.raises(ValueError, match=f"trial 0: .*{said}|trial 0: {said}"):
        tuner.tell(trial.id, samples)
    tuner.tell(trial.id, [0.1])  # it is still waiting


def test_a_trial_is_told_once_and_only_if_asked() -> None:
    tuner = Tuner(SPACE, DEFAULT)
    trial = tuner.ask()
    with pytest.raises(ValueError, match="trial 7 is not waiting to be told; these are: 0"):
        tuner.tell(7, [0.1])
    with pytest.raises(ValueError, match="'ok' or 'aborted', not 'late'"):
        tuner.tell(trial.id, [0.1], "late")
    tuner.tell(trial.id, [0.1])
    with pytest.raises(ValueError, match="these are: none"):
        tuner.tell(trial.id, [0.1])


def test_the_search_goes_on_with_trials_of_one_sample() -> None:
    tuner = Tuner(SPACE, DEFAULT, max_trials=6)
    while not tuner.done:
        tuner.tell(tuner.ask().id, [0.1])
    assert tuner.best() == DEFAULT
