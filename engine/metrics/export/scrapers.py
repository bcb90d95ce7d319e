"""Who scrapes an endpoint, and who of them should come once more."""

from __future__ import annotations

import threading
from dataclasses import dataclass

KNOWN_PERIOD = 1.5  # of the time between two scrapes, in which the next one is expected
MARGIN = 1.0  # seconds
UNKNOWN_PERIOD = 20.0  # seconds in which one is expected of a client that has come once
LONGEST_PERIOD = 30.0


@dataclass
class _Visits:
    """The last two scrapes of a client, in seconds of CLOCK_MONOTONIC."""

    last: float
    before: float | None = None

    @property
    def patience(self) -> float:
        """Seconds after which it is late."""
        if self.before is None:
            return UNKNOWN_PERIOD
        return min(LONGEST_PERIOD, KNOWN_PERIOD * (self.last - self.before) + MARGIN)


class Scrapers:
    """The clients of an endpoint. One that comes often is not taken for another that comes seldom."""

    def __init__(self) -> None:
        self._visits: dict[str, _Visits] = {}
        self._lock = threading.Lock()

    def note(self, client: str, time: float) -> None:
        """Remember a scrape that was answered.

        Parameters
        ----------
        client : str
            What tells clients apart.
        time : float
            When it came, in seconds of CLOCK_MONOTONIC.
        """
        with self._lock:
            seen = self._visits.get(client)
            self._visits[client] = _Visits(time, None if seen is None else seen.last)

    def awaited(self, now: float) -> dict[str, float]:
        """Who should come once more: those that are not gone already.

        Parameters
        ----------
        now : float
            Seconds of CLOCK_MONOTONIC.

        Returns
        -------
        dict of str to float
            By client, when it is late.
        """
        with self._lock:
            return {
                client: now + visits.patience
                for client, visits in self._visits.items()
                if now - visits.last <= 2 * visits.patience
            }

    def missing(self, awaited: dict[str, float], since: float, now: float) -> bool:
        """Whether somebody who is awaited has not come since a time, and is not late yet."""
        with self._lock:
            return any(now < late and self._visits[client].last <= since for client, late in awaited.items())
