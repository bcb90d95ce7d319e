"""Summary of a log: trials with their scores, decisions with their reasons, and the cost of the search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from autotune.account import MOST, compute_excesses
from autotune.score import USUAL, TrialScore, estimate_scale
from autotune.space import Knobs
from autotune.trials import make_setting_key

MOST_SETTLING = 1 << 20  # maximum steps after a change; a damaged log may have more


@dataclass(frozen=True)
class TrialLine:
    """One trial of a log."""

    id: int
    epoch: int
    phase: str
    knobs: Knobs
    why: str
    status: str = "running"
    seconds: float = math.nan  # robust time per step, or another score; NaN before there are samples
    error: float = math.nan  # standard error of `seconds`
    ratio: float = math.nan  # time relative to the setting at the start of this search; below 1 is faster
    samples: int = 0
    exposed: float = math.nan  # share of a step spent waiting for communication; NaN: not measured
    lost: float = 0.0  # steps lost against the standing setting (`account.compute_steps_lost`)


@dataclass
class LogSummary:
    """Trials and decisions of a log, in order."""

    lines: list[TrialLine] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    observed: int = 0
    final: dict[str, Any] | None = None  # last decision that ended a search; None as long as it goes on
    lost: float = 0.0  # seconds lost by trials slower than the standing setting, over the same number of steps
    saved: float = 0.0  # seconds gained by trials that were faster
    spent: float = 0.0

    def compute_best_so_far(self) -> list[float]:
        """Return after each trial the least ratio measured in its epoch so far."""
        best: list[float] = []
        for line in self.lines:
            before = best[-1] if best and self.lines[len(best) - 1].epoch == line.epoch else math.inf
            best.append(min(before, line.ratio) if line.status == "ok" else before)
        return best

    def compute_lost_so_far(self) -> list[float]:
        """Return after each trial the steps lost by all trials so far."""
        return list(accumulate(line.lost for line in self.lines))


def summarize_log(rows: Sequence[dict[str, Any]]) -> LogSummary:
    """Collect the trials and decisions of a log's rows."""
    summary, asked, epoch = LogSummary(), {}, 0
    standing: dict[int, float] = {}
    stood: list[Knobs] = []  # the standing setting of each line
    now: Knobs = rows[0].get("default", {})
    rested = False
    spreads: list[float] = []
    errors: dict[int, float] = {}  # standard error of each line with a result, as computed by the policy
    for row in rows:
        if row["row"] == "ask":
            asked[row["id"]] = len(summary.lines)
            stood.append(now)
            summary.lines.append(TrialLine(row["id"], epoch, row["phase"], row["knobs"], row["why"]))
        elif row["row"] == "tell" and row["id"] in asked:
            k = asked.pop(row["id"])
            samples = np.asarray(row["samples"], dtype=np.float64)
            score = TrialScore(row["samples"], float(np.median(spreads)) if spreads else USUAL)
            seconds = math.exp(score.log)
            error = estimate_scale(samples) / math.sqrt(0.95 * len(samples)) if len(samples) > 2 else math.nan
            spreads.append(score.spread)
            errors[k] = score.error
            before = summary.lines[k]
            reference = standing.setdefault(before.epoch, seconds)
            summary.lines[k] = replace(
                before,
                status=row["status"],
                seconds=seconds,
                error=error,
                ratio=seconds / reference,
                samples=len(samples),
                exposed=row.get("exposed", math.nan),
            )
            summary.spent += float(samples.sum())
        elif row["row"] == "observe":
            summary.observed += 1
        elif row["row"] == "decide":
            summary.decisions.append({**row, "last": summary.lines[-1].id if summary.lines else None})
            summary.final = row if row.get("final") else summary.final
            if row["decision"] == "reopen":
                epoch, summary.final = epoch + 1, None
            if row["decision"] == "reopen" or (row["decision"] == "resume" and not rested):
                now = row["knobs"]
            rested = row["decision"] == "rest"
    _set_losses(summary, stood, errors, _read_settling_steps(rows[0]))
    return summary


def _read_settling_steps(opened: Mapping[str, Any]) -> int:
    """Return the steps after each change that no trial counts, from a log's first row; 0 in older logs."""
    value = opened.get("settings", {}).get("settling")
    return value if type(value) is int and 0 <= value <= MOST_SETTLING else 0


def _set_losses(summary: LogSummary, stood: Sequence[Knobs], errors: Mapping[int, float], settling: int) -> None:
    """Set the loss of each trial against its standing setting."""
    for epoch in {line.epoch for line in summary.lines}:
        mine = [k for k, line in enumerate(summary.lines) if line.epoch == epoch and line.samples]
        lines = [summary.lines[k] for k in mine]
        logs = [math.log(line.seconds) for line in lines]
        standing = [make_setting_key(stood[k]) for k in mine]
        settings = [make_setting_key(line.knobs) for line in lines]
        excess = compute_excesses(settings, standing, logs, [errors[k] for k in mine])
        for k, line, slower in zip(mine, lines, excess, strict=True):
            took = line.samples + settling
            steps = math.expm1(min(slower, MOST)) * took
            seconds = -math.expm1(-slower) * line.seconds * took
            summary.lines[k] = replace(line, lost=max(0.0, steps))
            summary.lost += max(0.0, seconds)
            summary.saved += max(0.0, -seconds)
