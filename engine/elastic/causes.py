"""Causes of the ends of worlds: which one the user sees, and which exception is the program's own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .limits import JobLimits


class Kind(Enum):
    """Kind of event that ends a world before the training is complete."""

    FAILURE = "failure"  # a member has failed, or could not be reached
    HOST_LOST = "host_lost"  # the agent of a member's host is lost
    HOSTS = "hosts"  # a host goes, or has fewer slots
    LEFT = "left"  # a member has asked to leave
    SLOW = "slow"  # a member holds up the others
    NEWCOMERS = "newcomers"  # there are workers for a larger world


@dataclass
class Cause:
    """Event that ended a world."""

    text: str  # description for people
    worker: int | None = None  # number of the worker to blame; None if no single worker is known
    # Whether only another worker reported it; the agent's report on that worker's end replaces it
    reported: bool = False
    kind: Kind = Kind.FAILURE


class Causes:
    """Causes of all resets, and of failures since the last commit."""

    def __init__(self, limits: JobLimits) -> None:
        self._limits = limits
        self.resets: list[Cause] = []
        self._barren = 0  # worlds in a row without a commit, the newest included
        self._failures: list[Cause] = []
        self._exceptions: dict[str, tuple[int, bool]] = {}

    @property
    def first_failure(self) -> Cause | None:
        """First failure since the last commit, with the worker to blame; None if there was none."""
        return self._failures[0] if self._failures else None

    def reset(self, cause: Cause) -> None:
        """Record the cause that ended a world."""
        self.resets.append(cause)

    def record_failure(self, cause: Cause) -> None:
        """Record a failure. It replaces an earlier report of another worker about the same worker."""
        for earlier in self._failures:
            if earlier.reported and earlier.worker == cause.worker is not None:
                earlier.text, earlier.reported = cause.text, cause.reported
                return
        self._failures.append(cause)

    def record_exception(self, exception: str, worker: int, strange: bool = False) -> int | None:
        """Record an exception, and return another worker that raised the same since the last commit, or None.

        An exception that only `strange` workers raise does not count: it may be the fault of their host.
        """
        earlier, was_strange = self._exceptions.setdefault(exception, (worker, strange))
        if was_strange and not strange:
            self._exceptions[exception] = worker, strange
        return None if earlier == worker or (was_strange and strange) else earlier

    def count_world(self) -> None:
        """Count a world that begins."""
        self._barren += 1

    def record_commit(self) -> None:
        """Clear the recorded failures and exceptions after a commit."""
        self._barren = 0
        self._failures.clear()
        self._exceptions.clear()

    def too_many(self) -> str:
        """Return why no further reset is allowed; empty if one is."""
        limits = self._limits
        if limits.reset_limit is not None and len(self.resets) > limits.reset_limit:
            return f"{limits.reset_limit} resets were allowed (reset_limit){self._format_resets()}"
        if limits.barren_limit is not None and self._barren > limits.barren_limit:
            return f"{self._barren} worlds in a row have ended before a commit{self._format_resets()}"
        return ""

    def _format_resets(self) -> str:
        """Return the causes of all resets, one a line."""
        return "".join(f"\n  reset {number}: {cause.text}" for number, cause in enumerate(self.resets, 1))
