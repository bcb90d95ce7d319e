"""Gate of a worker of an elastic job: the connection on which it waits for a place in a world and reports its state.

A worker talks only to the agent of its host, which relays messages between worker and driver. No thread reads the
connection: received messages are handled at the worker's next call. When the agent is gone, the driver gives this
worker up; so the end of the connection is the end of the job for the worker.

The connection is an authenticated stream (`engine.net.stream`) over a Unix socket of the host. The worker's greeting
has its number; the agent's answer says whether workers may be on `several` hosts. Then pass messages of these kinds:

| kind | from | fields |
|---|---|---|
| ready | worker | world, why, text, culprit, commit, build; port: its listening port, 0 on one host |
| joined, done | worker | world |
| committed | worker | world, commit |
| leaving | worker | |
| logged | worker | value: a text for the program that started the job |
| place | driver | place, members, hosts, hub, reason |
| void, update | driver | world |
| end | driver | why, good; over: true if the job is over, false if it goes on without this worker |
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from ...config.builds import Build
from ...config.forms import LARGEST, MOST, Whole
from ...config.setting import read
from ...errors import ConfigError, EngineError, ForkedError, RendezvousError
from ...host import network
from ...host.patience import Patience
from ...host.sockets import retry_short, send_all, wait_readable
from ...net.connection import Connection, greet_server
from ...net.event_loop import run
from ...net.frames import MALFORMED
from ...net.stream import CLIENT, LIMIT, StreamError, derive_key
from ...net.unix_sockets import peer_uid
from ...text.bounded_reader import ReadError, get_whole, shorten_text
from ..events import Why
from ..places import Slot, WorldPlace

PATIENCE = 30.0  # seconds that the agent has to answer, and to read what is sent to it
LOOK = 0.5  # seconds between two checks of a waiting worker for a signal that asks it to leave
GONE = "the agent of this host is gone, or has given this worker up; it cannot take part in the job any more"


class JobOver(EngineError):
    """The job is over for this worker.

    Parameters
    ----------
    why : str
        Reason, for people.
    good : bool
        Whether the training is complete.
    """

    def __init__(self, why: str, good: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.good = good


class LetGo(JobOver):
    """This worker must end; the job goes on without it."""


@dataclass(frozen=True)
class Assigned:
    """Assignment of a worker at the gate to a world."""

    place: WorldPlace
    members: tuple[int, ...]  # numbers of the workers, by rank
    hosts: tuple[str, ...]  # names of the hosts, by rank
    hub: str  # `HOST:PORT` on which rank 0 listens for other hosts; empty if all ranks are on one host
    reason: str  # cause for which this world is made, for people
    # Descriptor of the TCP socket that listens at `hub`; only on rank 0 of several hosts; the receiver owns it
    listener: int | None = None


class Gate:
    """Connection of a worker to the driver, through the agent of its host. Create it with `open`.

    It is not thread-safe, and a forked child cannot use it.
    """

    def __init__(self, worker: int, slot: int, connection: Connection) -> None:
        self.worker = worker  # never reused within the job
        self.slot = slot  # number of its slot on its host
        self._socket = connection.socket
        self._connection = connection
        self._stream = connection.stream
        self._pid = os.getpid()
        self.several = False  # whether workers may be on several hosts
        self._listener: socket.socket | None = None
        self._assigned: Assigned | None = None  # newest assignment that was received
        self._void = self._updated = 0  # newest world that is void, and that was told to come to the gate
        self._over: JobOver | None = None
        self._leaves = False  # whether the wish to leave is still to be sent

    @classmethod
    def open(cls, environ: Mapping[str, str]) -> Self:
        """Connect to the agent of this host.

        It reads ENGINE_GATE, ENGINE_SECRET, ENGINE_WORKER and ENGINE_SLOT, as enginerun sets them; a missing or invalid
        one is a ConfigError. If no agent answers, or not that of this job, the text of the RendezvousError says what
        may help.
        """
        worker, slot = _read_number(environ, "ENGINE_WORKER"), _read_number(environ, "ENGINE_SLOT")
        name, secret = _read_variable(environ, "ENGINE_GATE"), _read_variable(environ, "ENGINE_SECRET")
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        gate = cls(worker, slot, Connection(connected, derive_key(secret, "gate"), CLIENT, LIMIT))
        try:
            gate._greet_agent(name)
        except BaseException:
            gate.close()
            raise
        return gate

    def wait(
        self,
        world: int,
        why: Why,
        text: str = "",
        culprit: int | None = None,
        commit: int | None = None,
        stalled: bool = False,
        build: Build | None = None,
    ) -> Assigned:
        """Come to the gate, and wait for a place. The wait has no timeout of its own: the driver ends every wait.

        The arguments are those of `Ready`. It raises a JobOver if there is no place for this worker any more, or if the
        agent is gone.
        """
        port = self._listen() if self.several else 0
        told = {"text": text, "culprit": culprit, "commit": commit, "stalled": stalled, "build": build or {}}
        self._send("ready", world=world, why=why.name, port=port, **told)
        while True:
            self._receive(block=True)
            place = self._take_assignment()
            if place is not None:
                return place

    def report_joined(self, world: int) -> None:
        """Report that this worker has met all members of a world."""
        self._send("joined", world=world)

    def report_commit(self, world: int, commit: int) -> None:
        """Report a commit that was made in a world."""
        self._send("committed", world=world, commit=commit)

    def report_done(self, world: int) -> None:
        """Report that the program's function has returned on all members of a world."""
        self._send("done", world=world)

    def log(self, value: str) -> None:
        """Send a text to the program that started the job."""
        self._send("logged", value=value)

    def request_leave(self) -> None:
        """Ask to leave: the members of this worker's world come to the gate, where it is let go.

        A signal handler may call this: the request is sent with the next message or at the next read.
        """
        self._leaves = True

    def hung_up(self) -> bool:
        """Return whether the agent has closed the connection. A signal handler may call this: it reads nothing."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def fileno(self) -> int:
        """Return a descriptor that is readable when a message has come."""
        return self._socket.fileno()

    def is_void(self, world: int) -> bool:
        """Read received messages without blocking, and return whether that world is void; JobOver as from `wait`."""
        self._receive(block=False)
        return self._void >= world

    def is_update_requested(self, world: int) -> bool:
        """Read received messages without blocking, and return whether the members of that world shall come to the gate.

        It raises a JobOver like `wait`.
        """
        self._receive(block=False)
        return self._updated >= world

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._connection.close()
        self._close_listener()

    # ---- both directions

    def _greet_agent(self, name: str) -> None:
        try:
            self._socket.settimeout(PATIENCE)
            retry_short(self._socket.connect, f"\0{name}")
        except OSError as error:
            raise RendezvousError(
                f"worker {self.worker}: the agent of this host does not answer at ENGINE_GATE={name} "
                f"({error.strerror or error}). Workers of an elastic job are started by enginerun alone, and run in "
                "its network namespace."
            ) from None
        uid = peer_uid(self._socket)
        if uid != os.getuid():
            raise RendezvousError(f"worker {self.worker}: the gate belongs to user {uid}, not to {os.getuid()}")
        self._socket.setblocking(False)
        patience = Patience(PATIENCE)
        try:
            answer = run(greet_server(self._connection, {"worker": self.worker}, patience, patience))
            self.several = bool(answer["several"])
        except TimeoutError:
            raise RendezvousError(
                f"worker {self.worker}: the agent of this host did not answer in {PATIENCE:g} s"
            ) from None
        except (OSError, StreamError, KeyError) as error:
            why = f" ({error})" if isinstance(error, StreamError) else ""
            raise RendezvousError(
                f"worker {self.worker}: the agent of this host turned it away{why}. Is ENGINE_SECRET that of the job, "
                "and is there no other process that speaks for the same worker?"
            ) from None

    def _send(self, kind: str, /, **fields: Any) -> None:
        self._check_mine()
        self._tell_leaving()
        self._write(self._stream.encode({"kind": kind, **fields}))
        self._tell_leaving()  # a signal handler may have run meanwhile

    def _check_mine(self) -> None:
        """Raise if the job is over for this worker, or if this is a forked child, which shares the socket."""
        if self._over is not None:
            raise self._over
        if os.getpid() != self._pid:
            raise ForkedError(f"worker {self.worker} speaks for itself: this is process {os.getpid()}, forked by it")

    def _tell_leaving(self) -> None:
        if self._leaves and self._stream.authenticated:
            self._leaves = False
            self._write(self._stream.encode({"kind": "leaving"}))

    def _write(self, data: bytes) -> None:
        try:
            send_all(self._socket, data, PATIENCE)
        except TimeoutError:
            self._end(JobOver(f"the agent of this host has read nothing for {PATIENCE:g} s"))
        except OSError:
            self._end(JobOver(GONE))

    def _receive(self, block: bool) -> None:
        """Send a pending wish to leave, and handle received messages; with `block`, wait until there is one."""
        self._check_mine()
        self._tell_leaving()
        while block and not wait_readable([self._socket.fileno()], LOOK):
            self._tell_leaving()  # a signal handler may have run meanwhile
        while True:
            try:
                data = retry_short(self._socket.recv, 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end(JobOver(GONE))
            try:
                self._stream.feed(data)
                while (message := self._stream.receive()) is not None:
                    self._handle_message(message)
            except MALFORMED as error:
                self._end(
                    JobOver(f"the agent of this host does not speak as one does: {error!r}; install the same version")
                )

    def _handle_message(self, message: dict[str, Any]) -> None:
        _HEARD[message["kind"]](self, message)

    def _handle_place(self, message: dict[str, Any]) -> None:
        place = _place_of(message.get("place"))
        lists = _lists_of(message, place.size)
        self._assigned = Assigned(place, **lists, hub=str(message["hub"]), reason=str(message["reason"]))

    def _handle_void(self, message: dict[str, Any]) -> None:
        self._void = max(self._void, get_whole(message, "world", 0, LARGEST))

    def _handle_update(self, message: dict[str, Any]) -> None:
        self._updated = max(self._updated, get_whole(message, "world", 0, LARGEST))

    def _handle_end(self, message: dict[str, Any]) -> None:
        why = str(message["why"])
        self._end(JobOver(why, bool(message["good"])) if message.get("over", True) else LetGo(why))

    def _end(self, over: JobOver) -> None:
        """Raise `over`, now and in every later call: the job is over for this worker."""
        self._over = over
        raise self._over

    # ---- places

    def _take_assignment(self) -> Assigned | None:
        """Return the newest assignment that was received; None if there is none."""
        assigned, self._assigned = self._assigned, None
        if assigned is None:
            return None
        if assigned.hub and assigned.place.rank == 0 and self._listener is not None:
            assigned = replace(assigned, listener=self._listener.detach())
            self._listener = None
        self._close_listener()
        return assigned

    def _listen(self) -> int:
        """Return the port of a socket on which other hosts can reach this worker, should it become rank 0."""
        if self._listener is None:
            try:
                chosen = os.environ.get("ENGINE_INTERFACE", "").strip()
                address = network.interface_address(chosen) if chosen else None
                self._listener = network.listen(address, 0, backlog=256)
            except ValueError as error:
                raise RendezvousError(f"worker {self.worker}: ENGINE_INTERFACE: {error}") from None
            except OSError as error:
                raise RendezvousError(
                    f"worker {self.worker}: no socket for the other hosts can be opened: {error.strerror}"
                ) from error
        return int(self._listener.getsockname()[1])

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


_HEARD: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "place": Gate._handle_place,
    "void": Gate._handle_void,
    "update": Gate._handle_update,
    "end": Gate._handle_end,
}


_COUNTS = ("size", "local_size", "cross_size")
_NUMBERS = ("rank", "local_rank", "cross_rank")


def _place_of(told: Any) -> WorldPlace:
    """Parse the place that the agent sent. Raises ReadError if it is malformed."""
    counts = {name: get_whole(told, name, 1, MOST) for name in _COUNTS}
    numbers = {name: get_whole(told, name, 0, counts[of] - 1) for name, of in zip(_NUMBERS, _COUNTS, strict=True)}
    slot = told.get("slot")
    if not isinstance(slot, list) or len(slot) != 2 or type(slot[0]) is not str or type(slot[1]) is not int:
        raise ReadError(f"'slot' is {shorten_text(repr(slot))}, and a host and a number are expected")
    return WorldPlace(world=get_whole(told, "world", 0, LARGEST), **counts, **numbers, slot=Slot(*slot))


def _lists_of(message: dict[str, Any], size: int) -> dict[str, Any]:
    """Parse the workers and hosts of a world, by rank. Raises ReadError if they are malformed."""
    lists: dict[str, Any] = {}
    for name, kind in (("members", int), ("hosts", str)):
        found = message.get(name)
        if not isinstance(found, list) or len(found) != size or not all(type(each) is kind for each in found):
            raise ReadError(f"{name!r} is {shorten_text(repr(found))}, and one is expected for each of {size} ranks")
        lists[name] = tuple(found)
    return lists


def _read_variable(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "").strip()
    if not text:
        raise ConfigError(f"{name} is not set, which enginerun sets for each worker of an elastic job")
    return text


def _read_number(environ: Mapping[str, str], name: str) -> int:
    return int(read(Whole(0, LARGEST), _read_variable(environ, name), name))
