"""Samples of a trial: the time between two marks of one source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..native import core

TRAFFIC = -1  # source of the marks that no optimizer makes
GIB = 1 << 30
OTHERS = 64  # steps of other optimizers in a row after which the scored optimizer counts as gone
STEPPED = 12  # steps after which an optimizer counts as one that trains


class Changed(Exception):
    """The job no longer does what it was scored by; says what has happened, for people."""


class Mark(NamedTuple):
    """The end of a step, as `core.Engine.steps` tells it."""

    time: int
    version: int
    source: int
    waited: int
    busy: int
    nbytes: int


@dataclass(frozen=True)
class Score:
    """The meaning of a sample.

    Attributes
    ----------
    unit : str
        Unit as logs name it: "seconds per step", "seconds per period", "busy seconds per GiB".
    subject, spent : str
        Words for messages: `subject` takes less `spent`.
    source : int
        The optimizer's number, or `TRAFFIC`.
    every : int
        Number of periods from mark to mark.
    busy : bool
        Whether a sample is busy time per byte, instead of time.
    """

    unit: str = "seconds per step"
    subject: str = "a step"
    spent: str = "time"
    source: int = 0
    every: int = 1
    busy: bool = False


class Sample(NamedTuple):
    """The time between two marks: its value in the score's unit, the knob version under which all of it ran (None: the
    version changed), and the share of it for which rank 0's callers were blocked in the engine."""

    value: float
    version: int | None
    exposed: float


class Steps:
    """Reads marks of rank 0 as they come, and makes samples of them."""

    def __init__(self, engine: core.Engine) -> None:
        engine.record_steps()
        self._engine = engine
        self._next = 0
        self._last: Mark | None = None
        self._others = 0
        self._taken = 0
        self.score = Score()
        self.before = 0  # steps that had ended before the first sample

    def follow(self, score: Score, before: int = 0) -> None:
        """Take samples by this score, from the next mark on."""
        self.marks()
        self.score, self.before, self._last, self._others = score, before, None, 0

    def marks(self) -> list[Mark]:
        """Marks that are new since the last call."""
        first, marks = self._engine.steps(self._next)
        if first != self._next:
            self._last = None  # some are no longer remembered
        self._next = first + len(marks)
        return [Mark(*mark) for mark in marks]

    def read(self) -> list[Sample]:
        """Samples that are new.

        Raises
        ------
        Changed
            Others step, and the scored optimizer does not; or there is an optimizer, where the traffic was scored.
        """
        found: list[Sample] = []
        for mark in self.marks():
            if mark.source == self.score.source:
                sample = None if self._last is None else self._between(self._last, mark)
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

    def taken(self) -> int:
        """How many steps were read since the last call."""
        taken, self._taken = self._taken, 0
        return taken

    def _between(self, last: Mark, mark: Mark) -> Sample | None:
        nanoseconds, nbytes = mark.time - last.time, mark.nbytes - last.nbytes
        spent, amount = (mark.busy - last.busy, nbytes / GIB) if self.score.busy else (nanoseconds, self.score.every)
        if nanoseconds <= 0 or spent <= 0 or not amount:
            return None
        version = mark.version if mark.version == last.version else None
        # Of several threads it is the sum, and their counts may cross.
        exposed = min(max((mark.waited - last.waited) / nanoseconds, 0.0), 1.0)
        return Sample(spent / 1e9 / amount, version, exposed)
