"""What the driver's machine is told, and what it wants done.

Whoever feeds the machine promises: what one worker says comes in the order in which it said it, and `Ended` after all
of that; a worker that has said `Ready` stands at the gate until it is told `Assign` or `End`; a worker ends only once,
and an `Ended` is a process that runs no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from .builds import Build
from .places import Place, Slot


class Why(Enum):
    """Why a worker stands at the gate."""

    NEW = "it is new"
    FAILURE = "its world has failed"
    HOSTS = "the hosts have changed"
    VOID = "its world was called off"


# What the machine is told.


@dataclass(frozen=True)
class Tick:
    """Time has passed, and nothing else has happened."""


@dataclass(frozen=True)
class Found:
    """The discovery's answer.

    Attributes
    ----------
    slots : mapping of str to int
        By host.
    """

    slots: Mapping[str, int]


@dataclass(frozen=True)
class AgentLost:
    """The agent of a host is gone, or out of reach: after its lease no worker runs there. If that is known for certain
    before, each has `Ended`.

    Attributes
    ----------
    host : str
    why : str
    within : float or None
        Seconds to the end of the lease; None: `Limits.lease`.
    """

    host: str
    why: str
    within: float | None = None


@dataclass(frozen=True)
class HostLeaves:
    """A host has said that it is about to go."""

    host: str


@dataclass(frozen=True)
class Ended:
    """A worker's process has ended.

    Attributes
    ----------
    worker : int
    code : int
        Its exit code; negative: the signal.
    what : str
        How it ended, for people.
    exception : str
        Type and line of the exception of its own with which it ended; empty: none, or one that says that another
        worker has failed.
    """

    worker: int
    code: int
    what: str
    exception: str = ""


@dataclass(frozen=True)
class Ready:
    """A worker stands at the gate.

    Attributes
    ----------
    worker : int
    world : int
        The last world that it was in; 0: none.
    why : Why
    text : str
        Of a failure, what the engine said.
    culprit : int or None
        Of a failure, the worker that is to blame, as far as is known.
    commit : int or None
        The newest commit that it holds.
    stalled : bool
        Of a failure, whether the culprit is to blame because it stood still for the stall limit.
    build : Build
        What it must have in common with the others.
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
    """The program of a member has made a commit. One member's word is enough: all make it in the same step."""

    worker: int
    world: int
    commit: int


@dataclass(frozen=True)
class Done:
    """A member's function has returned, and so has every other member's: it comes from behind a barrier."""

    worker: int
    world: int


@dataclass(frozen=True)
class Leaves:
    """A worker has said that it wants to go, or that it will be made to."""

    worker: int


@dataclass(frozen=True)
class Slow:
    """A worker was found to hold up the others (`slow`)."""

    worker: int
    why: str


@dataclass(frozen=True)
class Stop:
    """The user ends the job."""

    why: str


Event = Tick | Found | AgentLost | HostLeaves | Ended | Ready | Joined | Committed | Done | Leaves | Slow | Stop


# What the machine wants done, in this order.


@dataclass(frozen=True)
class Start:
    """Have a worker started in a slot. If that cannot be, it has `Ended`."""

    worker: int
    slot: Slot


@dataclass(frozen=True)
class Kill:
    """Have a worker killed; its `Ended` is the acknowledgement."""

    worker: int
    why: str


@dataclass(frozen=True)
class Disown:
    """Close the channel to a host's agent, and never again believe it: from now on its lease runs."""

    host: str
    why: str


@dataclass(frozen=True)
class Assign:
    """Tell workers at the gate their places; they meet then.

    Attributes
    ----------
    world : int
    places : mapping of int to Place
        By worker, in the order of ranks.
    """

    world: int
    places: Mapping[int, Place]


@dataclass(frozen=True)
class Void:
    """Tell members that meet that their world is called off. Who is in it already, or out again, is not concerned."""

    world: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Update:
    """Tell members that at their next check they shall come to the gate.

    Attributes
    ----------
    world : int
    workers : tuple of int
    count : int
        Of updates in this job.
    kinds : tuple of str
        What has changed.
    """

    world: int
    workers: tuple[int, ...]
    count: int
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class End:
    """Tell a worker at the gate that there is no place for it any more.

    Attributes
    ----------
    worker : int
    why : str
    good : bool
        Whether the training is complete. Otherwise the program is given an exception.
    """

    worker: int
    why: str
    good: bool


@dataclass(frozen=True)
class Say:
    """Show the user a line."""

    text: str


@dataclass(frozen=True)
class Over:
    """It is decided how the job ends. Workers may still have to.

    Attributes
    ----------
    good : bool
    why : str
        Of a failure: the first cause before all else.
    """

    good: bool
    why: str


Action = Start | Kill | Disown | Assign | Void | Update | End | Say | Over
