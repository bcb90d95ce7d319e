"""Budget of a search: what trials may lose, and how a search resumes after a terrible setting and in the background."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from autotune import Choice, Integer, Real, Settings, Space, Tuner
from autotune.account import compute_excesses, compute_steps_lost
from autotune.budget import Budget
from autotune.design import build_corners, build_orthogonal_array
from autotune.log_summary import summarize_log
from autotune.replay import replay_log

from .surfaces import DEFAULT, SPACE, flat, measured, search, shares


def terrible(knobs: dict[str, Any]) -> float:
    """Return step times: 30 times the best for long cycle times and small thresholds, nearly twice for the default."""
    a, b, _ = shares(knobs)
    return 3.0 if a < 0.25 or b > 0.8 else 0.1 * (1 + 6.0 * (a - 0.45) ** 2 + 3.0 * (b - 0.15) ** 2)


def watched(tuner: Tuner, surface: Callable[[dict[str, Any]], float], rng: np.random.Generator, steps: int) -> int:
    """Run a job for some steps, with the searches it starts, and return how many were started."""
    found = 0
    for _ in range(steps // 50):
        if tuner.observe(measured(surface, tuner.best(), rng, 0.06, 20), 50):
            found += 1
            search(tuner, surface, rng, 0.06)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_terrible_setting_costs_time_and_not_the_search(seed: int) -> None:
    rng, rows = np.random.default_rng(seed), []
    tuner = Tuner(SPACE, DEFAULT, seed=seed, max_trials=20, journal=rows.append)
    search(tuner, terrible, rng, 0.06)
    watched(tuner, terrible, rng, 8000)
    assert terrible(tuner.best()) < 1.1 * 0.1 < 0.65 * terrible(DEFAULT)
    lost = sum(line.lost for line in summarize_log(rows).lines)
    assert lost < 40 + 0.02 * 8000 + 20 + 2 * 3 * 29


@pytest.mark.parametrize("spent", [0.0, 30.0, 60.0])
def test_what_earlier_searches_of_a_job_have_lost_is_not_lost_once_more(spent: float) -> None:
    """The worlds of an elastic job together lose at most what one search may, except for surprises."""
    rng, rows = np.random.default_rng(2), []
    tuner = Tuner(
        SPACE, DEFAULT, seed=2, max_trials=20, settings=Settings(spent=spent, background=0), journal=rows.append
    )
    search(tuner, terrible, rng, 0.06)
    assert replay_log(rows).exact
    assert tuner.lost == pytest.approx(sum(line.lost for line in summarize_log(rows).lines))
    allowance = 40.0
    if spent > 1.5 * allowance - 1:
        assert tuner.resting and len(tuner.history) <= 2  # only the setting in force was tried
    else:
        assert tuner.lost + spent <= allowance + 40  # surprises, such as 29 times the limit in three steps


def test_a_search_that_rests_goes_on_when_the_steps_of_the_job_allow_it() -> None:
    rows: list[dict[str, Any]] = []
    tuner = Tuner(SPACE, DEFAULT, max_trials=20, journal=rows.append)
    tuner.tell(tuner.ask().id, [0.1] * 10)
    while not tuner.done:
        tuner.tell(tuner.ask().id, [3.0] * 3, "aborted")  # loses 145 steps each time, including those after the change
    assert tuner.resting and len(tuner.history) == 2 and tuner.best() == DEFAULT
    assert (rows[-1]["decision"], "final" in rows[-1]) == ("rest", False)
    assert not tuner.observe([0.1] * 20, 1000)
    assert tuner.observe([0.1] * 20, 8000)  # by then 2 % of the job's steps are more than the 145 that were lost
    assert not tuner.resting and rows[-1]["decision"] == "resume"
    # The remaining settings of the design have moved half way towards the default.
    home = shares(DEFAULT)
    for at in (shares(tuner.ask().knobs) for _ in range(2)):
        assert abs(at[0] - home[0]) < 0.5 and abs(at[1] - home[1]) < 0.5


MINUTE, STEP = 60.0, 0.05  # seconds


def best_default(knobs: dict[str, Any]) -> float:
    """Return step times to which the default is best, so that a search cannot win."""
    (a, b, streaming), (home, there, _) = shares(knobs), shares(DEFAULT)
    return STEP * (1 + 1.5 * (a - home) ** 2 + 1.5 * (b - there) ** 2 + 0.04 * streaming)


def busy_steps(seconds: float, n: int, rng: np.random.Generator) -> list[float]:
    """Return the times of steps on a busy machine: 10 % noise, and one step in ten much too slow."""
    slow = np.abs(rng.normal(0.0, 0.4, n)) * (rng.random(n) < 0.1)
    return [float(each) for each in seconds * np.exp(rng.normal(0.0, 0.1, n) + slow)]


@pytest.mark.parametrize("seed", range(6))
def test_a_search_that_cannot_win_costs_a_job_of_a_minute_two_percent_and_says_so(seed: int) -> None:
    """The loss is computed from the surface without noise, so it is what the job has truly lost.

    The bound adds ten steps to 2 %: for the last trial's loss before it is cut short, and for the error of the
    default's time on a busy machine.
    """
    rng, rows, clock, lost = np.random.default_rng(seed), [], 0.0, 0.0
    tuner = Tuner(SPACE, DEFAULT, seed=seed, max_trials=53, journal=rows.append)
    while clock < MINUTE:
        if tuner.done:
            clock += 200 * STEP
            tuner.observe(busy_steps(best_default(tuner.best()), 20, rng), 200)
            continue
        trial = tuner.ask()
        seconds = best_default(trial.knobs)
        samples = busy_steps(seconds, 20, rng)
        cut = float(np.median(samples[:3])) > trial.limit
        samples = samples[:3] if cut else samples
        clock += seconds * (len(samples) + 2)
        lost += (seconds - STEP) * (len(samples) + 2)
        tuner.tell(trial.id, samples, "aborted" if cut else "ok")
    assert lost <= 0.02 * MINUTE + 10 * STEP
    assert tuner.best() == DEFAULT
    ended = [row["because"] for row in rows if row["row"] == "decide" and row["decision"] == "rest"]
    assert all("the search ended: its trials have lost the time of" in because for because in ended)
    assert ended or any(row["row"] == "decide" and row["decision"] == "finish" for row in rows)
    assert replay_log(rows).exact


def test_a_search_rests_when_less_is_left_than_a_trial_may_lose_that_is_not_cut_short() -> None:
    def budget(cost: float, usual: float, doubt: float = 0.0) -> Budget:
        return Budget(Settings(), cost, doubt, 0.0, passed=100, steps=20, standing=math.log(0.05), usual=usual)

    assert budget(0.0, 0.1).allowance == pytest.approx(24.0)
    assert not budget(19.0, 0.1).overdrawn  # 5 of 24 steps are left, and a trial of 22 steps may take 20 % longer
    assert budget(20.0, 0.1).overdrawn
    assert not budget(20.0, 0.02).overdrawn  # where noise is light, a trial is cut short before it loses that
    assert budget(15.0, 0.1, doubt=5.0).overdrawn  # possible losses that are not certain count, too
    assert budget(20.0, 0.1).lacking > 0.0 and not budget(20.0, 0.1).refilled


def test_no_chance_cuts_the_default_short() -> None:
    """Three slow steps of a default cut short would make all other settings look faster than they are."""
    tuner = Tuner(SPACE, DEFAULT, max_trials=20)
    tuner.tell(tuner.ask().id, [0.1] * 20)
    design = tuner.ask()
    assert design.limit < math.inf
    tuner.tell(design.id, [0.05] * 20)
    state = tuner._state
    # The default is known to be slow: not worth a whole trial.
    assert state.compute_limit(DEFAULT, bounded=False) == pytest.approx(0.075)
    quick = Tuner(SPACE, DEFAULT, max_trials=20)
    quick.tell(quick.ask().id, [0.1] * 20)
    quick.tell(quick.ask().id, [0.09] * 20)
    assert quick._state.compute_limit(DEFAULT, bounded=False) == math.inf


def test_where_only_two_large_values_together_help_they_are_found() -> None:
    def together(knobs: dict[str, Any]) -> float:
        a, b, c = shares(knobs)
        return (0.1 if a > 0.75 and b > 0.75 else 0.4) * (1.0 + 0.02 * c)

    for seed in range(6):
        tuner = Tuner(SPACE, DEFAULT, seed=seed, max_trials=20)
        search(tuner, together, np.random.default_rng(seed), 0.08)
        assert together(tuner.best()) < 0.11


@pytest.mark.slow
def test_a_long_job_searches_on_and_its_log_is_reproduced() -> None:
    def dent(knobs: dict[str, Any]) -> float:
        a, b, _ = shares(knobs)
        return 0.1 * (1.1 - 0.1 * math.exp(-((a - 0.4) ** 2 + (b - 0.6) ** 2) / 0.1))

    rng, rows = np.random.default_rng(0), []
    tuner = Tuner(SPACE, DEFAULT, max_trials=6, journal=rows.append)
    search(tuner, dent, rng, 0.06)
    before = dent(tuner.best())
    assert watched(tuner, dent, rng, 12_000) > 4
    assert dent(tuner.best()) < 1.03 * 0.1 < before
    assert len(summarize_log(rows).lines) < 150
    assert replay_log([{**row, "n": k} for k, row in enumerate(rows)]).decisions > 8


def test_rounds_become_rarer_and_leave_the_default_where_nothing_matters() -> None:
    rng, tuner = np.random.default_rng(0), Tuner(SPACE, DEFAULT, max_trials=8)
    search(tuner, flat, rng, 0.06)
    rounds = [watched(tuner, flat, rng, 5000) for _ in range(2)]
    assert rounds[1] <= rounds[0] and tuner.best() == DEFAULT
    alone = Tuner(SPACE, DEFAULT, max_trials=8, settings=Settings(background=0))
    search(alone, flat, rng, 0.06)
    assert watched(alone, flat, rng, 5000) == 0


@pytest.mark.slow
def test_a_round_replaces_what_is_better_than_the_default_by_what_is_better_still() -> None:
    """Three percent are too little on a busy machine to prove a setting better, as replacing the default requires."""
    space = Space(kind=Choice(["x", "y", "z"]))
    seconds = {"x": 0.2, "y": 0.1, "z": 0.097}

    def steps(knobs: dict[str, Any], rng: np.random.Generator) -> list[float]:
        return busy_steps(seconds[knobs["kind"]], 20, rng)

    found = []
    for seed in range(12):
        rng, tuner = np.random.default_rng(seed), Tuner(space, {"kind": "x"}, seed, 4, [{"kind": "y"}])
        for _ in range(41):
            while not tuner.done:
                trial = tuner.ask()
                samples = steps(trial.knobs, rng)
                cut = float(np.median(samples[:3])) > trial.limit
                tuner.tell(trial.id, samples[:3] if cut else samples, "aborted" if cut else "ok")
            tuner.observe(steps(tuner.best(), rng), 50)
        found.append(tuner.best()["kind"])
    assert "x" not in found and found.count("z") >= 10


def test_a_machine_that_becomes_slower_costs_the_trials_nothing() -> None:
    settings = ["default", "a", "default", "a", "default"]
    logs = [0.0, 0.1, math.log(1.5), math.log(1.5), math.log(1.5)]

    def lost() -> list[float]:
        return compute_steps_lost(compute_excesses(settings, ["default"] * 5, logs, [0.01] * 5), [100] * 5)

    found = lost()
    assert found == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.0], abs=0.1)
    logs[3] = math.log(3.0)
    assert lost()[3] == pytest.approx(100.0, rel=0.01)
    logs = [0.04, 0.05, -0.03, 0.05, 0.02]  # noise of the default does not mean that the machine is slower
    noisy = compute_steps_lost(compute_excesses(settings, ["default"] * 5, logs, [0.04] * 5), [100] * 5)
    assert noisy[1] == noisy[3] == pytest.approx(100 * math.expm1(0.04))


@pytest.mark.parametrize("knobs", range(2, 9))
def test_every_two_knobs_meet_in_all_combinations(knobs: int) -> None:
    high = build_orthogonal_array(knobs)
    assert len(high) <= 2 * max(2, knobs)
    assert all(len({(row[a], row[b]) for row in high.tolist()}) == 4 for a, b in combinations(range(knobs), 2))


def test_corners_are_settings_near_the_ends_of_the_ranges() -> None:
    space = Space(a=Real(0.1, 10.0, log=True, off=0.0), b=Integer(1, 1 << 20, log=True), c=Choice(["x", "y", "z"]))
    found = build_corners(space, 9, np.random.default_rng(0))
    assert len(found) == 4 and all(space.check(knobs) == knobs for knobs in found)
    assert {(knobs["a"] > 1.0, knobs["b"] > 1 << 10) for knobs in found} == {(x, y) for x in (0, 1) for y in (0, 1)}


def test_a_story_is_told_on_whole_lines_with_a_legend() -> None:
    from autotune.show import create_console, show_log

    rows: list[dict[str, Any]] = []
    tuner = Tuner(SPACE, DEFAULT, max_trials=6, journal=rows.append)
    search(tuner, flat, np.random.default_rng(0))
    file = io.StringIO()
    show_log(rows, create_console(file))
    lines = file.getvalue().splitlines()
    assert any("confirm, the best so far and what stood, measured again" in line for line in lines)
    assert any("fusion_threshold=128 MiB cycle_time_ms=1 stores=cached" in line for line in lines)
    assert all(line == line.rstrip() or len(line) < 200 for line in lines)
