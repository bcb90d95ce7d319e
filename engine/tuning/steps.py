"""What a trial is measured by."""

from __future__ import annotations

from engine.native import core


class Steps:
    """Seconds of each step that has ended since the last look, with the knob version under which all of it ran."""

    def __init__(self, engine: core.Engine) -> None:
        engine.record_steps()
        self._engine = engine
        self._next = 0
        self._last: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        """Steps so far."""
        return self._next

    def read(self) -> list[tuple[float, int | None]]:
        """What is new. A step in which the version has changed has None."""
        first, marks = self._engine.steps(self._next)
        if first != self._next:
            self._last = None  # some are no longer remembered
        self._next = first + len(marks)
        found: list[tuple[float, int | None]] = []
        for mark in marks:
            if self._last is not None and mark[0] > self._last[0]:
                version = mark[1] if mark[1] == self._last[1] else None
                found.append(((mark[0] - self._last[0]) / 1e9, version))
            self._last = mark
        return found
