"""Rank 0's half of the rendezvous: listen, prove, compare, pass the descriptors on."""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from .. import readable
from ..errors import IncompatibleRanksError, RendezvousError
from ..host.patience import Patience
from ..world import World
from .messages import (
    GRACE,
    GROUP,
    Gathered,
    Hello,
    address,
    close_all,
    frame,
    own_pidfd,
    peer_uid,
    receive,
    sign,
    take,
)

_STRANGERS = 64  # connections that may be unproven at once, beyond one per rank


@dataclass
class _Visitor:
    """A connection. It becomes a member by proving the secret."""

    connection: socket.socket
    nonce: str
    patience: Patience
    buffer: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)
    hello: Hello | None = None

    def close(self) -> None:
        self.connection.close()
        close_all(self.descriptors)
        self.descriptors = []


class Hosting:
    """Rank 0 while it gathers the others: one loop over one selector, which no visitor can hold up."""

    def __init__(
        self, world: World, generation: int, hello: Hello, timeout: float, create: Callable[[], tuple[int, int]]
    ) -> None:
        self.world = world
        self.generation = generation
        self.hello = hello
        self.timeout = timeout
        self.create = create
        self.patience = Patience(timeout)
        self.key = world.proof(generation)
        self.members: dict[int, _Visitor] = {}
        self.strangers: list[_Visitor] = []
        self.selector = selectors.DefaultSelector()
        self.pidfd = own_pidfd()

    def run(self) -> Gathered:
        """Returns when all ranks have come and have been sent their descriptors.

        Raises
        ------
        RendezvousError
            Somebody did not come in time, or died, or came twice. Every rank that came raises the same.
        IncompatibleRanksError
            The ranks run different builds.
        """
        try:
            if self.world.size > 1:
                self._listen()
            return self._welcome()
        except BaseException as error:
            if isinstance(error, RendezvousError):
                self._refuse(error)
            os.close(self.pidfd)
            raise
        finally:
            for visitor in (*self.members.values(), *self.strangers):
                visitor.close()
            self.selector.close()

    def _listen(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(address(self.world, self.generation))
            except OSError as error:
                raise RendezvousError(
                    f"rank 0: another process holds this job's socket ({error.strerror}). Two jobs with one key? Set "
                    "ENGINE_JOB to a different word for each."
                ) from None
            listener.listen(self.world.size + _STRANGERS)
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ)
            while len(self.members) < self.world.size - 1:
                self._turn(listener)

    def _turn(self, listener: socket.socket) -> None:
        """Wait for something to happen, once. Whoever is late is heard once more, in case that only we are."""
        left = self.patience.wait()
        waits = {id(visitor): visitor.patience.wait() for visitor in self.strangers}
        late = [visitor for visitor in self.strangers if not waits[id(visitor)]]
        self._hear(listener, min(left, *waits.values()) if waits else left)
        for visitor in late:
            if visitor in self.strangers:
                self._drop(visitor)
        if not left and (missing := self._missing()):
            raise RendezvousError(f"{missing} did not come within {self.timeout:g} s (ENGINE_START_TIMEOUT)")

    def _hear(self, listener: socket.socket, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            if key.fileobj is listener:
                self._accept(listener)
            elif key.data.connection.fileno() < 0:
                continue  # Dropped a moment ago, in this very loop.
            elif key.fileobj is key.data.connection:
                self._receive(key.data)
            else:
                self._lost(key.data)

    def _missing(self, besides: int = 0) -> str:
        absent = [rank for rank in range(1, self.world.size) if rank not in self.members and rank != besides]
        return readable.ranks(absent) if absent else ""

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if peer_uid(connection) != os.getuid():
            connection.close()
            return
        if len(self.strangers) >= self.world.size + _STRANGERS:
            self._drop(self.strangers[0])
        connection.setblocking(False)
        visitor = _Visitor(connection, secrets.token_hex(16), Patience(GRACE))
        told = {"nonce": visitor.nonce, "seconds": self.patience.left(), "pid": os.getpid()}
        challenge = frame(told, b"", "challenge", "")
        try:
            socket.send_fds(connection, [challenge], [self.pidfd])
        except OSError:
            connection.close()
            return
        self.strangers.append(visitor)
        self.selector.register(connection, selectors.EVENT_READ, visitor)

    def _drop(self, visitor: _Visitor) -> None:
        self.strangers.remove(visitor)
        self.selector.unregister(visitor.connection)
        visitor.close()

    def _receive(self, visitor: _Visitor) -> None:
        try:
            data = receive(visitor.connection, 1 << 16, visitor.descriptors)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if visitor.hello is not None:
            self._lost(visitor)
        if not data:
            return self._drop(visitor)
        visitor.buffer += data
        try:
            message = take(visitor.buffer)
            if message is not None:
                self._prove(visitor, *message)
        except ValueError:
            self._drop(visitor)

    def _prove(self, visitor: _Visitor, proof: bytes, payload: bytes) -> None:
        """Make a visitor a member, or say why not."""
        if not hmac.compare_digest(proof, sign(self.key, "hello", visitor.nonce, payload)):
            # It cannot verify our answer either, and learns from that what is wrong.
            self._send(visitor, frame({"refused": "RendezvousError", "message": "wrong secret"}, b"", "welcome", ""))
            return self._drop(visitor)
        message = json.loads(payload)
        try:
            hello = Hello(**{entry.name: message[entry.name] for entry in fields(Hello)})
        except KeyError as error:
            raise ValueError("not a hello") from error
        if len(visitor.descriptors) != 1:
            raise ValueError("no pidfd")
        visitor.hello = hello
        if hello.size != self.world.size or not 0 < hello.rank < self.world.size:
            self._enter(visitor, -hello.pid)
            raise RendezvousError(
                f"a process (pid {hello.pid}) says it is rank {hello.rank} of {hello.size}, but rank 0 "
                f"(pid {os.getpid()}) belongs to a world of {self.world.size}"
            )
        other = self.members.get(hello.rank)
        if other is not None and other.hello is not None:
            self._enter(visitor, -hello.pid)
            raise RendezvousError(
                f"two processes say they are rank {hello.rank}: pid {other.hello.pid} and pid {hello.pid}"
            )
        self._enter(visitor, hello.rank)

    def _enter(self, visitor: _Visitor, rank: int) -> None:
        """Count it among those who hear the verdict; a rank below 0 is one that is refused."""
        self.strangers.remove(visitor)
        self.members[rank] = visitor
        self.selector.register(visitor.descriptors[0], selectors.EVENT_READ, visitor)

    def _lost(self, visitor: _Visitor) -> None:
        """A member's process ended, or its connection did."""
        assert visitor.hello is not None
        rank = visitor.hello.rank
        self.members.pop(rank).close()
        missing = self._missing(besides=rank)
        raise RendezvousError(
            f"rank {rank} (pid {visitor.hello.pid}) ended while the ranks were gathering"
            + (f"; {missing} had not come yet" if missing else "")
        )

    def _compare(self, hellos: list[Hello]) -> None:
        """Refuse ranks that cannot work together, all differences in one table."""
        lines = []
        for hello in hellos[1:]:
            for name in sorted({*self.hello.build, *hello.build}):
                mine, theirs = self.hello.build.get(name), hello.build.get(name)
                if mine != theirs:
                    mend = "set the same ENGINE_KERNELS" if name == "kernels" else "install the same version"
                    lines.append(f"rank {hello.rank} has {name} {theirs}, rank 0 has {name} {mine}: {mend}")
        if lines:
            raise IncompatibleRanksError("the ranks cannot work together\n  " + "\n  ".join(lines))

    def _welcome(self) -> Gathered:
        visitors = [self.members[rank] for rank in range(1, self.world.size)]
        hellos = [self.hello, *(visitor.hello for visitor in visitors if visitor.hello is not None)]
        self._compare(hellos)
        control, arena = self.create()
        peers = [self.pidfd, *(visitor.descriptors[0] for visitor in visitors)]
        gathered = Gathered(
            control, arena, peers, [hello.pid for hello in hellos], [hello.processors for hello in hellos]
        )
        message = {"pids": gathered.pids, "processors": gathered.processors, "descriptors": 2 + len(peers)}
        for visitor, hello in zip(visitors, hellos[1:], strict=True):
            if self._send(visitor, frame(message, self.key, "welcome", hello.nonce)):
                self._pass(visitor, [control, arena, *peers])
            visitor.descriptors = []  # Ours to keep: they are in `peers`.
        return gathered

    def _send(self, visitor: _Visitor, data: bytes) -> bool:
        """Whether it went. A rank that has just died is the monitor's to report, by its pidfd."""
        visitor.connection.settimeout(GRACE)
        try:
            visitor.connection.sendall(data)
        except OSError:
            return False
        return True

    def _pass(self, visitor: _Visitor, descriptors: list[int]) -> None:
        patience = Patience(GRACE)
        for start in range(0, len(descriptors), GROUP):
            while True:
                try:
                    socket.send_fds(visitor.connection, [b"d"], descriptors[start : start + GROUP])
                    break
                except OSError as error:
                    # The kernel bounds the descriptors that a user has under way; the others are fetching theirs.
                    if error.errno == errno.ETOOMANYREFS and patience.left():
                        time.sleep(0.001)
                        continue
                    if isinstance(error, BrokenPipeError | ConnectionResetError | TimeoutError):
                        return
                    raise

    def _refuse(self, error: RendezvousError) -> None:
        """Tell everyone who came, so that every rank raises the same."""
        kind = "IncompatibleRanksError" if isinstance(error, IncompatibleRanksError) else "RendezvousError"
        for visitor in self.members.values():
            if visitor.hello is not None:
                message = {"refused": kind, "message": str(error)}
                self._send(visitor, frame(message, self.key, "welcome", visitor.hello.nonce))
