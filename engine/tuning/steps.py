"""Samples of a trial: times between two marks of one source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..native import core

TRAFFIC = -1  # source of marks that are not made by an optimizer
GIB = 1 << 30
OTHERS = 64  # consecutive steps of other optimizers after which the scored optimizer counts as gone
STEPPED = 12  # number of steps from which an optimizer counts as training


class Changed(Exception):
    """Signal that the job's activity no longer fits the score; the text says what has changed, for the user."""


class Mark(NamedTuple):
    """End of a step, from `core.Engine.steps`."""

    time: int
    version: int
    source: int
    waited: int
    busy: int
    nbytes: int


@dataclass(frozen=True)
class Score:
    """Definition of a sample's value."""

    unit: str = "seconds per step"  # unit in logs: "seconds per step", "seconds per period", "busy seconds per GiB"
    subject: str = "a step"  # word for messages of the form "`subject` takes less `spent`"
    spent: str = "time"
    source: int = 0  # number of the optimizer, or `TRAFFIC`
    every: int = 1  # number of periods between two marks
    busy: bool = False  # whether a sample is busy time per byte instead of elapsed time


class Sample(NamedTuple):
    """Sample between two marks.

    `value` is in the score's unit. `version` is the knob version in force during the whole sample; None: it changed.
    `exposed` is the share of the time in which rank 0's callers were blocked in the engine.
    """

    value: float
    version: int | None
    exposed: float


class Steps:
    """Reader of rank 0's marks, which converts them to samples."""

    def __init__(self, engine: core.Engine) -> None:
        engine.record_steps()
        self._engine = engine
        self._next = 0
        self._last: Mark | None = None
        self._others = 0
        self._taken = 0
        self.score = Score()
        self.before = 0  # steps that had ended before the first sample

    def follow_score(self, score: Score, before: int = 0) -> None:
        """Take samples by this score, from the next mark on."""
        self.read_marks()
        self.score, self.before, self._last, self._others = score, before, None, 0

    def read_marks(self) -> list[Mark]:
        """Return the marks since the last call."""
        first, marks = self._engine.steps(self._next)
        if first != self._next:
            self._last = None  # some marks were overwritten
        self._next = first + len(marks)
        return [Mark(*mark) for mark in marks]

    def read(self) -> list[Sample]:
        """Return the new samples.

        It raises Changed if other optimizers step and the scored one does not, or if one steps although the traffic is
        scored.
        """
        found: list[Sample] = []
        for mark in self.read_marks():
            if mark.source == self.score.source:
                sample = None if self._last is None else self._make_sample(self._last, mark)
                self._taken += 1
                found += [] if sample is None else [sample]
                self._last = mark
                self._others = self._others if mark.source == TRAFFIC else 0
            elif mark.source != TRAFFIC:
                self._others += 1
        if self._others >= (STEPPED if self.score.source == TRAFFIC else OTHERS):
            raise Changed(
                f"the steps of {'an optimizer' if self.score.source == TRAFFIC else 'another optimizer'} count"
            )
        return found

    def count_new_steps(self) -> int:
        """Return the number of steps read since the last call."""
        taken, self._taken = self._taken, 0
        return taken

    def _make_sample(self, last: Mark, mark: Mark) -> Sample | None:
        nanoseconds, nbytes = mark.time - last.time, mark.nbytes - last.nbytes
        spent, amount = (mark.busy - last.busy, nbytes / GIB) if self.score.busy else (nanoseconds, self.score.every)
        if nanoseconds <= 0 or spent <= 0 or not amount:
            return None
        version = mark.version if mark.version == last.version else None
        # With several threads, the waits add up, and their counters may be read in any order.
        exposed = min(max((mark.waited - last.waited) / nanoseconds, 0.0), 1.0)
        return Sample(spent / 1e9 / amount, version, exposed)
