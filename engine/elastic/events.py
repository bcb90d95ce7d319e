"""Events that the driver's state machine takes, and actions that it returns.

The caller guarantees: messages of one worker come in the order in which it sent them, and its `Ended` after all of
them. A worker that has sent `Ready` stays at the gate until it gets `Assign` or `End`. A worker ends only once, and
after `Ended` its process runs no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ..config.builds import Build
from .places import Slot, WorldPlace


class Why(Enum):
    """Reason why a worker is at the gate."""

    NEW = "it is new"
    FAILURE = "its world has failed"
    HOSTS = "the hosts have changed"
    VOID = "its world was called off"


# Events


@dataclass(frozen=True)
class Tick:
    """Time has passed, and nothing else has happened."""


@dataclass(frozen=True)
class Found:
    """Answer of the discovery.

    Attributes
    ----------
    slots : mapping of str to int
        Number of slots, by host.
    """

    slots: Mapping[str, int]


@dataclass(frozen=True)
class AgentLost:
    """The agent of a host is gone or unreachable: no worker runs there after its lease expires.

    If a worker is known to have ended before that, its `Ended` follows.

    Attributes
    ----------
    host : str
    why : str
    within : float or None
        Seconds to the end of the lease; None: `JobLimits.lease`.
    """

    host: str
    why: str
    within: float | None = None


@dataclass(frozen=True)
class HostLeaves:
    """A host has announced that it is about to go."""

    host: str


@dataclass(frozen=True)
class Ended:
    """The process of a worker has ended.

    Attributes
    ----------
    worker : int
    code : int
        Its exit code; if negative, the number of the signal.
    what : str
        Description of how it ended, for people.
    exception : str
        Type and line of the program's own exception that ended it; empty if there is none. Exceptions which say that
        another worker has failed do not count.
    """

    worker: int
    code: int
    what: str
    exception: str = ""


@dataclass(frozen=True)
class Ready:
    """A worker is at the gate.

    Attributes
    ----------
    worker : int
    world : int
        Number of the last world that it was in; 0: none.
    why : Why
    text : str
        Error text of the engine after a failure.
    culprit : int or None
        Number of the worker that caused the failure, if known.
    commit : int or None
        Number of the newest commit that it holds.
    stalled : bool
        Whether the failure is that the culprit made no progress for the stall limit.
    build : Build
        Values that must equal those of the other workers.
    """

    worker: int
    world: int
    why: Why
    text: str = ""
    culprit: int | None = None
    commit: int | None = None
    stalled: bool = False
    build: Build = field(default_factory=dict)


@dataclass(frozen=True)
class Joined:
    """A worker has met all members of a world."""

    worker: int
    world: int


@dataclass(frozen=True)
class Committed:
    """The program of a member has committed. One member's report is enough, since all commit in the same step."""

    worker: int
    world: int
    commit: int


@dataclass(frozen=True)
class Done:
    """The function has returned on this member and, as a barrier follows it, on every other one."""

    worker: int
    world: int


@dataclass(frozen=True)
class Leaves:
    """A worker has announced that it wants to leave or will be made to."""

    worker: int


@dataclass(frozen=True)
class Slow:
    """A worker was found to delay the others (`slow`)."""

    worker: int
    why: str


@dataclass(frozen=True)
class Stop:
    """The user ends the job."""

    why: str


Event = Tick | Found | AgentLost | HostLeaves | Ended | Ready | Joined | Committed | Done | Leaves | Slow | Stop


# Actions, to be executed in the order in which they are returned


@dataclass(frozen=True)
class StartWorker:
    """Start a worker in a slot. If that fails, `Ended` follows."""

    worker: int
    slot: Slot


@dataclass(frozen=True)
class KillWorker:
    """Kill a worker; its `Ended` is the acknowledgement."""

    worker: int
    why: str


@dataclass(frozen=True)
class Disown:
    """Close the channel to a host's agent, and ignore it from then on: its lease begins to run out."""

    host: str
    why: str


@dataclass(frozen=True)
class Assign:
    """Send workers at the gate their places; then they meet.

    Attributes
    ----------
    world : int
    places : mapping of int to WorldPlace
        Places by worker, in the order of ranks.
    """

    world: int
    places: Mapping[int, WorldPlace]


@dataclass(frozen=True)
class Void:
    """Tell members that are meeting that their world is cancelled. Members that are not meeting ignore it."""

    world: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Update:
    """Tell members to come to the gate at their next check.

    Attributes
    ----------
    world : int
    workers : tuple of int
    count : int
        Number of updates so far in this job.
    kinds : tuple of str
        Reasons for the update, for people.
    """

    world: int
    workers: tuple[int, ...]
    count: int
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class EndWorker:
    """Tell a worker at the gate that there is no place for it any more.

    Attributes
    ----------
    worker : int
    why : str
    good : bool
        Whether the training is complete. Otherwise the program gets an exception.
    """

    worker: int
    why: str
    good: bool


@dataclass(frozen=True)
class ShowLine:
    """Show the user a line."""

    text: str


@dataclass(frozen=True)
class Over:
    """The outcome of the job is decided. Workers may still run.

    Attributes
    ----------
    good : bool
        Whether the training is complete.
    why : str
        Description of a failure, with the first cause first.
    """

    good: bool
    why: str


Action = StartWorker | KillWorker | Disown | Assign | Void | Update | EndWorker | ShowLine | Over
