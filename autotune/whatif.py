"""Estimates of the result of another policy, or of other settings, with the measurements of a log.

A log only has samples of settings that were tried. A trial of such a setting gets these, in the order in which they
were measured: `log`. When they are used up, they are reused; a trial that was cut short in the log, but is not now, is
extended with its own few steps: `again`, which is worth less than a new measurement. For every other setting, a *model*
answers: the expectation of the tuner's surrogate of the log's trials, with deviations drawn from those of the log's
steps. The model only knows what was measured: with few data it is little more than a guess. Like the tuner, it
underestimates how bad far worse settings are.

Estimates end with the first search: after a drift, another surface was measured, and only the tuner's policy goes on
in the background.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from autotune.hindsight import load_tuner
from autotune.journal import JournalError
from autotune.log_summary import TrialLine, summarize_log
from autotune.policies import Policy
from autotune.replay import TOLERANCE
from autotune.space import Knobs
from autotune.trials import PolicyError

Source = Literal["log", "again", "model"]
FIRST = 3  # steps after which a trial can be cut short
Ratio = tuple[float, float]
"""Mean and standard deviation of the logarithm of a ratio of times."""


@dataclass(frozen=True)
class WhatIf:
    """Estimated course of another search.

    Losses are in steps against the log's default. Ratios of times are by the model.
    """

    lines: list[TrialLine]  # trials of the search; ratios are to the log's default
    sources: list[Source]  # source of the samples of each trial
    best: Knobs  # setting that the search would have deployed
    logged: Knobs  # the one that the log deployed
    of_default: Ratio  # time of `best` relative to that of the default
    of_logged: Ratio  # time of `best` relative to that of `logged`
    trials_of_best: int  # number of trials of `best` in the log
    lost: float  # lost by all trials
    lost_by_model: float  # lost by those that the model answered
    lost_in_log: float  # lost by those of the log
    drifted: bool  # whether the log goes on after the first search, after a drift or in the background
    resting: bool  # whether the search ended with trials left, because its budget was used up


@dataclass(frozen=True)
class Logged:
    """Trial of the log."""

    samples: list[float]
    cut: bool
    limit: float


class Evidence:
    """Step times of a log, up to its first drift, used to answer trials; the model draws samples with `seed`.

    Raises JournalError if no trial has a result.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], seed: int) -> None:
        self.tuner = load_tuner(rows)
        if not self.tuner.history:
            raise JournalError("the log ends before a trial was told: there is nothing to answer from")
        self._rng = np.random.default_rng([seed, 8])
        limits = {row["id"]: row.get("limit", math.inf) for row in rows if row["row"] == "ask"}
        self._logged: dict[bytes, list[Logged]] = {}
        for told in self.tuner.history:
            trial = Logged(told.samples, told.status == "aborted", limits[told.trial.id])
            self._logged.setdefault(told.x.tobytes(), []).append(trial)
        whole = [told for told in self.tuner.history if told.status == "ok"] or self.tuner.history
        self._steps = int(np.median([len(told.samples) for told in whole]))
        self._deviations = np.concatenate([np.log(told.samples) - told.score.log for told in whole])
        self._given: Counter[bytes] = Counter()
        default = [told for told in self.tuner.history if told.trial.knobs == self.tuner.default]
        #: Seconds of the default in its first trial, same as in the log's summary.
        self.reference = math.exp((default or self.tuner.history)[0].score.log)

    def count_trials(self, knobs: Mapping[str, Any]) -> int:
        """Return the number of trials of a setting in the log."""
        return len(self._logged.get(self.tuner.space.encode(knobs).tobytes(), ()))

    def answer_trial(self, knobs: Mapping[str, Any], limit: float) -> tuple[list[float], str, Source]:
        """Return the samples of a trial, its status, and their source."""
        at = self.tuner.space.encode(knobs).tobytes()
        logged, turn = self._logged.get(at), self._given[at]
        self._given[at] += 1
        if logged is None:
            return *_cut_samples(self._draw_samples(knobs), limit), "model"
        trial = logged[turn % len(logged)]
        source: Source = "log" if turn < len(logged) else "again"
        lower = limit < trial.limit * (1.0 - TOLERANCE)
        if not trial.cut:
            return *(_cut_samples(trial.samples, limit) if lower else (trial.samples, "ok")), source
        higher = limit > trial.limit * (1.0 + TOLERANCE)
        if not higher or float(np.median(trial.samples)) > limit:
            return trial.samples, "aborted", source
        more = self._rng.choice(trial.samples, max(0, self._steps - len(trial.samples)))
        return [*trial.samples, *more.tolist()], "ok", "again"

    def compare_settings(self, one: Knobs, other: Knobs) -> Ratio:
        """Return the ratio of the times of two settings by the model, as mean and deviation of its logarithm."""
        return (0.0, 0.0) if one == other else self.tuner.predict_difference(one, other)

    def _draw_samples(self, knobs: Mapping[str, Any]) -> list[float]:
        mean, _ = self.tuner.predict([knobs])
        first = self.tuner.history[0].score.log  # beliefs are relative to it
        drawn = self._rng.choice(self._deviations, self._steps)
        return [float(each) for each in np.exp(first + mean[0] + drawn)]


def run_what_if(rows: Sequence[dict[str, Any]], policy: Policy, name: str, seed: int, max_trials: int) -> WhatIf:
    """Let a policy without trials search with the answers of a log; `name` is for errors.

    The model draws samples with `seed`. Raises JournalError if the log has no completed trial. Raises PolicyError if
    the policy asks for or deploys a setting outside the space, or asks for more than `max_trials`.
    """
    mine = select_first_search(rows)
    evidence = Evidence(mine, seed)
    space = evidence.tuner.space
    made: list[dict[str, Any]] = [mine[0]]
    sources: list[Source] = []

    def check_knobs(knobs: Mapping[str, Any], what: str) -> Knobs:
        try:
            return space.check(knobs, f"--policy {name}: {what}")
        except ValueError as error:
            raise PolicyError(str(error)) from None

    while not policy.done:
        if len(sources) == max_trials:
            raise PolicyError(f"--policy {name} has asked for {max_trials} trials, as many as it may, and is not done")
        trial = policy.ask()
        knobs = check_knobs(trial.knobs, f"trial {len(sources)}")
        samples, status, source = evidence.answer_trial(knobs, getattr(trial, "limit", math.inf))
        sources.append(source)
        asked = {"phase": getattr(trial, "phase", ""), "why": getattr(trial, "why", "")}
        made += [
            {"row": "ask", "id": trial.id, "knobs": knobs, **asked},
            {"row": "tell", "id": trial.id, "status": status, "samples": samples},
        ]
        policy.tell(trial.id, samples, status)
    best, logged = check_knobs(policy.best(), "what it deploys"), evidence.tuner.best()
    lines = _scale_ratios(summarize_log(made).lines, evidence.reference)
    lost = [_compute_loss(line) for line in lines]
    return WhatIf(
        lines=lines,
        sources=sources,
        best=best,
        logged=logged,
        of_default=evidence.compare_settings(best, evidence.tuner.default),
        of_logged=evidence.compare_settings(best, logged),
        trials_of_best=evidence.count_trials(best),
        lost=sum(lost),
        lost_by_model=sum(steps for steps, source in zip(lost, sources, strict=True) if source == "model"),
        lost_in_log=sum(map(_compute_loss, _scale_ratios(summarize_log(mine).lines, evidence.reference))),
        drifted=len(mine) < len(rows),
        resting=getattr(policy, "resting", False) is True,
    )


def select_first_search(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a log up to its first drift, or to the first background round."""
    for k, row in enumerate(rows):
        if row["row"] == "decide":
            ended = any(each.get("final") for each in rows[:k])
            if row["decision"] == "reopen" or (row["decision"] == "resume" and ended):
                return list(rows[:k])
    return list(rows)


def _cut_samples(samples: list[float], limit: float) -> tuple[list[float], str]:
    """Return the samples that a trial would have had under a limit, and its status."""
    if float(np.median(samples[:FIRST])) > limit:
        return samples[:FIRST], "aborted"
    return samples, "ok"


def _scale_ratios(lines: Sequence[TrialLine], reference: float) -> list[TrialLine]:
    return [replace(line, ratio=line.seconds / reference) for line in lines]


def _compute_loss(line: TrialLine) -> float:
    """Return the loss in steps of the default; 0 for a trial without a result."""
    return max(0.0, line.ratio - 1.0) * line.samples if line.samples else 0.0
