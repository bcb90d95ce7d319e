"""Regret of a search in hindsight, by the surrogate at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autotune.log_summary import LogSummary
from autotune.policy import Tuner
from autotune.replay import create_tuner


def load_tuner(rows: Sequence[dict[str, Any]]) -> Tuner:
    """Return a tuner with default settings that has learned from a log's trials."""
    tuner = create_tuner({**rows[0], "settings": {}})
    tuner.load(rows)
    return tuner


def find_search_ends(rows: Sequence[dict[str, Any]]) -> Iterator[int]:
    """Yield the number of rows up to the end of each search: before each drift, and at the end of the log."""
    yield from (k for k, row in enumerate(rows) if row["row"] == "decide" and row["decision"] == "reopen")
    yield len(rows)


def compute_regrets(rows: Sequence[dict[str, Any]], summary: LogSummary) -> list[float]:
    """Return the regret after each trial: excess time of the best setting measured so far over the best one tried.

    It is a share, by the surrogate at the end of the same search; NaN as long as no trial has a result.
    """
    found: list[float] = []
    for epoch, end in enumerate(find_search_ends(rows)):
        lines = [line for line in summary.lines if line.epoch == epoch]
        told = [line.knobs for line in lines if line.samples]
        if not told:
            found += [math.nan] * len(lines)
            continue
        tuner = load_tuner(rows[:end])
        least = float(tuner.predict(told)[0].min())
        best = None
        for line in lines:
            if line.status == "ok" and (best is None or line.ratio < best.ratio):
                best = line
            here = math.nan if best is None else max(0.0, float(np.expm1(tuner.predict([best.knobs])[0][0] - least)))
            found.append(here)
    return found
