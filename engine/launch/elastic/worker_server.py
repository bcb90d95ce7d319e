"""The server of an agent to which its workers connect: the agent's end of `engine.elastic.worker.gate`.

A connection must be of this user, and prove that it knows the job's secret. If two claim to be the same worker, the
first one counts while it is connected. Except for the greeting, the server does not interpret messages.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any, Protocol

from ...host import linux
from ...host.sockets import retry_short, wait_readable
from ...host.strangers import NO_DESCRIPTORS, Strangers, accept
from ...net.frames import MALFORMED
from ...net.stream import SERVER, AuthenticatedStream, AuthenticationError, StreamError, derive_key
from ...net.unix_sockets import peer_uid
from ...text import readable
from ..process.reader_loop import ReaderLoop

STRANGERS = 32  # most unauthenticated connections (at least two for each worker); with more, the oldest is closed
BACKLOG = 128  # backlog of the listener (at least two for each worker), beyond which the kernel refuses connections


class WorkerListener(Protocol):
    """Receiver of what workers say."""

    def worker_said(self, worker: int, message: dict[str, Any]) -> None:
        """Handle a worker's message; raise a `StreamError` to turn the worker away."""
        ...

    def show_line(self, line: str) -> None:
        """Show a line to the user."""
        ...


class _Peer:
    """A connection to the server."""

    def __init__(self, connection: socket.socket, stream: AuthenticatedStream) -> None:
        self.connection = connection
        self.stream = stream
        self.worker: int | None = None


class WorkerServer:
    """Server on an abstract socket of this network namespace.

    `several` says whether workers may be on several hosts; at most `most` of them connect at once.
    """

    def __init__(
        self,
        secret: str,
        several: bool,
        most: int,
        loop: ReaderLoop,
        listener: WorkerListener,
    ) -> None:
        self.name = f"engine-gate-{os.getuid()}-{secrets.token_hex(12)}"  # without the socket's leading NUL
        self._key = derive_key(secret, "gate")
        self._several = several
        self._loop = loop
        self._told = listener
        self._strangers: Strangers[_Peer] = Strangers(max(STRANGERS, 2 * most))
        self._workers: dict[int, _Peer] = {}
        self._deaf = False  # whether the server accepts nothing, for lack of descriptors
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(max(BACKLOG, 2 * most))
        loop.add_reader(self._listener.fileno(), self._accept)

    def send(self, worker: int, kind: str, /, **fields: Any) -> None:
        """Send a message to a worker, if it is connected; close the connection if its buffer is full."""
        peer = self._workers.get(worker)
        if peer is not None:
            self._write(peer, peer.stream.encode({"kind": kind, **fields}))

    def forget_worker(self, worker: int) -> None:
        """Handle the last messages of a worker whose process has ended, and close its connection.

        Other workers are not read meanwhile, since they might send messages without end.
        """
        own = [self._workers[worker]] if worker in self._workers else list(self._strangers)
        for peer in own:
            while peer.worker in (None, worker) and (descriptor := peer.connection.fileno()) >= 0:
                if not wait_readable([descriptor], 0):
                    break
                self._read(peer)
        if worker in self._workers:
            self._close(self._workers[worker])
        self._hear_again()

    def close(self) -> None:
        """Close the listener and all connections, which ends workers that are still connected."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for peer in [*self._strangers, *self._workers.values()]:
            self._close(peer)

    def _accept(self) -> None:
        try:
            connection, _ = accept(self._listener, self._drop_unauthenticated, spare=0)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:  # the listener stays readable until there are some
                self._told.show_line(f"no worker can come to the gate: {linux.explain_refusal('accept', error)}")
                self._loop.remove_reader(self._listener.fileno())
                self._deaf = True
            return  # otherwise the connection has ended already
        if peer_uid(connection) != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        peer = _Peer(connection, AuthenticatedStream(self._key, SERVER))
        displaced = self._strangers.add(peer)
        if displaced is not None:
            self._close(displaced)
        self._loop.add_reader(connection.fileno(), lambda: self._read(peer))
        self._write(peer, peer.stream.open())

    def _drop_unauthenticated(self) -> bool:
        """Close the oldest unauthenticated connection to free a descriptor; return False if there is none."""
        displaced = self._strangers.displace_next()
        if displaced is not None:
            self._close(displaced)
        return displaced is not None

    def _hear_again(self) -> None:
        """Resume accepting: there may be free descriptors again."""
        if self._deaf and self._listener.fileno() >= 0:
            self._deaf = False
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _read(self, peer: _Peer) -> None:
        stream = peer.stream
        try:
            data = retry_short(peer.connection.recv, 1 << 16 if stream.authenticated else stream.missing_bytes())
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(peer)
            return
        try:
            stream.feed(data)
            while peer.connection.fileno() >= 0 and (message := stream.receive()) is not None:
                self._handle_message(peer, message)
        except MALFORMED as error:
            if isinstance(error, AuthenticationError) and not stream.authenticated:
                self._write(peer, stream.make_refusal())
            who = "somebody" if peer.worker is None else f"worker {peer.worker}"
            self._told.show_line(f"{who} was turned away at the gate: {readable.replace_unprintable(str(error))}")
            self._close(peer)

    def _handle_message(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.worker is not None:
            self._told.worker_said(peer.worker, message)
            return
        worker = message.get("worker")
        if type(worker) is not int or worker < 0:
            raise StreamError("it does not say which worker it is")
        peer.worker = worker
        if peer.worker in self._workers:
            raise StreamError("another process of that number is there already")
        self._strangers.remove(peer)
        self._workers[peer.worker] = peer
        self._write(peer, peer.stream.encode({"several": self._several}))

    def _write(self, peer: _Peer, data: bytes) -> None:
        try:
            whole = retry_short(peer.connection.send, data, socket.MSG_NOSIGNAL) == len(data)
        except OSError:
            whole = False
        if not whole:
            self._close(peer)

    def _close(self, peer: _Peer) -> None:
        if peer.connection.fileno() < 0:
            return
        self._loop.remove_reader(peer.connection.fileno())
        peer.connection.close()
        self._hear_again()
        if peer in self._strangers:
            self._strangers.remove(peer)
        elif peer.worker is not None and self._workers.get(peer.worker) is peer:
            del self._workers[peer.worker]
