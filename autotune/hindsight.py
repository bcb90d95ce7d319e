"""Regret of a search in hindsight: by what the surrogate knows at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autotune.log_summary import Story
from autotune.policy import Tuner
from autotune.replay import tuner_of


def after(rows: Sequence[dict[str, Any]]) -> Tuner:
    """A tuner that has learnt from a log's trials, with default settings instead of the log's."""
    tuner = tuner_of({**rows[0], "settings": {}})
    tuner.load(rows)
    return tuner


def ends(rows: Sequence[dict[str, Any]]) -> Iterator[int]:
    """The number of rows up to the end of each search: that of the log, and those before a drift."""
    yield from (k for k, row in enumerate(rows) if row["row"] == "decide" and row["decision"] == "reopen")
    yield len(rows)


def regrets(rows: Sequence[dict[str, Any]], story: Story) -> list[float]:
    """After each trial, how much longer a step takes with what had measured best by then than with the best tried.

    As a share, by what the surrogate believes at the end of the same search; NaN as long as nothing was told.
    """
    found: list[float] = []
    for epoch, end in enumerate(ends(rows)):
        lines = [line for line in story.lines if line.epoch == epoch]
        told = [line.knobs for line in lines if line.samples]
        if not told:
            found += [math.nan] * len(lines)
            continue
        tuner = after(rows[:end])
        least = float(tuner.believe(told)[0].min())
        best = None
        for line in lines:
            if line.status == "ok" and (best is None or line.ratio < best.ratio):
                best = line
            here = math.nan if best is None else max(0.0, float(np.expm1(tuner.believe([best.knobs])[0][0] - least)))
            found.append(here)
    return found
