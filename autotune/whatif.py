"""Estimates of what another policy, or other settings, would have done with the measurements of a log.

A log has samples only of what was tried. A trial of such a setting is answered with these, in the order in which they
were measured: `log`. When they are used up they are given again, and a trial that was cut short in the log and is
not now is drawn out with its own few steps: `again`, which is less than a new measurement. Of every other setting a
*model* stands in: what the tuner's surrogate of the log's trials expects, and around it deviations drawn from those of
the log's steps. The model knows only what was measured: where that was little, it is little more than a guess, and as
the tuner does, it holds settings that are far worse for less bad than they are.

Everything here ends with the first search: after a drift another surface was measured, and in the background no policy
but the tuner's goes on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from autotune.hindsight import after
from autotune.journal import JournalError
from autotune.log_summary import Line, tell
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
    """The estimated course of another search.

    Attributes
    ----------
    lines : list of Line
        Its trials; ratios are to the log's default.
    sources : list of str
        Where the samples of each come from.
    best, logged : dict
        The setting that it would have deployed, and the one that the log deployed.
    of_default, of_logged : (float, float)
        Time of `best` over that of the default and over that of `logged`, by the model: mean and standard deviation
        of the logarithm.
    trials_of_best : int
        Trials of `best` that the log has.
    lost, lost_by_model, lost_in_log : float
        Steps lost against the default: by all trials, by those that the model answered, by those of the log.
    drifted : bool
        Whether the log goes on, after a drift or in the background.
    resting : bool
        Whether the search has ended with trials left, as they had lost all that they may.
    """

    lines: list[Line]
    sources: list[Source]
    best: Knobs
    logged: Knobs
    of_default: Ratio
    of_logged: Ratio
    trials_of_best: int
    lost: float
    lost_by_model: float
    lost_in_log: float
    drifted: bool
    resting: bool


@dataclass(frozen=True)
class Logged:
    """A trial of the log."""

    samples: list[float]
    cut: bool
    limit: float


class Evidence:
    """The times per step that a log knows, as answers to trials.

    Parameters
    ----------
    rows : sequence of dict
        Rows of a log, up to the first drift.
    seed : int
        Seed of the samples that the model draws.

    Raises
    ------
    JournalError
        No trial has a result.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], seed: int) -> None:
        self.tuner = after(rows)
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
        #: Seconds of the default: of its first trial, as the story of the log has it.
        self.reference = math.exp((default or self.tuner.history)[0].score.log)

    def trials_of(self, knobs: Mapping[str, Any]) -> int:
        """Trials of a setting in the log."""
        return len(self._logged.get(self.tuner.space.encode(knobs).tobytes(), ()))

    def answer(self, knobs: Mapping[str, Any], limit: float) -> tuple[list[float], str, Source]:
        """Samples of a trial, its status, and where they come from."""
        at = self.tuner.space.encode(knobs).tobytes()
        logged, turn = self._logged.get(at), self._given[at]
        self._given[at] += 1
        if logged is None:
            return *_cut(self._modelled(knobs), limit), "model"
        trial = logged[turn % len(logged)]
        source: Source = "log" if turn < len(logged) else "again"
        lower = limit < trial.limit * (1.0 - TOLERANCE)
        if not trial.cut:
            return *(_cut(trial.samples, limit) if lower else (trial.samples, "ok")), source
        higher = limit > trial.limit * (1.0 + TOLERANCE)
        if not higher or float(np.median(trial.samples)) > limit:
            return trial.samples, "aborted", source
        more = self._rng.choice(trial.samples, max(0, self._steps - len(trial.samples)))
        return [*trial.samples, *more.tolist()], "ok", "again"

    def compare(self, one: Knobs, other: Knobs) -> Ratio:
        """Of the time of a setting to that of another, as the model has it."""
        return (0.0, 0.0) if one == other else self.tuner.difference(one, other)

    def _modelled(self, knobs: Mapping[str, Any]) -> list[float]:
        mean, _ = self.tuner.believe([knobs])
        first = self.tuner.history[0].score.log  # what is believed is relative to it
        drawn = self._rng.choice(self._deviations, self._steps)
        return [float(each) for each in np.exp(first + mean[0] + drawn)]


def what_if(rows: Sequence[dict[str, Any]], policy: Policy, name: str, seed: int, max_trials: int) -> WhatIf:
    """Let a policy search with the answers of a log.

    Parameters
    ----------
    rows : sequence of dict
        What `autotune.journal.read` gives.
    policy : Policy
        Fresh.
    name : str
        Of it, for errors.
    seed : int
        Of what the model draws.
    max_trials : int
        That the policy may ask for.

    Raises
    ------
    JournalError
        The log has no trial that was told.
    PolicyError
        The policy asks for, or deploys, a setting outside of the space, or asks for too many.
    """
    mine = first_search(rows)
    evidence = Evidence(mine, seed)
    space = evidence.tuner.space
    made: list[dict[str, Any]] = [mine[0]]
    sources: list[Source] = []

    def checked(knobs: Mapping[str, Any], what: str) -> Knobs:
        try:
            return space.check(knobs, f"--policy {name}: {what}")
        except ValueError as error:
            raise PolicyError(str(error)) from None

    while not policy.done:
        if len(sources) == max_trials:
            raise PolicyError(f"--policy {name} has asked for {max_trials} trials, as many as it may, and is not done")
        trial = policy.ask()
        knobs = checked(trial.knobs, f"trial {len(sources)}")
        samples, status, source = evidence.answer(knobs, getattr(trial, "limit", math.inf))
        sources.append(source)
        asked = {"phase": getattr(trial, "phase", ""), "why": getattr(trial, "why", "")}
        made += [
            {"row": "ask", "id": trial.id, "knobs": knobs, **asked},
            {"row": "tell", "id": trial.id, "status": status, "samples": samples},
        ]
        policy.tell(trial.id, samples, status)
    best, logged = checked(policy.best(), "what it deploys"), evidence.tuner.best()
    lines = _against(tell(made).lines, evidence.reference)
    lost = [_lost(line) for line in lines]
    return WhatIf(
        lines=lines,
        sources=sources,
        best=best,
        logged=logged,
        of_default=evidence.compare(best, evidence.tuner.default),
        of_logged=evidence.compare(best, logged),
        trials_of_best=evidence.trials_of(best),
        lost=sum(lost),
        lost_by_model=sum(steps for steps, source in zip(lost, sources, strict=True) if source == "model"),
        lost_in_log=sum(map(_lost, _against(tell(mine).lines, evidence.reference))),
        drifted=len(mine) < len(rows),
        resting=getattr(policy, "resting", False) is True,
    )


def first_search(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a log up to its first drift, or to where the search begins to go on in the background."""
    for k, row in enumerate(rows):
        if row["row"] == "decide":
            ended = any(each.get("final") for each in rows[:k])
            if row["decision"] == "reopen" or (row["decision"] == "resume" and ended):
                return list(rows[:k])
    return list(rows)


def _cut(samples: list[float], limit: float) -> tuple[list[float], str]:
    """The samples that a trial would have had under a limit."""
    if float(np.median(samples[:FIRST])) > limit:
        return samples[:FIRST], "aborted"
    return samples, "ok"


def _against(lines: Sequence[Line], reference: float) -> list[Line]:
    return [replace(line, ratio=line.seconds / reference) for line in lines]


def _lost(line: Line) -> float:
    """Steps of the default; a trial that was not told has no ratio."""
    return max(0.0, line.ratio - 1.0) * line.samples if line.samples else 0.0
