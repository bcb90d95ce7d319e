"""Tuner's fields in the page of counters: phase, trials, changes, scores."""

from __future__ import annotations

import time

from ..native import core, setup

PHASES: tuple[str, ...] = setup.codes()["phases"]


class Progress:
    """Counters of one job's tuning, over all its searches, with the engine of rank 0."""

    def __init__(self, engine: core.Engine) -> None:
        self._engine = engine
        self._searches = self._trials = self._changes = 0
        self._default = self._best = 0.0

    def enter(self, phase: str) -> None:
        """Enter one of the PHASES."""
        self._engine.tell(tuner_phase=PHASES.index(phase))

    def record_search_start(self) -> None:
        """Record the start of a search."""
        self._searches += 1
        self._default = self._best = 0.0
        self._engine.tell(tuner_searches=self._searches, tuner_default_ps=0, tuner_best_ps=0, tuner_score_ps=0)
        self.enter("searching")

    def record_change(self) -> None:
        """Record that another setting is in force."""
        self._changes += 1
        self._engine.tell(tuner_changes=self._changes, tuner_changed_ns=time.time_ns())

    def record_trial(self, score: float, *, whole: bool) -> None:
        """Record the end of a trial, completed (`whole`) or cut short, with its seconds of a step, or of a byte."""
        self._trials += 1
        self._default = self._default or score
        if whole:
            self._best = min(self._best or score, score)
        self._tell(score)

    def record_search_end(self, gain: float | None, *, resting: bool = False) -> None:
        """Record the end of a search, and the share of time that its setting saves over the default; None: none.

        A search is `resting` if it ended because its trials have used up their allowed loss; it may go on later.
        """
        self._best = self._default * (1.0 - (gain or 0.0))
        self._engine.tell(tuner_best_ps=_to_picoseconds(self._best))
        self.enter("resting" if resting else "watching")

    def _tell(self, score: float) -> None:
        self._engine.tell(
            tuner_trials=self._trials,
            tuner_score_ps=_to_picoseconds(score),
            tuner_default_ps=_to_picoseconds(self._default),
            tuner_best_ps=_to_picoseconds(self._best),
        )


def _to_picoseconds(seconds: float) -> int:
    return round(max(seconds, 0.0) * 1e12)
