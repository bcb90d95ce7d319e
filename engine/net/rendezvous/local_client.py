"""The rendezvous on a rank that is not the leader of its host."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time
from itertools import islice
from typing import Any

from ...config.world import World
from ...errors import EngineError, RendezvousError
from ...host.patience import Patience
from ...host.sockets import retry_short, send_all
from ...text import readable
from ...text.bounded_reader import number, text, whole
from .. import frames
from ..stream import GRACE, frame, sign, take
from ..unix_sockets import close_all, peer_uid, ready_to_read, receive
from .cancellation import CancellationToken
from .inter_host import SECONDS, refused
from .messages import LIMIT, TELLING, WITH_DESCRIPTORS, Abort, Gathered, Hello, address, expect_welcome, own_pidfd

_SOON = 0.05  # seconds


class LocalClient:
    """The rendezvous of a rank that is no leader: connect to the leader, authenticate, wait for its answer."""

    def __init__(
        self, world: World, hello: Hello, timeout: float, abort: Abort, called_off: CancellationToken | None = None
    ) -> None:
        self.abort = abort
        self.answer: tuple[bytes, bytes] | None = None  # a welcome or a refusal
        self.taken: list[int] = []  # the descriptors that have come with it
        self.called_off = called_off
        self.hello = hello
        self.address = address(world)
        self.leader, self.leader_rank = ("local rank 0", -1) if world.several_hosts else ("rank 0", 0)
        self.key = world.proof
        self.timeout = min(timeout, TELLING) if hello.failure else timeout
        self.patience = Patience(self.timeout)
        self.introduced = False  # whether the leader may know of this rank
        self.pidfd = own_pidfd()

    def run(self) -> Gathered:
        """Meet the leader; return when all ranks have come.

        Raises
        ------
        RendezvousError
            A rank did not come in time, or died; the message names it.
        IncompatibleRanksError
            The ranks run different builds.
        CalledOff
            The world is called off before the leader's answer has come.
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
                    answer = self._talk(connection)
                    if answer is not None:
                        return answer
            if not self.patience.left():
                raise RendezvousError(
                    f"rank {self.hello.rank}: {self.leader} did not come within {self.timeout:g} s. Is it running, on "
                    "this host, as this user, in the same job? ENGINE_START_TIMEOUT gives it more time.",
                    absent=self.leader_rank,
                )
            # Nothing announces that a socket has appeared.
            if self.called_off is None:
                time.sleep(pause)
            else:
                self.called_off.expect_none(pause)
            pause = min(pause * 1.5, 0.05)

    def _connect(self, connection: socket.socket) -> bool:
        seconds = self.patience.wait()
        if self.called_off is not None:
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

    def _talk(self, connection: socket.socket) -> Gathered | None:
        """Hold one conversation with the leader; return None if it broke off before this rank was introduced."""
        received: list[int] = []
        buffer = bytearray()
        try:
            challenge = self._message(connection, buffer, received, Patience(GRACE))
            if challenge is None or not received:
                return None
            challenged = frames.parse_object(challenge[1])
            leader, pid = whole(challenged, "rank", 0, self.hello.size - 1), whole(challenged, "pid", 1, 1 << 31)
            seconds = number(challenged, "seconds", 0, SECONDS)
            self.leader, self.leader_rank = f"rank {leader}", leader
            hello = frame(self.hello.told(), self.key, "hello", text(challenged, "nonce"))
            try:
                sent = retry_short(socket.send_fds, connection, [hello], [self.pidfd])
                send_all(connection, hello[sent:], GRACE)
            except OSError:
                return None
            self.introduced = True
            patience = Patience(seconds + GRACE)
            try:
                self.answer = answer = self._message(connection, buffer, received, patience, LIMIT)
                if answer is None:
                    # A dying process closes its sockets a moment before its pidfd becomes readable.
                    if ready_to_read(received[:1], 1.0):
                        end = "died before all ranks had come"
                    else:
                        end = "went on without this process: either all its ranks had come, or it fell silent"
                    raise RendezvousError(f"{self.leader} (pid {pid}) {end}")
                return self._verdict(connection, answer)
            except EngineError:
                raise
            except Exception as error:
                self._tell_failure(connection, buffer, received, error)
                raise
            finally:
                close_all(self.taken)
        finally:
            close_all(received)

    def _tell_failure(
        self, connection: socket.socket, buffer: bytearray, received: list[int], error: Exception
    ) -> None:
        """Report why this rank gives up: to the leader, and to ranks welcomed already by failing their world."""
        told = {"failed": readable.exception(error)}
        with contextlib.suppress(OSError):
            send_all(connection, frame(told, self.key, "failed", self.hello.nonce), GRACE)
        with contextlib.suppress(Exception):  # `error` is the first cause
            answer = self.answer or self._message(connection, buffer, received, Patience(GRACE), LIMIT)
            welcome = {} if answer is None else self._proven(answer)
            expect_welcome(welcome, self.hello.size)  # raises for a refusal: then no rank has the memory
            while not self.taken and receive(connection, 1, self.taken):
                pass
            if self.taken:
                self.abort(self.taken[0], welcome["hosts"], error)

    def _proven(self, answer: tuple[bytes, bytes]) -> dict[str, Any]:
        """Authenticate and parse the leader's answer: a welcome or a refusal."""
        proof, payload = answer
        if not hmac.compare_digest(proof, sign(self.key, "welcome", self.hello.nonce, payload)):
            raise RendezvousError(
                f"rank {self.hello.rank}: {self.leader} does not know this job's secret. Is ENGINE_SECRET the same on "
                "both?"
            )
        return frames.parse_object(payload)

    def _verdict(self, connection: socket.socket, answer: tuple[bytes, bytes]) -> Gathered:
        """Receive the descriptors of a welcome, or raise the error of a refusal."""
        message = self._proven(answer)
        refused(message)
        expect_welcome(message, self.hello.size)
        while len(self.taken) < message["descriptors"]:
            data = receive(connection, 1, self.taken)
            if data != WITH_DESCRIPTORS:  # a refusal: the leader cannot send them
                refusal = self._message(connection, bytearray(data), [], Patience(GRACE), LIMIT) if data else None
                if refusal is None:
                    raise RendezvousError(f"{self.leader} ended in the middle of its welcome")
                return self._verdict(connection, refusal)
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

    def _message(
        self,
        connection: socket.socket,
        buffer: bytearray,
        descriptors: list[int],
        patience: Patience,
        limit: int = frames.UNPROVEN,
    ) -> tuple[bytes, bytes] | None:
        """Receive the next message; None if the other side closes or dies, or sends nothing in time."""
        while True:
            whole = take(buffer, limit)
            if whole is not None:
                return whole
            # The first descriptor is the leader's pidfd: its death shows even while a forked child holds the socket.
            speakers = [connection.fileno(), *descriptors[:1]]
            watched = speakers if self.called_off is None else [*speakers, self.called_off.descriptor]
            while not (ready := ready_to_read(watched, patience.wait()) & set(speakers)) and patience.left():
                if self.called_off is not None:
                    self.called_off.check()
            if connection.fileno() not in ready:
                return None
            # Read exactly this message: the bytes after it carry descriptors.
            try:
                data = receive(connection, frames.missing(buffer, limit), descriptors)
            except (ConnectionError, TimeoutError):
                return None
            if not data:
                return None
            buffer += data
