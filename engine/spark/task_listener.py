"""Driver's end of the connections to its tasks: shows output of ranks, and is the first to learn how each ended.

It has a thread of its own, since the caller's thread blocks in Spark's call. It writes whole lines to the given
streams, which have no descriptors in a notebook.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TextIO

from ..host import network
from ..host.patience import Patience
from ..host.strangers import NO_DESCRIPTORS, Strangers, accept
from ..launch.hosts.channel import Channel, ChannelError, Message
from ..launch.process.output import Lines
from ..launch.report.failure_cause import End, describe
from ..text import readable
from .record import Record
from .task_channel import channel_over, proven_task, welcome

LOOK = 0.25  # seconds between two checks of the deadline
UNPROVEN = 64  # most unauthenticated connections, beyond one per task; if there are more, one is closed
PROVING = 5.0  # seconds that a connection has to authenticate
PAUSE = 0.02  # seconds until the next try if there are no descriptors for a connection


@dataclass(eq=False)
class _Caller:
    """Connection of a peer, which is a task once it has proven that it knows the secret."""

    channel: Channel
    nonce: str
    proving: Patience
    task: int | None = None
    rank: int | None = None
    host: str = ""
    lines: dict[str, Lines] = field(default_factory=dict)


class TaskListener:
    """Server for the tasks of one job. A context manager: its thread runs inside.

    Parameters
    ----------
    size : int
        Number of tasks.
    secret : str
    host : str or None
        Address on which to listen; None: all.
    streams : tuple of TextIO
        Streams for stdout and stderr of ranks.
    timestamps : bool
        Whether lines begin with the time.

    Attributes
    ----------
    port : int
    records : dict of int to Record
        Ends of ranks, by rank, as far as their tasks have reported them.
    lost : dict of int to Record
        Ends of ranks whose tasks went away without a report, by rank.
    """

    def __init__(
        self, size: int, secret: str, host: str | None, streams: tuple[TextIO, TextIO], timestamps: bool = False
    ) -> None:
        self.records: dict[int, Record] = {}
        self.lost: dict[int, Record] = {}
        self._size = size
        self._secret = secret
        self._streams = dict(zip(("stdout", "stderr"), streams, strict=True))
        self._timestamps = timestamps
        self._socket = network.listen(host, 0, backlog=256)
        self.port = int(self._socket.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._callers: list[_Caller] = []
        self._strangers: Strangers[_Caller] = Strangers(UNPROVEN + size)
        self._tasks: set[int] = set()
        self._why = ""
        self._closing = threading.Event()
        self._on_late: tuple[Patience, Callable[[], None]] | None = None
        self._thread = threading.Thread(target=self._run, name="engine-spark-listener", daemon=True)

    def __enter__(self) -> TaskListener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        for caller in self._callers:
            self._flush(caller)
            caller.channel.close()
        self._selector.close()
        self._socket.close()

    @property
    def came(self) -> int:
        """Number of tasks that have connected so far."""
        return len(self._tasks)

    def expect(self, seconds: float, late: Callable[[], None]) -> None:
        """Have `late` called once, in the thread, unless all tasks connect within `seconds`."""
        self._on_late = (Patience(seconds), late)

    def settle(self, seconds: float) -> None:
        """Wait at most `seconds` until each task that has come has reported its end or gone."""
        patience = Patience(seconds)
        while patience.left() and any(caller.rank is not None for caller in self._callers):
            self._closing.wait(min(0.01, patience.wait()))

    # ---- in the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, events in self._selector.select(LOOK):
                if key.data is None:
                    self._accept()
                elif key.data not in self._callers:
                    continue  # it has just been closed to make room
                elif events & selectors.EVENT_WRITE:
                    key.data.channel.out.pump()
                else:
                    self._hear(key.data)
            for caller in [*self._callers]:
                if caller.task is None and not caller.proving.left():
                    self._end_connection(caller)
                else:
                    self._await_room(caller)
            late = self._on_late
            if late is not None and self.came == self._size:
                self._on_late = None
            elif late is not None and not late[0].left():
                self._on_late = None
                late[1]()

    def _accept(self) -> None:
        try:
            connection, name = accept(self._socket, self._give_way)
            with connection:
                channel = channel_over(connection)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:  # the listener stays readable until there are some
                self._closing.wait(PAUSE)
            return  # otherwise the peer has gone
        caller = _Caller(channel, secrets.token_hex(16), Patience(PROVING))
        displaced = self._strangers.add(caller, network.address_of(name).host)
        if displaced is not None:
            self._end_connection(displaced)
        self._callers.append(caller)
        self._selector.register(channel.reading, selectors.EVENT_READ, caller)
        channel.send("challenge", nonce=caller.nonce)

    def _give_way(self) -> bool:
        """Close the next unauthenticated connection in turn; False if there is none."""
        displaced = self._strangers.displace()
        if displaced is not None:
            self._end_connection(displaced)
        return displaced is not None

    def _end_connection(self, caller: _Caller) -> None:
        self._selector.unregister(caller.channel.reading)
        self._part(caller)

    def _await_room(self, caller: _Caller) -> None:
        """Poll a connection for writing only while output is pending, which is rare since orders are short."""
        descriptor, known = caller.channel.out.descriptor, self._selector.get_map()
        if caller.channel.out.waiting and descriptor not in known:
            self._selector.register(descriptor, selectors.EVENT_WRITE, caller)
        elif not caller.channel.out.waiting and descriptor in known:
            self._selector.unregister(descriptor)

    def _hear(self, caller: _Caller) -> None:
        descriptor = caller.channel.reading
        try:
            for message in caller.channel.receive():
                self._act(caller, message)
            ended = caller.channel.ended
        except Exception:  # this thread survives whatever a peer sends that is no task
            ended = True
        if ended:
            self._selector.unregister(descriptor)
            self._part(caller)

    def _act(self, caller: _Caller, message: Message) -> None:
        if caller.task is None:
            self._admit(caller, message)
        elif message.kind == "hello":
            caller.rank, caller.host = self._rank(message), readable.plain(message.text("host"))
            if self._why:
                caller.channel.send("end", why=self._why)
        elif message.kind == "output":
            self._show(caller, message.text("stream"), message.body)
        elif message.kind == "say":
            self.say(f"rank {caller.rank}: {readable.plain(message.text('line'))}")
        elif message.kind == "end":
            record = Record.read_explanation(message.head, message.body)
            if record.rank != caller.rank:
                raise ChannelError(f"the task of rank {caller.rank} tells the end of rank {record.rank}")
            self.records[record.rank] = record
            if record.end.code != 0:
                self._end(f"after rank {record.rank} failed ({describe(record.end.code)})")
            self._flush(caller)
            caller.rank = None
        else:
            raise ChannelError(f"a task sends {message.kind!r}, which this driver does not know")

    def _admit(self, caller: _Caller, message: Message) -> None:
        """Authenticate a task, and admit it."""
        task = proven_task(self._secret, caller.nonce, message)
        if task is None or not 0 <= task < self._size:
            raise ChannelError("it does not know the job's secret")
        self._strangers.remove(caller)
        caller.task = task
        self._tasks.add(task)
        welcome(caller.channel, self._secret, caller.nonce, message)

    def _rank(self, message: Message) -> int:
        rank = message.number("rank")
        if not 0 <= rank < self._size:
            raise ChannelError(f"there is no rank {rank}")
        return rank

    def _part(self, caller: _Caller) -> None:
        """Handle the end of a connection: a task that has not reported its end is lost."""
        if caller.channel.out.descriptor in self._selector.get_map():
            self._selector.unregister(caller.channel.out.descriptor)
        caller.channel.close()
        self._callers.remove(caller)
        self._strangers.remove(caller)
        if caller.rank is not None:
            self._flush(caller)
            how = "its task was killed, or its executor was lost"
            end = End(caller.rank, -signal.SIGKILL, time.time(), by_launcher=bool(self._why), lost=how)
            self.lost[caller.rank] = Record(caller.rank, caller.host, end, {})
            self._end(f"after the task of rank {caller.rank} was lost")

    def _end(self, why: str) -> None:
        """Order all other tasks to end their ranks, once."""
        if not self._why:
            self._why = why
            for caller in self._callers:
                if caller.rank is not None:
                    caller.channel.send("end", why=why)

    # ---- output

    def say(self, line: str) -> None:
        """Show a line of the engine itself."""
        self._write("stderr", f"enginerun: {line}\n")

    def _show(self, caller: _Caller, name: str, data: bytes) -> None:
        whole = caller.lines.setdefault(name, Lines()).feed(data)
        if whole:
            self._write(name, self._prefixed(caller, name, whole))

    def _flush(self, caller: _Caller) -> None:
        for name, lines in caller.lines.items():
            if rest := lines.flush():
                self._write(name, self._prefixed(caller, name, rest))
        caller.lines.clear()

    def _prefixed(self, caller: _Caller, name: str, whole: bytes) -> str:
        now = f"{datetime.now():%Y-%m-%d %H:%M:%S}" if self._timestamps else ""
        prefix = f"{now}[{caller.rank}]<{name}>:"
        return "".join(f"{prefix}{line}\n" for line in whole.decode(errors="replace").split("\n")[:-1])

    def _write(self, name: str, text: str) -> None:
        stream = self._streams["stdout" if name == "stdout" else "stderr"]
        with contextlib.suppress(Exception):  # an error of the user's stream does not affect the job
            stream.write(text)
            stream.flush()
