"""The messages of the rendezvous, their proofs, and the descriptors that travel with them."""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import select
import socket
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from .. import frames, readable
from ..bounded_reader import shorten, whole
from ..elastic.builds import SOURCES
from ..errors import CalledOff, IncompatibleRanksError, RendezvousError
from ..host import linux
from ..host.sockets import retry_short
from ..setting import variable
from ..world import World
from .layout import Layout

GROUP = 250  # descriptors per message
LIMIT = 1 << 20  # bytes of a message
MAC = 32
MOST_SOCKETS = 1 << 10  # of a lane
WITH_DESCRIPTORS = b"d"  # the byte with which descriptors come; a message never begins so: it would be too long
MOST_PROCESSORS = 1 << 12  # of a host
_DIGITS = re.compile(f"[0-9a-f]{{1,{MOST_PROCESSORS // 4}}}")
LONGEST_FAILURE = 1500  # characters of it that a hello has room for
GRACE = 5.0  # seconds beyond rank 0's deadline in which its verdict must arrive
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)  # what reading a lie may raise
TELLING = 10.0  # seconds in which ranks that come still hear that the start has failed on another one
SETTINGS = ("kernels", "lanes", "sockets_per_lane")  # that ranks compare
KINDS = {kind.__name__: kind for kind in (RendezvousError, IncompatibleRanksError, CalledOff)}


Abort = Callable[[int, Sequence[int], BaseException], None]
"""Fails a world whose memory some ranks have already: the control segment, hosts as of `Gathered`, and the reason."""


@dataclass
class Gathered:
    """The result of the rendezvous, on every rank. The descriptors belong to the receiver."""

    control: int
    arena: int
    peers: list[int]
    """A pidfd per rank; -1 for those of other hosts."""
    pids: list[int]
    processors: list[list[int]]
    """Each rank's affinity."""
    hosts: tuple[int, ...] = ()
    """By rank, the number of its host; empty with one host."""
    host: int = 0
    """The number of this one."""
    kernels: str | None = None
    """The kernels that all ranks have, if not all would choose the same."""
    trunks: dict[int, int] = field(default_factory=dict)
    """By rank on another host, the connection to it: between leaders and rank 0, or others of its host."""
    lanes: dict[int, list[int]] = field(default_factory=dict)
    """By rank on another host, the connections to it, equally many to each."""
    generation: int = 1
    """The number of the world, equal on all ranks."""

    @property
    def layout(self) -> Layout:
        """How the ranks lie on hosts."""
        return Layout(self.hosts or (0,) * len(self.pids))

    @property
    def crew(self) -> list[int]:
        """The ranks of this host."""
        return self.layout.crews[self.host]

    def close(self) -> None:
        """Close all descriptors; only if no engine has taken them over."""
        close_all([self.control, self.arena, *self.peers, *self.trunks.values(), *chain(*self.lanes.values())])


@dataclass
class Hello:
    """How a rank introduces itself."""

    rank: int
    size: int
    pid: int
    processors: list[int]
    build: dict[str, str | int]
    levels: list[str]
    """The kernels that it can run and may, the best last."""
    worlds: int = 1
    """The number of the world as this process counts: its driver's, or one more than the worlds that it has begun."""
    failure: str = ""
    """Why this rank cannot start; empty: it can."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    def told(self) -> dict[str, Any]:
        """Return it as it is sent, short on any machine: the processors as a mask, and a long failure cut."""
        mask = sum(1 << number for number in self.processors)
        longest = LONGEST_FAILURE if self.failure.isascii() else LONGEST_FAILURE // 6  # JSON escapes the others
        return {**vars(self), "processors": f"{mask:x}", "failure": self.failure[:longest]}

    @classmethod
    def read(cls, told: Any) -> Hello:
        """Return what `told` has given, perhaps of a rank that has another version of the engine.

        Raises
        ------
        ValueError
            A field is missing, or of another kind.
        """
        try:
            rank, size, pid, worlds = (told.get(name, 1) for name in ("rank", "size", "pid", "worlds"))
            build, levels, nonce = dict(told["build"]), list(told["levels"]), told["nonce"]
            failure, mask = told.get("failure", ""), _mask(told["processors"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError("not a hello") from None
        known = all(type(number) is int and 0 <= number < 1 << 31 for number in (rank, size, pid, worlds))
        words = all(isinstance(word, str) for word in (*build, *levels, nonce, failure))
        if not known or not words or not 0 <= mask < 1 << MOST_PROCESSORS:
            raise ValueError("not a hello")
        if not all(isinstance(value, str | int) for value in build.values()):
            raise ValueError("not a hello")
        processors = [number for number in range(mask.bit_length()) if mask >> number & 1]
        return cls(rank, size, pid, processors, build, levels, worlds, failure, nonce)


def expect_welcome(message: Mapping[str, Any], size: int) -> None:
    """Hold what a leader tells a rank of its host against the size of the world, before descriptors are counted by it.

    Raises
    ------
    ValueError
        No leader of this version says that.
    """
    for name in ("crew", "trunks", "lanes"):
        ranks: Any = message.get(name)
        if not _are_numbers(ranks, size) or len(set(ranks)) != len(ranks):
            raise ValueError(f"a welcome with {name} {shorten(repr(ranks))}")
    sockets, host = whole(message, "sockets", 1, MOST_SOCKETS), whole(message, "host", 0, size - 1)
    expected = 2 + len(message["crew"]) + len(message["trunks"]) + sockets * len(message["lanes"])
    whole(message, "descriptors", expected, expected)
    whole(message, "generation")
    told: list[Any] = [message.get(name) for name in ("pids", "processors", "hosts")]
    pids, processors, hosts = told
    alike = _are_numbers(pids, 1 << 31) and isinstance(processors, list) and len(pids) == len(processors) == size
    if not alike or not all(_are_numbers(each, MOST_PROCESSORS) for each in processors):
        raise ValueError(f"a welcome that does not tell of {size} processes")
    if not _are_numbers(hosts, size) or len(hosts) not in (0, size) or (host > 0 and host not in hosts):
        raise ValueError(f"a welcome with hosts {shorten(repr(hosts))}")
    if not isinstance(message.get("kernels"), str | None):
        raise ValueError("a welcome without kernels")


def _are_numbers(found: Any, end: int) -> bool:
    return isinstance(found, list) and all(type(each) is int and 0 <= each < end for each in found)


def _mask(digits: Any) -> int:
    """Processors as bits of a number, written in base 16."""
    if not isinstance(digits, str) or not _DIGITS.fullmatch(digits):
        raise ValueError("no mask of processors")
    return int(digits, 16)


def introduce(
    world: World, worlds: int, build: dict[str, str | int], levels: Sequence[str] = (), failure: str = ""
) -> Hello:
    """This process's `Hello`."""
    processors = sorted(os.sched_getaffinity(0))
    return Hello(world.rank, world.size, os.getpid(), processors, build, list(levels), worlds, failure)


def failed_start(failures: Mapping[int, str], missing: str = "") -> RendezvousError:
    """The error of every rank where the start has failed on some, by rank; `missing` had not come by then."""
    told = "\n  ".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    absent = f"\n  {missing} had not come yet" if missing else ""
    failed = f"engine.init() has failed on {readable.ranks(failures)}, so no rank starts"
    return RendezvousError(f"{failed}\n  {told}{absent}")


def common_kernels(hellos: Sequence[Hello]) -> str | None:
    """The best kernels that all ranks can run, if not all would choose the same; else None."""
    if len({hello.build.get("kernels") for hello in hellos}) == 1:
        return None
    common = [level for level in hellos[0].levels if all(level in hello.levels for hello in hellos)]
    return common[-1] if common else None


_MEND = {name: f"set the same {variable(name)}" for name in SETTINGS}
_MEND |= dict.fromkeys(SOURCES, "their engines are built from different sources: install the same build on both")
_MEND["process_sets"] = "give the same to engine.init() on every rank"


def compare(hellos: Sequence[Hello], places: Mapping[int, str], agreed: Collection[str] = ()) -> None:
    """Refuse ranks that cannot work together, all differences in one table.

    Parameters
    ----------
    hellos : sequence of Hello
        By rank, all of them.
    places : mapping
        By rank, where it is, if that is to be said.
    agreed : collection of str
        What may differ.

    Raises
    ------
    IncompatibleRanksError
    RendezvousError
        The start has failed on some of them.
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


def version() -> str:
    """The version of this installation of the engine."""
    from importlib import metadata  # costs an agent, which asks for none, a sixth of its start

    try:
        return metadata.version("enginerun")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # A source tree that was never installed.


def address(world: World) -> str:
    """The abstract socket of the ranks of a host: their user and a digest of the job's key."""
    key = world.key + (f"@{world.host}" if world.several_hosts else "")
    digest = hashlib.sha256(key.encode()).hexdigest()[:40]
    return f"\0engine-{os.getuid()}-{digest}"


def own_pidfd() -> int:
    """A descriptor of this process that becomes readable when it ends (close-on-exec)."""
    try:
        return linux.pidfd_open(os.getpid())
    except OSError as error:
        raise RendezvousError(f"ranks cannot watch each other: {linux.refusal('pidfd_open', error)}") from None


def close_all(descriptors: list[int]) -> None:
    """Close descriptors, whatever state they are in."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def sign(key: bytes, label: str, nonce: str, payload: bytes) -> bytes:
    """The proof that goes with a message: only who knows `key` can make it, and only for this `nonce`."""
    return hmac.digest(key, label.encode() + b"\0" + nonce.encode() + b"\0" + payload, "sha256")


def frame(message: dict[str, Any], key: bytes, label: str, nonce: str) -> bytes:
    """A message as it goes over the socket."""
    payload = json.dumps(message).encode()
    return frames.wrap(sign(key, label, nonce, payload) + payload)


def take(buffer: bytearray, limit: int = frames.UNPROVEN) -> tuple[bytes, bytes] | None:
    """Cut a whole message off the front of `buffer`: (HMAC, payload), or None as long as it is incomplete.

    Raises
    ------
    ValueError
        No message of ours begins like this, or it is longer than it may be.
    """
    body = frames.cut(buffer, limit, MAC + 1)
    return None if body is None else (body[:MAC], body[MAC:])


def peer_uid(connection: socket.socket) -> int:
    """The user on the other side, as the kernel knows it."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def receive(connection: socket.socket, nbytes: int, descriptors: list[int]) -> bytes:
    """Receive bytes, appending descriptors that come with them (close-on-exec)."""
    # socket.recv_fds ignores its flags in some versions of Python, and would leave them open across exec.
    numbers = array.array("i")
    room = socket.CMSG_LEN(GROUP * numbers.itemsize)
    data, ancillary, _, _ = retry_short(connection.recvmsg, nbytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
    descriptors += numbers
    return data


def ready_to_read(descriptors: list[int], timeout: float) -> set[int]:
    """Those of `descriptors` that have data or have ended, as soon as there are any; `select` stops at number 1023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(max(0.0, timeout) * 1000)}
