"""Runs of every contender on every surface with every noise, for many seeds, and of the tuner on changing surfaces."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.autotune import drift, recorded
from benchmarks.autotune.contenders import CONTENDERS, HOROVODS, Array
from benchmarks.autotune.problems import cut_short, make_problem, select_noises
from benchmarks.autotune.surfaces import NOISES, SURFACES
from benchmarks.common import binding, environment, progress, records

HORIZON = 2000
"""Steps of the run of which the time lost by trials is a share."""
PARTS = ("searches", "drifts")
KEYS = {"searches": ("surface", "noise", "contender"), "drifts": ("surface", "noise", "kind")}
"""Fields that identify a row of a part: a new row replaces an old one with the same values."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
SAME = ("trials", "steps", "observed")
"""Settings that must be equal for figures in one table."""


def list_surfaces() -> tuple[str, ...]:
    """Return the names of all surfaces: synthetic ones, and those recorded on jobs."""
    return (*SURFACES, *recorded.list_names())


@dataclass(frozen=True)
class AutotuneSettings:
    """Cases to try, and the number of repetitions."""

    parts: tuple[str, ...] = PARTS
    surfaces: tuple[str, ...] = field(default_factory=list_surfaces)
    noises: tuple[str, ...] = tuple(noise.name for noise in NOISES)
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    seeds: int = 30
    flat_seeds: int = 150
    trials: int = 20  # trials of a search
    steps: int = 30  # steps of a trial
    observed: int = 2000  # maximum steps that are observed after a search, in which a drift may be noticed

    def list_searches(self) -> list[tuple[str, str, str, int]]:
        """Return each surface, noise, contender and seed."""
        return [
            (surface, noise, contender, seed)
            for surface in self.surfaces
            for noise in select_noises(surface, self.noises)
            for contender in self.contenders
            if contender != "horovod" or set(HOROVODS) <= make_problem(surface, noise, 0).space.knobs.keys()
            for seed in range(self.flat_seeds if surface == "flat" and contender == "ours" else self.seeds)
        ]

    def list_drifts(self) -> list[tuple[str, str, str, int]]:
        """Return each surface, noise, kind of change and seed, for our tuner only, as no other notices changes."""
        return [
            (surface, noise, kind, seed)
            for surface in drift.DRIFTING
            for noise in self.noises
            for kind in drift.KINDS
            for seed in range(self.seeds)
        ]


def run_search(settings: AutotuneSettings, surface: str, noise: str, contender: str, seed: int) -> dict[str, Any]:
    """Run one search. Regret and loss are those of the surface itself, without noise."""
    given = make_problem(surface, noise, seed)
    rng = np.random.default_rng([seed, 7])
    standing, lost, worst, spent, trials = given.seconds(given.default), 0.0, 1.0, 0.0, 0

    def measure_setting(knobs: dict[str, Any], limit: float) -> tuple[Array, bool]:
        nonlocal lost, worst, spent, trials
        begun = time.process_time()
        samples, cut = cut_short(given.steps(knobs, settings.steps, rng), limit)
        seconds = given.seconds(knobs)
        lost += max(0.0, seconds - standing) * len(samples)
        worst, trials = max(worst, seconds / standing), trials + 1
        spent += time.process_time() - begun
        return samples, cut

    begun = time.process_time()
    chosen = CONTENDERS[contender](given, seed, settings.trials, measure_setting)
    thinking = time.process_time() - begun - spent
    return {
        "surface": surface,
        "noise": noise,
        "contender": contender,
        "seed": seed,
        "regret": given.seconds(chosen) / given.least - 1.0,
        "default_regret": standing / given.least - 1.0,
        "lost": lost / (HORIZON * standing),
        "worst": worst,
        "trials": trials,
        "changed": chosen != given.default,
        "seconds_a_trial": thinking / trials,
    }


def run_drift(settings: AutotuneSettings, surface: str, noise: str, kind: str, seed: int) -> dict[str, Any]:
    """Run one search on a surface that changes, or that does not."""
    return drift.run_search(surface, noise, kind, seed, settings.trials, settings.steps, settings.observed, HORIZON)


Job = tuple[str, Callable[..., dict[str, Any]], tuple[str, str, str, int]]


def run(settings: AutotuneSettings, console: Console, merge: bool = False) -> Path:
    """Run the searches, and write `out/autotune.json`.

    Rows of the file for other surfaces, noises, contenders and kinds are kept with `merge`. Raises ValueError if they
    have other numbers of trials or steps.
    """
    kept = _read_record(settings) if merge else None
    before = environment.record()
    begun = time.perf_counter()
    jobs: list[Job] = []
    if "searches" in settings.parts:
        jobs += [("searches", run_search, case) for case in settings.list_searches()]
    if "drifts" in settings.parts:
        jobs += [("drifts", run_drift, case) for case in settings.list_drifts()]
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    with _start_pool() as pool, progress.show_progress(console, "searches", len(jobs)) as advance:
        running = {pool.submit(work, settings, *case): part for part, work, case in jobs}
        for each in as_completed(running):
            row = each.result()
            found[running[each]].append(row)
            advance(f"{row['surface']}, {row.get('contender') or row['kind']}")
    made = {"command": before["command"], "revision": before["revision"], "date": before["date"]}
    made["seconds"] = round(time.perf_counter() - begun, 1)
    runs = [made]
    if kept is not None:
        found = {part: _merge_rows(part, kept[part], found[part]) for part in PARTS}
        runs = [*kept["runs"], made]
    content = {
        part: sorted(found[part], key=lambda row: (*(row[key] for key in KEYS[part]), row["seed"])) for part in PARTS
    }
    seconds = sum(run["seconds"] for run in runs)
    return records.write("autotune", asdict(settings), before, {**content, "runs": runs, "seconds": seconds})


@contextlib.contextmanager
def _start_pool() -> Iterator[ProcessPoolExecutor]:
    """Start processes of one thread each, like the tuner's own: more threads would compete with other searches."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        # Use spawn, since libraries read the variables when they are loaded.
        context = multiprocessing.get_context("spawn")
        count = len(binding.list_processors())
        with ProcessPoolExecutor(count, context, recorded.set_folder, (recorded.FOLDER,)) as pool:
            yield pool
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _read_record(settings: AutotuneSettings) -> dict[str, Any] | None:
    """Return the last record, if there is one."""
    content = records.read("autotune")
    if content is None:
        return None
    for name in SAME:
        if content["settings"].get(name) != getattr(settings, name):
            there = content["settings"].get(name)
            raise ValueError(f"the last run has {name}={there}, this one {getattr(settings, name)}: they do not merge")
    return content


def _merge_rows(part: str, old: Iterable[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def make_key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in KEYS[part])

    again = set(map(make_key, new))
    return [*(row for row in old if make_key(row) not in again), *new]
