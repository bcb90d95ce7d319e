"""Messages of the rendezvous, and what ranks compare."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from ...config.builds import SOURCES
from ...config.setting import variable_name
from ...config.world import World
from ...errors import CalledOff, IncompatibleRanksError, RendezvousError
from ...host import linux
from ...text import readable
from ...text.bounded_reader import get_whole, shorten_text
from ..stream import derive_key
from ..unix_sockets import close_all
from .layout import Layout

MOST_SOCKETS = 1 << 10  # most connections of a lane
WITH_DESCRIPTORS = b"d"  # the byte sent with descriptors; a message never begins with it: it would be too long
MOST_PROCESSORS = 1 << 12  # most processors of a host
_DIGITS = re.compile(f"[0-9a-f]{{1,{MOST_PROCESSORS // 4}}}")
LONGEST_FAILURE = 1500  # longest failure text of a hello in characters
TELLING = 10.0  # seconds in which ranks that come are still told that the start has failed on another one
SETTINGS = ("kernels", "lanes", "sockets_per_lane")  # settings that ranks compare
KINDS = {kind.__name__: kind for kind in (RendezvousError, IncompatibleRanksError, CalledOff)}


Abort = Callable[[int, Sequence[int], BaseException], None]
"""Function that fails a world whose memory some ranks have already.

Its arguments: the descriptor of the control segment, the hosts as in `Gathered`, and the reason.
"""


@dataclass
class Gathered:
    """The result of the rendezvous, on every rank. The descriptors belong to the receiver."""

    control: int
    arena: int
    peers: list[int]
    """Pidfd of each rank; -1 for ranks on other hosts."""
    pids: list[int]
    processors: list[list[int]]
    """Processors to which each rank is bound."""
    hosts: tuple[int, ...] = ()
    """Host number of each rank; empty with one host."""
    host: int = 0
    """Number of this host."""
    kernels: str | None = None
    """Best kernels that all ranks have; None if all would choose the same anyway."""
    trunks: dict[int, int] = field(default_factory=dict)
    """Control connection to each rank on another host that has one with this rank; see `Layout.trunk_ranks`."""
    lanes: dict[int, list[int]] = field(default_factory=dict)
    """Data connections to each rank on another host that has some with this rank, the same number to each."""
    generation: int = 1
    """Number of the world, equal on all ranks."""

    @cached_property
    def layout(self) -> Layout:
        """Distribution of the ranks over hosts."""
        return Layout(self.hosts or (0,) * len(self.pids))

    @cached_property
    def crew(self) -> list[int]:
        """Ranks of this host."""
        return self.layout.crews[self.host]

    def close(self) -> None:
        """Close all descriptors; call it only if no engine has taken them over."""
        close_all([self.control, self.arena, *self.peers, *self.trunks.values(), *chain(*self.lanes.values())])


@dataclass
class Hello:
    """The message by which a rank introduces itself."""

    rank: int
    size: int
    pid: int
    processors: list[int]
    build: dict[str, str | int]
    levels: list[str]
    """Kernels that it can and may run, the best last."""
    worlds: int = 1
    """Number of the world as this process counts: the driver's, or one more than the worlds that it has begun."""
    failure: str = ""
    """Why this rank cannot start; empty if it can."""

    def to_message(self) -> dict[str, Any]:
        """Return the message as a dict: the processors as a hexadecimal mask, a long failure truncated."""
        mask = sum(1 << number for number in self.processors)
        longest = LONGEST_FAILURE if self.failure.isascii() else LONGEST_FAILURE // 6  # JSON escapes the others
        return {**vars(self), "processors": f"{mask:x}", "failure": self.failure[:longest]}

    @classmethod
    def read(cls, message: Any) -> Hello:
        """Parse a dict that `to_message` made, perhaps on a rank that has another version of the engine.

        A field that is missing, or has the wrong type, is a ValueError.
        """
        try:
            rank, size, pid, worlds = (message.get(name, 1) for name in ("rank", "size", "pid", "worlds"))
            build, levels = dict(message["build"]), list(message["levels"])
            failure, mask = message.get("failure", ""), _parse_mask(message["processors"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError("not a hello") from None
        known = all(type(number) is int and 0 <= number < 1 << 31 for number in (rank, size, pid, worlds))
        words = all(isinstance(word, str) for word in (*build, *levels, failure))
        if not known or not words or not 0 <= mask < 1 << MOST_PROCESSORS:
            raise ValueError("not a hello")
        if not all(isinstance(value, str | int) for value in build.values()):
            raise ValueError("not a hello")
        processors = [number for number in range(mask.bit_length()) if mask >> number & 1]
        return cls(rank, size, pid, processors, build, levels, worlds, failure)


def expect_welcome(message: Mapping[str, Any], size: int) -> None:
    """Validate a leader's welcome against the size of the world, before its count of descriptors is used.

    It raises a ValueError if no leader of this version sends such a welcome.
    """
    for name in ("crew", "trunks", "lanes"):
        ranks: Any = message.get(name)
        if not _are_numbers(ranks, size) or len(set(ranks)) != len(ranks):
            raise ValueError(f"a welcome with {name} {shorten_text(repr(ranks))}")
    sockets, host = get_whole(message, "sockets", 1, MOST_SOCKETS), get_whole(message, "host", 0, size - 1)
    expected = 2 + len(message["crew"]) + len(message["trunks"]) + sockets * len(message["lanes"])
    get_whole(message, "descriptors", expected, expected)
    get_whole(message, "generation")
    listed: list[Any] = [message.get(name) for name in ("pids", "processors", "hosts")]
    pids, processors, hosts = listed
    alike = _are_numbers(pids, 1 << 31) and isinstance(processors, list) and len(pids) == len(processors) == size
    if not alike or not all(_are_numbers(each, MOST_PROCESSORS) for each in processors):
        raise ValueError(f"a welcome that does not tell of {size} processes")
    if not _are_numbers(hosts, size) or len(hosts) not in (0, size) or (host > 0 and host not in hosts):
        raise ValueError(f"a welcome with hosts {shorten_text(repr(hosts))}")
    if not isinstance(message.get("kernels"), str | None):
        raise ValueError("a welcome without kernels")


def _are_numbers(found: Any, end: int) -> bool:
    return isinstance(found, list) and all(type(each) is int and 0 <= each < end for each in found)


def _parse_mask(digits: Any) -> int:
    """Parse a mask of processors, a number written in base 16."""
    if not isinstance(digits, str) or not _DIGITS.fullmatch(digits):
        raise ValueError("no mask of processors")
    return int(digits, 16)


def make_hello(
    world: World, worlds: int, build: dict[str, str | int], levels: Sequence[str] = (), failure: str = ""
) -> Hello:
    """Return this process's `Hello`."""
    processors = sorted(os.sched_getaffinity(0))
    return Hello(world.rank, world.size, os.getpid(), processors, build, list(levels), worlds, failure)


def failed_start(failures: Mapping[int, str], missing: str = "") -> RendezvousError:
    """Return the error that every rank raises if the start has failed on some, with the reason of each.

    `missing` names the ranks that had not come by then; empty if all had.
    """
    reasons = "\n  ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    absent = f"\n  {missing} had not come yet" if missing else ""
    failed = f"engine.init() has failed on {readable.format_ranks(failures)}, so no rank starts"
    return RendezvousError(f"{failed}\n  {reasons}{absent}")


def common_kernels(hellos: Sequence[Hello]) -> str | None:
    """Return the best kernels that all ranks can run; None if all choose the same anyway, or have none in common."""
    if len({hello.build.get("kernels") for hello in hellos}) == 1:
        return None
    common = [level for level in hellos[0].levels if all(level in hello.levels for hello in hellos)]
    return common[-1] if common else None


_MEND = {name: f"set the same {variable_name(name)}" for name in SETTINGS}
_MEND |= dict.fromkeys(SOURCES, "their engines are built from different sources: install the same build on both")
_MEND["process_sets"] = "give the same to engine.init() on every rank"


def compare_hellos(hellos: Sequence[Hello], places: Mapping[int, str], agreed: Collection[str] = ()) -> None:
    """Check that all ranks, in the order of their hellos, can work together.

    `places` has the text that error messages append to a rank, such as " on host-1". Values named in `agreed` may
    differ. Others that differ are an IncompatibleRanksError, which lists every difference from rank 0. If the start has
    failed on some ranks, a RendezvousError is raised.
    """
    failures = {hello.rank: f"{hello.failure}{places.get(hello.rank, '')}" for hello in hellos if hello.failure}
    if failures:
        raise failed_start(failures)
    first, *others = hellos
    lines = []
    for hello in others:
        for name in sorted({*first.build, *hello.build} - {*agreed}):
            mine, theirs = first.build.get(name), hello.build.get(name)
            if mine != theirs:
                mend = _MEND.get(name, "install the same version")
                rank = f"rank {hello.rank}{places.get(hello.rank, '')}"
                lines.append(f"{rank} has {name} {theirs}, rank 0 has {name} {mine}: {mend}")
    if lines:
        raise IncompatibleRanksError("the ranks cannot work together\n  " + "\n  ".join(lines))


def derive_local_key(world: World) -> bytes:
    """Return the key of the connections between the ranks of a host."""
    return derive_key(world.proof, "rendezvous on a host")


def derive_leaders_key(world: World) -> bytes:
    """Return the key of the connections between hosts: trunks and lanes."""
    return derive_key(world.proof, "rendezvous between hosts")


def make_socket_name(world: World) -> str:
    """Return the name of the abstract socket of a host's ranks, made of their user and a digest of the job's key."""
    key = world.key + (f"@{world.host}" if world.several_hosts else "")
    digest = hashlib.sha256(key.encode()).hexdigest()[:40]
    return f"\0engine-{os.getuid()}-{digest}"


def own_pidfd() -> int:
    """Return a descriptor of this process that becomes readable when it ends (close-on-exec)."""
    try:
        return linux.pidfd_open(os.getpid())
    except OSError as error:
        raise RendezvousError(f"ranks cannot watch each other: {linux.explain_refusal('pidfd_open', error)}") from None
