"""Copies of the pages of counters of other hosts: agents send their ranks' pages, and the launcher keeps copies.

The launcher asks for them at intervals. An agent's answer is small: the pages that have changed since the last one,
compressed, the states of the ranks' processes, and the time of its clocks.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...host.processes import read_process
from ...metrics import page
from .channel import Channel, ChannelError, Message

CLOCKS = (0, 1 << 63)  # range of a clock in nanoseconds


class Pages:
    """An agent's side: the pages of its ranks, whose descriptors are given by rank."""

    def __init__(self, descriptors: Mapping[int, int]) -> None:
        self._descriptors = descriptors
        self._sent: dict[int, bytes] = {}
        self._pids: dict[int, int] = {}

    def send(self, channel: Channel) -> None:
        """Send the launcher the pages that have changed since the last call, all process states and the clocks."""
        states, changed = {}, []
        for rank, descriptor in self._descriptors.items():
            content = os.pread(descriptor, page.BYTES, 0)
            if content != self._sent.get(rank):
                self._sent[rank] = content
                self._pids[rank] = _read_pid(descriptor)
                changed.append(rank)
            states[rank] = _read_state(self._pids[rank])
        body = zlib.compress(b"".join(self._sent[rank] for rank in changed), 1)
        channel.send("pages", body, changed=changed, states=[*states.items()], **_read_clocks())


class Copies:
    """The launcher's side: copies of the pages of one host's `ranks`.

    `descriptors` are those of the copies of all ranks, including other hosts'; empty if nothing is counted.
    """

    def __init__(self, descriptors: Sequence[int], ranks: Collection[int]) -> None:
        self._descriptors = {rank: descriptors[rank] for rank in ranks} if descriptors else {}

    def write_pages(self, message: Message, held: Collection[int] | None = None) -> None:
        """Write the pages of an agent's message `pages` into the copies.

        `held` are the ranks that run on this host now; the host's pages of others are outdated and skipped. None: all
        its ranks. A `ChannelError` is raised if the message is not one of `Pages`.
        """
        changed, states = _parse_states(message)
        clocks = _read_clocks()
        ahead, ahead_unix = (clocks[name] - message.get_number(name, *CLOCKS) for name in ("monotonic", "unix"))
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


def _parse_states(message: Message) -> tuple[list[int], dict[int, str]]:
    """Return the ranks whose pages a message has, each once, and the states of processes by rank."""
    changed = message.get_numbers("changed")
    states: Any = message.head.get("states")
    try:
        found = {rank: str(state) for rank, state in states}
        if len({*changed}) == len(changed) and all(type(rank) is int for rank in found):
            return changed, found
    except (TypeError, ValueError):
        pass
    raise ChannelError("what it tells of its pages of counters is damaged; install the same version")


def _read_clocks() -> dict[str, int]:
    return {"monotonic": time.monotonic_ns(), "unix": time.time_ns()}


def _read_pid(descriptor: int) -> int:
    """Return the pid of the process that counts into a page; 0 if there is none yet."""
    with contextlib.suppress(page.PageError):
        snapshot = page.read(descriptor)
        return 0 if snapshot is None else snapshot["pid"]
    return 0


def _read_state(pid: int) -> str:
    """Return the state of a process; `X` if it has ended, empty for a pid of 0."""
    process = read_process(pid) if pid else None
    return process.state if process is not None else "X" if pid else ""
