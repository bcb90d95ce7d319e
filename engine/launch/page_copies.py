"""Pages of counters of other hosts: what an agent sends of its ranks', and the copies that the launcher keeps.

The launcher asks for them now and then. What an agent answers is small: the pages that have changed since, compressed,
the states of the ranks' processes, and what time it is there.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..host.processes import look
from ..metrics import page
from .channel import Channel, ChannelError, Message

CLOCKS = (0, 1 << 63)  # nanoseconds that a clock may tell


class Pages:
    """The pages of an agent's ranks, as it tells of them.

    Parameters
    ----------
    descriptors : mapping of int to int
        By rank.
    """

    def __init__(self, descriptors: Mapping[int, int]) -> None:
        self._descriptors = descriptors
        self._sent: dict[int, bytes] = {}
        self._pids: dict[int, int] = {}

    def send(self, channel: Channel) -> None:
        """Tell what has changed since the last time.

        Parameters
        ----------
        channel : Channel
            To the launcher.
        """
        states, changed = {}, []
        for rank, descriptor in self._descriptors.items():
            content = os.pread(descriptor, page.BYTES, 0)
            if content != self._sent.get(rank):
                self._sent[rank] = content
                self._pids[rank] = _pid(descriptor)
                changed.append(rank)
            states[rank] = _state(self._pids[rank])
        body = zlib.compress(b"".join(self._sent[rank] for rank in changed), 1)
        channel.send("pages", body, changed=changed, states=[*states.items()], **_clocks())


class Copies:
    """What the launcher keeps of one host's pages.

    Parameters
    ----------
    descriptors : sequence of int
        Of the copies, by rank, those of other hosts included; none if nothing is counted.
    ranks : collection of int
        Those of the host.
    """

    def __init__(self, descriptors: Sequence[int], ranks: Collection[int]) -> None:
        self._descriptors = {rank: descriptors[rank] for rank in ranks} if descriptors else {}

    def keep(self, message: Message, held: Collection[int] | None = None) -> None:
        """Take what an agent has sent.

        Parameters
        ----------
        message : Message
            Its `pages`.
        held : collection of int, optional
            Those of its ranks that are its own now: of others it has an old page, and another host the copy.

        Raises
        ------
        ChannelError
            It is not what `Pages` sends.
        """
        changed, states = _numbers(message)
        clocks = _clocks()
        ahead, ahead_unix = (clocks[name] - message.number(name, *CLOCKS) for name in ("monotonic", "unix"))
        if not {*changed, *states} <= self._descriptors.keys():
            raise ChannelError(f"it speaks of ranks {sorted({*changed, *states})}, which are not all its ranks")
        if not max(abs(ahead), abs(ahead_unix)) < 1 << 62:
            raise ChannelError("its clocks tell a time that cannot be")
        try:
            content = zlib.decompressobj().decompress(message.body, page.BYTES * len(changed) + 1)
        except zlib.error as error:
            raise ChannelError(f"its pages of counters are damaged: {error}") from error
        if len(content) != page.BYTES * len(changed):
            raise ChannelError("its pages of counters have another length; install the same version")
        held = self._descriptors if held is None else held
        for place, rank in enumerate(changed):
            if rank in held:
                whole = content[place * page.BYTES : (place + 1) * page.BYTES]
                page.write_copy(self._descriptors[rank], whole, ahead, ahead_unix)
        for rank, state in states.items():
            if rank in held:
                page.date_copy(self._descriptors[rank], clocks["monotonic"], state[:1])


def _numbers(message: Message) -> tuple[list[int], dict[int, str]]:
    """Of which ranks a message has pages, each once; and the states of processes, by rank."""
    changed = message.numbers("changed")
    states: Any = message.head.get("states")
    try:
        found = {rank: str(state) for rank, state in states}
        if len({*changed}) == len(changed) and all(type(rank) is int for rank in found):
            return changed, found
    except (TypeError, ValueError):
        pass
    raise ChannelError("what it tells of its pages of counters is damaged; install the same version")


def _clocks() -> dict[str, int]:
    return {"monotonic": time.monotonic_ns(), "unix": time.time_ns()}


def _pid(descriptor: int) -> int:
    """The process that counts into a page; 0 if there was none yet."""
    with contextlib.suppress(page.PageError):
        snapshot = page.read(descriptor)
        return 0 if snapshot is None else snapshot["pid"]
    return 0


def _state(pid: int) -> str:
    """The state of a process, `X` if it is gone; empty if there is none."""
    process = look(pid) if pid else None
    return process.state if process is not None else "X" if pid else ""
