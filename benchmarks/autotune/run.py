"""Every contender on every surface with every noise, for many seeds."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.autotune.contenders import CONTENDERS, Array
from benchmarks.autotune.surfaces import DEFAULT, NOISES, SURFACES, least
from benchmarks.common import binding, environment, progress, records

HORIZON = 2000
"""Steps of the run of which the time that trials lose is a share."""


@dataclass(frozen=True)
class Settings:
    """What to try, and how often."""

    surfaces: tuple[str, ...] = tuple(SURFACES)
    noises: tuple[str, ...] = tuple(noise.name for noise in NOISES)
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    seeds: int = 30
    flat_seeds: int = 150
    trials: int = 20
    steps: int = 30

    def cases(self) -> list[tuple[str, str, str, int]]:
        """Each surface, noise, contender and seed."""
        return [
            (surface, noise, contender, seed)
            for surface in self.surfaces
            for noise in self.noises
            for contender in self.contenders
            for seed in range(self.flat_seeds if surface == "flat" and contender == "ours" else self.seeds)
        ]


def search(settings: Settings, surface: str, noise: str, contender: str, seed: int) -> dict[str, Any]:
    """One search. Regret and loss are by the surface itself, without noise."""
    seconds = SURFACES[surface](seed)
    noisy = next(each for each in NOISES if each.name == noise)
    rng = np.random.default_rng([seed, 7])
    standing, lost, worst, spent, trials = seconds(DEFAULT), 0.0, 1.0, 0.0, 0

    def measure(knobs: dict[str, Any], limit: float) -> tuple[Array, bool]:
        nonlocal lost, worst, spent, trials
        begun = time.process_time()
        samples = noisy.steps(seconds(knobs), settings.steps, rng)
        cut = 0.0 < limit < float(np.median(samples[:3]))
        samples = samples[:3] if cut else samples
        lost += max(0.0, seconds(knobs) - standing) * len(samples)
        worst, trials = max(worst, seconds(knobs) / standing), trials + 1
        spent += time.process_time() - begun
        return samples, cut

    begun = time.process_time()
    chosen = CONTENDERS[contender](seed, settings.trials, measure)
    thinking = time.process_time() - begun - spent
    best = min(least(seconds), standing)
    return {
        "surface": surface,
        "noise": noise,
        "contender": contender,
        "seed": seed,
        "regret": seconds(chosen) / best - 1.0,
        "default_regret": standing / best - 1.0,
        "lost": lost / (HORIZON * standing),
        "worst": worst,
        "trials": trials,
        "changed": chosen != DEFAULT,
        "seconds_a_trial": thinking / trials,
    }


def run(settings: Settings, console: Console) -> Path:
    """Search, and write `out/autotune.json`."""
    before = environment.record()
    begun = time.perf_counter()
    cases = settings.cases()
    found = []
    with (
        ProcessPoolExecutor(len(binding.available())) as pool,
        progress.bar(console, "searches", len(cases)) as advance,
    ):
        running = [pool.submit(search, settings, *case) for case in cases]
        for each in as_completed(running):
            found.append(each.result())
            advance(f"{found[-1]['surface']}, {found[-1]['contender']}")
    found.sort(key=lambda row: (row["surface"], row["noise"], row["contender"], row["seed"]))
    seconds = round(time.perf_counter() - begun, 1)
    return records.write("autotune", asdict(settings), before, {"searches": found, "seconds": seconds})
