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
    """Answer of the discovery."""

    slots: Mapping[str, int]  # number of slots, by host


@dataclass(frozen=True)
class AgentLost:
    """The agent of a host is gone or unreachable: no worker runs there after its lease expires.

    If a worker is known to have ended before that, its `Ended` follows.
    """

    host: str
    why: str
    within: float | None = None  # seconds to the end of the lease; None: `JobLimits.lease`


@dataclass(frozen=True)
class HostLeaves:
    """A host has announced that it is about to go."""

    host: str


@dataclass(frozen=True)
class Ended:
    """The process of a worker has ended."""

    worker: int
    code: int  # exit code; if negative, the number of the signal
    what: str  # description of how it ended, for people
    # Type and line of the program's own exception; empty without one, or if it says that another failed
    exception: str = ""


@dataclass(frozen=True)
class Ready:
    """A worker is at the gate."""

    worker: int
    world: int  # number of the last world that it was in; 0: none
    why: Why
    text: str = ""  # error text of the engine after a failure
    culprit: int | None = None  # number of the worker that caused the failure, if known
    commit: int | None = None  # number of the newest commit that it holds
    stalled: bool = False  # whether the failure is that the culprit made no progress for the stall limit
    build: Build = field(default_factory=dict)  # values that must equal those of the other workers


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
    """Send workers at the gate their places; then they meet."""

    world: int
    places: Mapping[int, WorldPlace]  # places by worker, in the order of ranks


@dataclass(frozen=True)
class Void:
    """Tell members that are meeting that their world is cancelled. Members that are not meeting ignore it."""

    world: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Update:
    """Tell members to come to the gate at their next check."""

    world: int
    workers: tuple[int, ...]
    count: int  # number of updates so far in this job
    kinds: tuple[str, ...]  # reasons for the update, for people


@dataclass(frozen=True)
class EndWorker:
    """Tell a worker at the gate that there is no place for it any more."""

    worker: int
    why: str
    good: bool  # whether the training is complete; otherwise the program gets an exception


@dataclass(frozen=True)
class ShowLine:
    """Show the user a line."""

    text: str


@dataclass(frozen=True)
class Over:
    """The outcome of the job is decided. Workers may still run."""

    good: bool  # whether the training is complete
    why: str  # description of a failure, with the first cause first


Action = StartWorker | KillWorker | Disown | Assign | Void | Update | EndWorker | ShowLine | Over
