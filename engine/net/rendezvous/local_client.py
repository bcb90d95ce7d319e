"""The rendezvous on a rank that is not the leader of its host."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from itertools import islice
from typing import Any

from ...config.world import World
from ...errors import EngineError, RendezvousError
from ...errors.formatting import format_exception
from ...host.patience import Patience
from ...host.sockets import retry_short, send_all, wait_readable
from ...text.bounded_reader import get_number, get_whole
from ..connection import GRACE
from ..stream import CLIENT, AuthenticatedStream, AuthenticationError, StreamError
from ..unix_sockets import close_all, peer_uid, receive_with_descriptors
from .inter_host import SECONDS, raise_refusal
from .messages import (
    TELLING,
    WITH_DESCRIPTORS,
    Gathered,
    Hello,
    derive_local_key,
    expect_welcome,
    make_socket_name,
    own_pidfd,
)
from .options import CancellationToken, RendezvousOptions

_SOON = 0.05  # seconds


class LocalClient:
    """The rendezvous of a rank that is no leader: connect to the leader, authenticate, wait for its answer."""

    def __init__(
        self, world: World, hello: Hello, options: RendezvousOptions, cancel: CancellationToken | None = None
    ) -> None:
        self.abort = options.abort
        self.answer: dict[str, Any] | None = None  # a welcome or a refusal
        self.taken: list[int] = []  # the descriptors that have come with it
        self.cancel = cancel
        self.hello = hello
        self.address = make_socket_name(world)
        self.leader, self.leader_rank = ("local rank 0", -1) if world.several_hosts else ("rank 0", 0)
        self.key = derive_local_key(world)
        self.stream = AuthenticatedStream(self.key, CLIENT)
        self.timeout = min(options.timeout, TELLING) if hello.failure else options.timeout
        self.patience = Patience(self.timeout)
        self.introduced = False  # whether the leader may know of this rank
        self.pidfd = own_pidfd()

    def run(self) -> Gathered:
        """Meet the leader; return when all ranks have come.

        A RendezvousError names a rank that did not come in time, or died. Different builds are an
        IncompatibleRanksError, and a cancellation before the leader's answer is a CalledOff.
        """
        try:
            return self._run()
        finally:
            os.close(self.pidfd)

    def _run(self) -> Gathered:
        pause = 0.002
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                if self._connect(connection):
                    answer = self._exchange_messages(connection)
                    if answer is not None:
                        return answer
            if not self.patience.seconds_left():
                raise RendezvousError(
                    f"rank {self.hello.rank}: {self.leader} did not come within {self.timeout:g} s. Is it running, on "
                    "this host, as this user, in the same job? ENGINE_START_TIMEOUT gives it more time.",
                    absent=self.leader_rank,
                )
            # Nothing announces that a socket has appeared.
            if self.cancel is None:
                time.sleep(pause)
            else:
                self.cancel.wait(pause)
            pause = min(pause * 1.5, 0.05)

    def _connect(self, connection: socket.socket) -> bool:
        seconds = self.patience.wait()
        if self.cancel is not None:
            seconds = min(seconds, _SOON)  # The leader's backlog may be full, and a cancellation arrive meanwhile.
        connection.settimeout(max(0.001, seconds))
        try:
            retry_short(connection.connect, self.address)
        except (ConnectionRefusedError, BlockingIOError, TimeoutError):
            return False
        connection.settimeout(GRACE)
        uid = peer_uid(connection)
        if uid != os.getuid():
            raise RendezvousError(
                f"rank {self.hello.rank}: the job's socket belongs to user {uid}, not to {os.getuid()}"
            )
        return True

    def _exchange_messages(self, connection: socket.socket) -> Gathered | None:
        """Hold one conversation with the leader; return None if it broke off before this rank was introduced."""
        received: list[int] = []
        self.stream = AuthenticatedStream(self.key, CLIENT)
        try:
            opening = self._receive_message(connection, received, Patience(GRACE))
            if opening is None or not received:
                return None
            leader, pid = get_whole(opening, "rank", 0, self.hello.size - 1), get_whole(opening, "pid", 1, 1 << 31)
            seconds = get_number(opening, "seconds", 0, SECONDS)
            self.leader, self.leader_rank = f"rank {leader}", leader
            hello = self.stream.encode(self.hello.to_message())
            try:
                sent = retry_short(socket.send_fds, connection, [hello], [self.pidfd])
                send_all(connection, hello[sent:], GRACE)
            except OSError:
                return None
            self.introduced = True
            patience = Patience(seconds + GRACE)
            try:
                admitted = self._receive_message(connection, received, patience)
                self.answer = None if admitted is None else self._receive_message(connection, received, patience)
                if self.answer is None:
                    # A dying process closes its sockets a moment before its pidfd becomes readable.
                    if wait_readable(received[:1], 1.0):
                        end = "died before all ranks had come"
                    else:
                        end = "went on without this process: either all its ranks had come, or it fell silent"
                    raise RendezvousError(f"{self.leader} (pid {pid}) {end}")
                return self._receive_welcome(connection, self.answer)
            except EngineError:
                raise
            except Exception as error:
                self._tell_failure(connection, received, error)
                raise
            finally:
                close_all(self.taken)
        finally:
            close_all(received)

    def _tell_failure(self, connection: socket.socket, received: list[int], error: Exception) -> None:
        """Report why this rank gives up: to the leader, and to ranks welcomed already by failing their world."""
        with contextlib.suppress(OSError):
            send_all(connection, self.stream.encode({"failed": format_exception(error)}), GRACE)
        with contextlib.suppress(Exception):  # `error` is the first cause
            for _ in range(2):  # first the empty answer to the greeting, if that has not been read
                self.answer = self.answer or self._receive_message(connection, received, Patience(GRACE))
            assert self.answer is not None
            expect_welcome(self.answer, self.hello.size)  # raises for a refusal: then no rank has the memory
            while not self.taken and receive_with_descriptors(connection, 1, self.taken):
                pass
            if self.taken:
                self.abort(self.taken[0], self.answer["hosts"], error)

    def _receive_welcome(self, connection: socket.socket, message: dict[str, Any]) -> Gathered:
        """Receive the descriptors of a welcome, or raise the error of a refusal."""
        raise_refusal(message)
        expect_welcome(message, self.hello.size)
        while len(self.taken) < message["descriptors"]:
            data = receive_with_descriptors(connection, 1, self.taken)
            if data != WITH_DESCRIPTORS:  # a refusal: the leader cannot send them
                self.stream.feed(data)
                refusal = self._receive_message(connection, [], Patience(GRACE)) if data else None
                if refusal is None:
                    raise RendezvousError(f"{self.leader} ended in the middle of its welcome")
                return self._receive_welcome(connection, refusal)
        control, arena, *rest = self.taken
        crew, lanes, sockets = message["crew"], message["lanes"], message["sockets"]
        links = iter(rest[len(crew) :])
        peers = [-1] * self.hello.size
        for rank, pidfd in zip(crew, rest, strict=False):
            peers[rank] = pidfd
        gathered = Gathered(
            *(control, arena, peers, message["pids"], message["processors"], tuple(message["hosts"]), message["host"]),
            generation=message["generation"],
            kernels=message["kernels"],
            trunks=dict(zip(message["trunks"], links, strict=False)),
            lanes={rank: list(islice(links, sockets)) for rank in lanes},
        )
        self.taken = []  # they are the caller's
        return gathered

    def _receive_message(
        self, connection: socket.socket, descriptors: list[int], patience: Patience
    ) -> dict[str, Any] | None:
        """Receive the next message; None if the other side closes or dies, or sends nothing in time."""
        while (message := self._next_message()) is None:
            # The first descriptor is the leader's pidfd: its death shows even while a forked child holds the socket.
            speakers = [connection.fileno(), *descriptors[:1]]
            watched = speakers if self.cancel is None else [*speakers, self.cancel.descriptor]
            while not (ready := wait_readable(watched, patience.wait()) & set(speakers)) and patience.seconds_left():
                if self.cancel is not None:
                    self.cancel.check()
            if connection.fileno() not in ready:
                return None
            # Read exactly this message: the bytes after it carry descriptors.
            try:
                data = receive_with_descriptors(connection, self.stream.missing_bytes(), descriptors, most=2)
            except (ConnectionError, TimeoutError):
                return None
            if len(descriptors) > 1:
                raise self._not_leader("it sends more than one descriptor")
            if not data:
                return None
            self.stream.feed(data)
        return message

    def _next_message(self) -> dict[str, Any] | None:
        try:
            return self.stream.receive()
        except AuthenticationError:
            raise RendezvousError(
                f"rank {self.hello.rank}: {self.leader} does not know this job's secret. Is ENGINE_SECRET the same on "
                "both?"
            ) from None
        except StreamError as error:
            raise self._not_leader(str(error)) from None

    def _not_leader(self, why: str) -> RendezvousError:
        return RendezvousError(
            f"rank {self.hello.rank}: the process that has the name of this job's socket is not its {self.leader}: "
            f"{why}"
        )
