"""Timeouts that do not expire while the process is suspended.

A job that is stopped or frozen as a whole and resumes hours later is not late. No clock of the kernel excludes that
time. So a timeout adds up the time between checks, of which each counts at most `STEP`.
`engine_ext/platform/clock.h` does the same for the native engine.
"""

from __future__ import annotations

import time

STEP = 1.0  # maximum seconds between two checks that count as waited
LONGEST = 1e9  # maximum seconds (31 years) of a setting; every clock can add it to its time


class Patience:
    """Remaining time of a timeout, in seconds. Check it at least every half `STEP`."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._looked = time.monotonic()

    def reset(self, seconds: float) -> None:
        """Restart the timeout with so many seconds."""
        self._left = seconds
        self._looked = time.monotonic()

    def seconds_left(self) -> float:
        """Check the timeout: return the remaining seconds, 0 when it has expired."""
        now = time.monotonic()
        self._left = max(0.0, self._left - min(now - self._looked, STEP))
        self._looked = now
        return self._left

    def wait(self) -> float:
        """Check the timeout: return the seconds to wait until the next check, 0 when it has expired."""
        return min(self.seconds_left(), STEP / 2)
