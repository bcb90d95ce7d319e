"""Why worlds have ended: which cause the user sees, and which exception is the program's own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .limits import Limits


class Kind(Enum):
    """What can end a world before the training is complete."""

    FAILURE = "failure"  # a member has failed, or could not be reached
    HOST_LOST = "host_lost"  # the agent of a member's host is lost
    HOSTS = "hosts"  # a host goes, or has fewer slots
    LEFT = "left"  # a member has asked to leave
    SLOW = "slow"  # a member holds up the others
    NEWCOMERS = "newcomers"  # there are workers for a larger world


@dataclass
class Cause:
    """What ended a world.

    Attributes
    ----------
    text : str
    worker : int or None
        Who is to blame.
    reported : bool
        Whether only another worker has said so; what its agent tells of its end takes the place of that.
    kind : Kind
    """

    text: str
    worker: int | None = None
    reported: bool = False
    kind: Kind = Kind.FAILURE


class Causes:
    """The causes of all resets, and of failures since the last commit.

    Parameters
    ----------
    limits : Limits
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.resets: list[Cause] = []
        self._barren = 0  # worlds in a row without a commit, the newest included
        self._failures: list[Cause] = []
        self._exceptions: dict[str, tuple[int, bool]] = {}

    @property
    def first(self) -> str:
        """The first failure since the last commit; empty if there was none."""
        return self._failures[0].text if self._failures else ""

    @property
    def first_failure(self) -> Cause | None:
        """The same, and who is to blame."""
        return self._failures[0] if self._failures else None

    def reset(self, cause: Cause) -> None:
        """Note what ended a world."""
        self.resets.append(cause)

    def failed(self, cause: Cause) -> None:
        """Note a failure. If another worker has reported it before, this is what it was."""
        for earlier in self._failures:
            if earlier.reported and earlier.worker == cause.worker is not None:
                earlier.text, earlier.reported = cause.text, cause.reported
                return
        self._failures.append(cause)

    def repeats(self, exception: str, worker: int, strange: bool = False) -> int | None:
        """Note an exception; the worker that has raised the same since the last commit, if another has.

        What `strange` workers alone raise does not count: it may be the fault of their host.
        """
        earlier, was_strange = self._exceptions.setdefault(exception, (worker, strange))
        if was_strange and not strange:
            self._exceptions[exception] = worker, strange
        return None if earlier == worker or (was_strange and strange) else earlier

    def begun(self) -> None:
        """A world begins."""
        self._barren += 1

    def committed(self) -> None:
        """Forget failures that a commit has overcome."""
        self._barren = 0
        self._failures.clear()
        self._exceptions.clear()

    def too_many(self) -> str:
        """Why there are no more resets; empty if there may be."""
        limits = self._limits
        if limits.reset_limit is not None and len(self.resets) > limits.reset_limit:
            return f"{limits.reset_limit} resets were allowed (reset_limit){self._told()}"
        if limits.barren_limit is not None and self._barren > limits.barren_limit:
            return f"{self._barren} worlds in a row have ended before a commit{self._told()}"
        return ""

    def _told(self) -> str:
        """The causes of all resets, one a line."""
        return "".join(f"\n  reset {number}: {cause.text}" for number, cause in enumerate(self.resets, 1))
