"""Deadlines that a suspended process does not miss.

A job that is stopped or frozen as a whole, and goes on hours later, is not late. No clock of the kernel leaves out that
time, so a deadline counts what passes between two looks at it, and of a long pause no more than `STEP`.
`engine_ext/platform/clock.h` does the same for the native engine.
"""

from __future__ import annotations

import time

STEP = 1.0  # seconds: most time between two looks that counts as waited
LONGEST = 1e9  # seconds (31 years): largest duration of a setting; every clock can add it to its time


class Patience:
    """The rest of a time to wait. Whoever waits looks at it at least every half `STEP`.

    Parameters
    ----------
    seconds : float
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = time.monotonic()

    def begin(self, seconds: float) -> None:
        """Wait so long from now on."""
        self._left = seconds
        self._looked = time.monotonic()

    def left(self) -> float:
        """Look: the seconds that are left, 0 when the time is over."""
        now = time.monotonic()
        self._left = max(0.0, self._left - min(now - self._looked, STEP))
        self._looked = now
        return self._left

    def wait(self) -> float:
        """Look: the seconds that may be waited before the next look, 0 when the time is over."""
        return min(self.left(), STEP / 2)
