"""Driver's end of the connections to its tasks: shows output of ranks, and is the first to learn how each ended.

It has a thread of its own, since the caller's thread blocks in Spark's call. It writes whole lines to the given
streams, which have no descriptors in a notebook.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TextIO

from ..errors.formatting import exception_text, format_exception
from ..host.patience import Patience
from ..host.sockets import retry_short
from ..launch.hosts.channel import Channel, ChannelError, Message
from ..launch.process.output import Lines
from ..launch.process.rank_end import RankEnd, describe_code
from ..net.event_loop import Coroutine, Wait
from ..text import readable
from ..text.bounded_reader import shorten_text
from .record import RankRecord
from .task_channel import TaskServer

UNPROVEN = 64  # most unauthenticated connections, beyond one per task; if there are more, one is closed


@dataclass(eq=False)
class _TaskConnection:
    """Connection of a task."""

    channel: Channel
    rank: int | None = None
    host: str = ""
    lines: dict[str, Lines] = field(default_factory=dict)


class TaskListener(TaskServer):
    """Server for the tasks of a job of fixed size.

    `streams` are for stdout and stderr of ranks. `timestamps` says whether lines begin with the time.
    """

    def __init__(
        self, size: int, secret: str, host: str | None, streams: tuple[TextIO, TextIO], timestamps: bool = False
    ) -> None:
        super().__init__(size, secret, host, UNPROVEN + size)
        self.records: dict[int, RankRecord] = {}  # ends that tasks have reported, by rank
        self.lost: dict[int, RankRecord] = {}  # ends of ranks whose tasks went away without a report
        self._streams = dict(zip(("stdout", "stderr"), streams, strict=True))
        self._timestamps = timestamps
        self._peers: list[_TaskConnection] = []
        self._tasks: set[int] = set()
        self._why = ""
        self._on_late: tuple[Patience, Callable[[], None]] | None = None

    def close(self) -> None:
        """End the thread, and show the last output of ranks."""
        super().close()
        for peer in self._peers:
            self._flush(peer)
            peer.channel.close()

    @property
    def came(self) -> int:
        """Number of tasks that have connected so far."""
        return len(self._tasks)

    def set_deadline(self, seconds: float, late: Callable[[], None]) -> None:
        """Have `late` called once, in the thread, unless all tasks connect within `seconds`."""
        self._on_late = (Patience(seconds), late)
        self._wake()

    def await_reports(self, seconds: float) -> None:
        """Wait at most `seconds` until each task that has come has reported its end or gone."""
        patience = Patience(seconds)
        while patience.seconds_left() and any(peer.rank is not None for peer in self._peers):
            self._closing.wait(min(0.01, patience.wait()))

    # ---- in the thread

    def _watch_waker(self) -> Coroutine[None]:
        """Call `late` at the deadline that another thread sets, unless all tasks have connected by then."""
        while True:
            deadline = self._on_late
            if (yield Wait(None if deadline is None else deadline[0], self._wakes)):
                retry_short(self._wakes.recv, 4096)
            elif deadline is not None:
                self._on_late = None
                if self.came < self._size:
                    deadline[1]()

    def _admit_task(self, channel: Channel, task: int, address: str) -> Coroutine[None]:
        peer = _TaskConnection(channel)
        self._peers.append(peer)
        self._tasks.add(task)
        return self._serve(peer)

    def _serve(self, peer: _TaskConnection) -> Coroutine[None]:
        channel = peer.channel
        how = "its task was killed, or its executor was lost"
        try:
            while not channel.ended:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.out.waiting else 0)
                yield Wait(None, channel.reading, events)
                channel.out.write_available()
                for message in channel.receive():
                    self._handle_message(peer, message)
        except Exception as error:  # this thread survives whatever a peer sends that is no task
            what = exception_text(error) if isinstance(error, ChannelError) else format_exception(error)
            plain = readable.replace_unprintable(shorten_text(what, 200))
            how = f"its task does not speak as one does, and is given up: {plain}"
            self.show_line(f"{'a task' if peer.rank is None else f'rank {peer.rank}'}: {how}")
        self._handle_disconnect(peer, how)

    def _handle_message(self, peer: _TaskConnection, message: Message) -> None:
        if message.kind == "hello":
            peer.rank, peer.host = self._rank(message), readable.replace_unprintable(message.get_text("host"))
            if self._why:
                peer.channel.send("end", why=self._why)
        elif message.kind == "output":
            self._show_output(peer, message.get_text("stream"), message.body)
        elif message.kind == "say":
            self.show_line(f"rank {peer.rank}: {readable.replace_unprintable(message.get_text('line'))}")
        elif message.kind == "end":
            record = RankRecord.read_explanation(message.head, message.body)
            if record.rank != peer.rank:
                raise ChannelError(f"the task of rank {peer.rank} tells the end of rank {record.rank}")
            self.records[record.rank] = record
            if record.end.code != 0:
                self._end(f"after rank {record.rank} failed ({describe_code(record.end.code)})")
            self._flush(peer)
            peer.rank = None
        else:
            raise ChannelError(f"a task sends {message.kind!r}, which this driver does not know")

    def _rank(self, message: Message) -> int:
        rank = message.get_number("rank")
        if not 0 <= rank < self._size:
            raise ChannelError(f"there is no rank {rank}")
        return rank

    def _handle_disconnect(self, peer: _TaskConnection, how: str) -> None:
        """Handle the end of a connection: a task that has not reported its end is lost, and `how` says in which way."""
        peer.channel.close()
        self._peers.remove(peer)
        if peer.rank is not None:
            self._flush(peer)
            end = RankEnd(peer.rank, -signal.SIGKILL, time.time(), by_launcher=bool(self._why), lost=how)
            self.lost[peer.rank] = RankRecord(peer.rank, peer.host, end, {})
            self._end(f"after the task of rank {peer.rank} was lost")

    def _end(self, why: str) -> None:
        """Order all other tasks to end their ranks, once."""
        if not self._why:
            self._why = why
            for peer in self._peers:
                if peer.rank is not None:
                    peer.channel.send("end", why=why)

    # ---- output

    def show_line(self, line: str) -> None:
        """Show a line of the engine itself."""
        self._write("stderr", f"enginerun: {line}\n")

    def _show_output(self, peer: _TaskConnection, name: str, data: bytes) -> None:
        whole = peer.lines.setdefault(name, Lines()).feed(data)
        if whole:
            self._write(name, self._prefix_lines(peer, name, whole))

    def _flush(self, peer: _TaskConnection) -> None:
        for name, lines in peer.lines.items():
            if rest := lines.flush():
                self._write(name, self._prefix_lines(peer, name, rest))
        peer.lines.clear()

    def _prefix_lines(self, peer: _TaskConnection, name: str, whole: bytes) -> str:
        now = f"{datetime.now():%Y-%m-%d %H:%M:%S}" if self._timestamps else ""
        prefix = f"{now}[{peer.rank}]<{name}>:"
        return "".join(f"{prefix}{line}\n" for line in whole.decode(errors="replace").split("\n")[:-1])

    def _write(self, name: str, text: str) -> None:
        stream = self._streams["stdout" if name == "stdout" else "stderr"]
        with contextlib.suppress(Exception):  # an error of the user's stream does not affect the job
            stream.write(text)
            stream.flush()
