"""The rendezvous on the leader of a host: listen, authenticate, compare, send the descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ...config.world import World
from ...errors import CalledOff, EngineError, RendezvousError
from ...errors.formatting import format_exception
from ...host import linux
from ...host.patience import Patience
from ...host.sockets import retry_short, send_all
from ...host.strangers import SPARE, Strangers, accept, free_descriptors
from ...text import readable
from ..acceptor import EXHAUSTED
from ..connection import GRACE, ConnectionEnded
from ..stream import SERVER, AuthenticatedStream, AuthenticationError, StreamError
from ..unix_sockets import GROUP, close_all, peer_uid, receive_with_descriptors
from .hub import Hub
from .hub_client import HubClient
from .inter_host import InterHostRendezvous, make_refusal
from .messages import (
    TELLING,
    WITH_DESCRIPTORS,
    Gathered,
    Hello,
    compare_hellos,
    derive_local_key,
    failed_start,
    make_socket_name,
    own_pidfd,
)
from .options import CancellationToken, RendezvousOptions

_STRANGERS = 64  # most unauthenticated connections at once, beyond one per rank


@dataclass(eq=False)
class _Visitor:
    """A connection to the leader. It becomes a member when it has proven that it knows the secret."""

    connection: socket.socket
    stream: AuthenticatedStream
    patience: Patience
    descriptors: list[int] = field(default_factory=list)
    hello: Hello | None = None

    def read(self) -> dict[str, Any] | None:
        """Return the next message, which may come with descriptors; None as long as it is incomplete.

        It raises a StreamError if the other side does not speak as a rank does. It raises ConnectionEnded if that side
        has closed the connection, and an OSError if the connection is broken.
        """
        while (message := self.stream.receive()) is None:
            nbytes = min(self.stream.missing_bytes(), 1 << 16)
            try:
                data = receive_with_descriptors(self.connection, nbytes, self.descriptors, most=2)
            except BlockingIOError:
                return None
            if len(self.descriptors) > 1:
                raise StreamError("it sends more than one descriptor")
            if not data:
                raise ConnectionEnded(errno.ECONNRESET, "the connection ended")
            self.stream.feed(data)
        return message

    def close(self) -> None:
        self.connection.close()
        close_all(self.descriptors)
        self.descriptors = []


class LocalServer:
    """The rendezvous of a leader with the other ranks of its host: an event loop that no connection can block.

    With one host the leader is rank 0. With several it agrees with the other leaders (`inter_host`) before it sends any
    welcome.
    """

    def __init__(
        self,
        world: World,
        hello: Hello,
        options: RendezvousOptions,
        cancel: CancellationToken | None = None,
    ) -> None:
        self.introduced = False  # whether other ranks may have connected to this one
        self.world = world
        self.cancel = cancel
        self.size = world.local_size if world.several_hosts else world.size
        self.options = options
        self.inter_host: InterHostRendezvous | None = None
        self.hello = hello
        self.patience = Patience(options.timeout)
        self.failures: dict[int, str] = {}  # rank -> why it cannot start
        if hello.failure:
            self._note_failure(hello)
        self.key = derive_local_key(world)
        self.members: dict[int, _Visitor] = {}
        self.strangers: Strangers[_Visitor] = Strangers(self.size + _STRANGERS)
        self.pidfd = own_pidfd()
        try:
            self.selector = selectors.DefaultSelector()
        except BaseException:
            os.close(self.pidfd)
            raise

    def run(self) -> Gathered:
        """Gather the ranks of this host; return when all have come and have been sent their descriptors.

        If a rank did not come in time, died, or came twice, every rank that came raises the same RendezvousError.
        Different builds are an IncompatibleRanksError, and a cancellation before any descriptors were sent is a
        CalledOff.
        """
        try:
            if self.cancel is not None:
                self.selector.register(self.cancel.descriptor, selectors.EVENT_READ)
            if self.world.several_hosts:
                kind = Hub if self.world.rank == 0 else HubClient
                self.inter_host = kind(
                    self.world, self.patience, self.options.timeout, self.options.interface, self.options.sockets
                )
                self.inter_host.note_failure(self.hello)
                self.selector.register(self.inter_host, selectors.EVENT_READ)
                self.introduced = True
                self.inter_host.begin_meeting()
            if self.cancel is not None:
                self.cancel.check()
            if self.size > 1 and not self._run_step(self._listen):
                self._listen()
            return self._welcome_ranks()
        except BaseException as error:
            if not isinstance(error, RendezvousError):
                self._refuse_members(failed_start({self.world.rank: format_exception(error)}))
            else:
                self._refuse_members(error)
            os.close(self.pidfd)
            raise
        finally:
            for visitor in (*self.members.values(), *self.strangers):
                visitor.close()
            if self.inter_host is not None:
                self.inter_host.close()
            self.selector.close()

    def _listen(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(make_socket_name(self.world))
            except OSError as error:
                raise RendezvousError(
                    f"rank {self.world.rank}: another process holds this job's socket ({error.strerror}). Two jobs "
                    "with one key? Set ENGINE_JOB to a different word for each."
                ) from None
            listener.listen(self.size + _STRANGERS)
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ)
            self.introduced = True
            try:
                while len(self.members) < self.size - 1:
                    self._run_step(lambda: self._handle_events(listener))
            finally:
                self.selector.unregister(listener)

    def _run_step(self, step: Callable[[], None]) -> bool:
        """Run a step of the rendezvous, and return whether it succeeded.

        After the first unexpected error the rendezvous goes on for a moment, so that ranks that come later learn of it.
        """
        try:
            step()
        except EngineError:
            raise
        except Exception as error:
            if not self.introduced:
                raise
            self._note_own_failure(error)
            return False
        return True

    def _note_own_failure(self, error: Exception) -> None:
        """Record an error of this rank as the reason why the start fails; raise it if there has been one before."""
        if self.hello.failure:
            raise error
        self.hello.failure = format_exception(error)
        if self.inter_host is not None:
            self.inter_host.record_rank(self.hello)
        else:
            self._note_failure(self.hello)

    def _handle_events(self, listener: socket.socket | None = None) -> None:
        """Wait for events once and handle them, then drop late connections and check the deadline.

        Events come first: a connection may look late only because this process was.
        """
        left = self.patience.wait()
        waits = {id(visitor): visitor.patience.wait() for visitor in self.strangers}
        late = [visitor for visitor in self.strangers if not waits[id(visitor)]]
        others = left if self.inter_host is None else self.inter_host.wait()
        self._poll_events(listener, min(left, others, *waits.values()))
        if self.inter_host is not None:
            self.inter_host.handle_events()
        for visitor in late:
            if visitor in self.strangers:
                self._drop_stranger(visitor)
        if self.inter_host is not None:
            if not self.patience.seconds_left():
                raise self.inter_host.make_timeout_error(self.size - 1 - len(self.members))
        elif not left and (absent := self._list_absent()):
            missing = readable.format_ranks(absent)
            if self.failures:
                raise failed_start(self.failures, missing)
            raise RendezvousError(
                f"{missing} did not come within {self.options.timeout:g} s (ENGINE_START_TIMEOUT)", absent[0]
            )

    def _poll_events(self, listener: socket.socket | None, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.inter_host:
                continue  # `_handle_events` handles it next.
            if self.cancel is not None and key.fileobj == self.cancel.descriptor:
                self.cancel.check()
                continue
            if listener is not None and key.fileobj is listener:
                self._accept(listener)
            elif key.data.connection.fileno() < 0:
                continue  # This loop has just dropped it.
            elif key.fileobj is key.data.connection:
                self._receive(key.data)
            else:
                self._handle_lost_member(key.data, dead=True)

    def _list_absent(self, besides: int = 0) -> list[int]:
        """Return the ranks that have not come, except `besides`."""
        return [rank for rank in range(1, self.world.size) if rank not in self.members and rank != besides]

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = accept(listener, self._drop_unauthenticated, spare=0)
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            raise RendezvousError(
                f"rank {self.world.rank} can hear no other rank: {linux.explain_refusal('accept', error)}"
            ) from None
        if peer_uid(connection) != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        visitor = _Visitor(connection, AuthenticatedStream(self.key, SERVER), Patience(GRACE))
        seconds = self.patience.seconds_left()
        if self.inter_host is not None:  # The hub may have begun later, and lanes take time.
            seconds = self.options.timeout + seconds + 4 * GRACE
        opening = visitor.stream.open(seconds=seconds, pid=os.getpid(), rank=self.world.rank)
        try:
            retry_short(socket.send_fds, connection, [opening], [self.pidfd])
        except OSError:
            connection.close()
            return
        displaced = self.strangers.add(visitor)
        if displaced is not None:
            self._drop_stranger(displaced)
        self.selector.register(connection, selectors.EVENT_READ, visitor)

    def _drop_unauthenticated(self) -> bool:
        """Close an unauthenticated connection to free a descriptor, other hosts' first; False if there is none."""
        if self.inter_host is not None and self.inter_host.drop_unauthenticated():
            return True
        displaced = self.strangers.displace_next()
        if displaced is not None:
            self._drop_stranger(displaced)
        return displaced is not None

    def _drop_stranger(self, visitor: _Visitor) -> None:
        self.strangers.remove(visitor)
        self.selector.unregister(visitor.connection)
        visitor.close()

    def _receive(self, visitor: _Visitor) -> None:
        if visitor.hello is None:
            free_descriptors(self._drop_unauthenticated)
            if visitor.connection.fileno() < 0:
                return
        else:
            return self._handle_lost_member(visitor, dead=False)
        try:
            greeting = visitor.read()
            if greeting is None:
                return
            retry_short(visitor.connection.send, visitor.stream.encode({}), socket.MSG_NOSIGNAL)
        except (OSError, StreamError) as error:
            if isinstance(error, AuthenticationError):
                self._send(visitor, visitor.stream.make_refusal())
            return self._drop_stranger(visitor)
        try:
            self._admit_visitor(visitor, greeting)
        except EngineError:
            raise
        except Exception as error:
            self._note_own_failure(error)  # also sent to this visitor
            self._admit_visitor(visitor, greeting)

    def _admit_visitor(self, visitor: _Visitor, greeting: dict[str, Any]) -> None:
        """Make an authenticated visitor a member, or close its connection if its greeting is malformed."""
        try:
            self._add_member(visitor, greeting)
        except ValueError:
            self._drop_stranger(visitor)

    def _add_member(self, visitor: _Visitor, greeting: dict[str, Any]) -> None:
        """Make a visitor a member; raise a `RendezvousError` if its rank cannot be one."""
        hello = Hello.read(greeting)
        if len(visitor.descriptors) != 1:
            raise ValueError("no pidfd")
        visitor.hello = hello
        leader = self.world.rank
        if hello.size == self.world.size and hello.rank == leader:
            self._enter_member(visitor, -hello.pid)
            raise RendezvousError(f"two processes say they are rank {leader}: pid {os.getpid()} and pid {hello.pid}")
        if hello.size != self.world.size or not 0 <= hello.rank < self.world.size:
            self._enter_member(visitor, -hello.pid)
            raise RendezvousError(
                f"a process (pid {hello.pid}) says it is rank {hello.rank} of {hello.size}, but rank {leader} "
                f"(pid {os.getpid()}) belongs to a world of {self.world.size}"
            )
        if hello.rank < leader:
            self._enter_member(visitor, -hello.pid)
            host = self.world.host_name or socket.gethostname()
            raise RendezvousError(
                f"rank {leader} says it is the first on {host} (local rank 0), where rank {hello.rank} "
                "is too: local ranks must be in the order of ranks; start the processes so, or mend their variables"
            )
        other = self.members.get(hello.rank)
        if other is not None and other.hello is not None:
            self._enter_member(visitor, -hello.pid)
            raise RendezvousError(
                f"two processes say they are rank {hello.rank}: pid {other.hello.pid} and pid {hello.pid}"
            )
        self._enter_member(visitor, hello.rank)
        if self.inter_host is not None:
            self.inter_host.record_rank(hello)
        elif hello.failure:
            self._note_failure(hello)

    def _note_failure(self, hello: Hello) -> None:
        """Note why a rank cannot start; with the first such failure, wait at most `TELLING` seconds for the others."""
        if not self.failures:
            self.patience.reset(min(self.patience.seconds_left(), TELLING))
        self.failures[hello.rank] = hello.failure

    def _enter_member(self, visitor: _Visitor, rank: int) -> None:
        """Add a visitor to the members, which all get the answer; a negative number stands for a refused process."""
        self.strangers.remove(visitor)
        self.members[rank] = visitor
        self.selector.register(visitor.descriptors[0], selectors.EVENT_READ, visitor)

    def _handle_lost_member(self, visitor: _Visitor, dead: bool) -> None:
        """Raise a `RendezvousError` for a member whose process or connection has ended, or that gives up."""
        assert visitor.hello is not None
        rank = visitor.hello.rank
        try:
            last = visitor.read()
            if last is None and not dead:
                return
        except (OSError, StreamError):
            last = None
        if last is not None and "failed" in last:
            raise failed_start({rank: str(last["failed"])})
        self.members.pop(rank).close()
        absent = self._list_absent(besides=rank) if self.inter_host is None else []
        place = f" on {self.inter_host.name}" if self.inter_host is not None else ""
        raise RendezvousError(
            f"rank {rank} (pid {visitor.hello.pid}{place}) ended while the ranks were gathering"
            + (f"; {readable.format_ranks(absent)} had not come yet" if absent else "")
        )

    def _make_memory(self, hellos: list[Hello]) -> tuple[int, int]:
        """Check that the ranks can work together, then make the memory and return its descriptors."""
        free_descriptors(self._drop_unauthenticated, SPARE)
        if self.inter_host is None:
            compare_hellos(hellos, {})
            return self.options.create()
        self.inter_host.record_all_ranks(hellos)
        while self.inter_host.decision is None:
            self._run_step(self._handle_events)
        memory = self.options.create()
        try:
            self.inter_host.record_memory()
            while not self.inter_host.done:
                self._handle_events()
        except BaseException:
            close_all([*memory])
            raise
        return memory

    def _welcome_ranks(self) -> Gathered:
        visitors = [self.members[rank] for rank in sorted(self.members)]
        hellos = [self.hello, *(visitor.hello for visitor in visitors if visitor.hello is not None)]
        control, arena = self._make_memory(hellos)
        try:
            return self._send_welcomes(control, arena, hellos, visitors)
        except BaseException as error:
            decision = None if self.inter_host is None else self.inter_host.decision
            with contextlib.suppress(OSError):  # ranks that have been welcomed do not wait for this one any more
                self.options.abort(control, () if decision is None else decision.hosts, error)
            close_all([control, arena])
            raise

    def _send_welcomes(self, control: int, arena: int, hellos: list[Hello], visitors: list[_Visitor]) -> Gathered:
        """Send the welcomes, and return this rank's own result."""
        gathered = self._make_result(control, arena, hellos)
        try:
            self._welcome_members(gathered, hellos, visitors)
        except BaseException:
            close_all([*gathered.trunks.values(), *chain(*gathered.lanes.values())])  # other hosts notice it by that
            raise
        for visitor in visitors:
            visitor.descriptors = []  # kept open: they are in `peers`
        return gathered

    def _welcome_members(self, gathered: Gathered, hellos: list[Hello], visitors: list[_Visitor]) -> None:
        """Send the other ranks of this host their welcomes."""
        pidfds = [self.pidfd, *(visitor.descriptors[0] for visitor in visitors)]
        for hello, pidfd in zip(hellos, pidfds, strict=True):
            gathered.peers[hello.rank] = pidfd
        message = {
            **{
                name: getattr(gathered, name)
                for name in ("pids", "processors", "hosts", "host", "kernels", "generation")
            },
            "crew": [hello.rank for hello in hellos],
        }
        for visitor, hello in zip(visitors, hellos[1:], strict=True):
            lanes = {} if self.inter_host is None else self.inter_host.detach_lanes(hello.rank)
            trunks = {} if self.inter_host is None else self.inter_host.detach_trunks(hello.rank)
            links = [*trunks.values(), *chain(*lanes.values())]
            try:
                descriptors = [gathered.control, gathered.arena, *pidfds, *links]
                welcome = {**message, "trunks": list(trunks), "lanes": list(lanes), "sockets": self.options.sockets}
                welcome["descriptors"] = len(descriptors)
                if self._send(visitor, visitor.stream.encode(welcome)):
                    self._send_descriptors(visitor, descriptors)
            finally:
                close_all(links)

    def _make_result(self, control: int, arena: int, hellos: list[Hello]) -> Gathered:
        """Return this rank's result of the rendezvous, without the pidfds."""
        peers = [-1] * self.world.size
        if self.inter_host is None:
            return Gathered(
                *(control, arena, peers, [hello.pid for hello in hellos], [hello.processors for hello in hellos]),
                generation=max(hello.worlds for hello in hellos),
            )
        decision = self.inter_host.decision
        assert decision is not None
        rank = self.world.rank
        return Gathered(
            *(control, arena, peers, decision.pids, decision.processors, tuple(decision.hosts), decision.hosts[rank]),
            generation=decision.generation,
            kernels=decision.kernels,
            trunks=self.inter_host.detach_trunks(rank),
            lanes=self.inter_host.detach_lanes(rank),
        )

    def _send(self, visitor: _Visitor, data: bytes) -> bool:
        """Send data and return whether that succeeded. The monitor reports a rank that has just died."""
        visitor.connection.settimeout(GRACE)
        try:
            send_all(visitor.connection, data, GRACE)
        except OSError:
            return False
        return True

    def _send_descriptors(self, visitor: _Visitor, descriptors: list[int]) -> None:
        patience = Patience(GRACE)
        for start in range(0, len(descriptors), GROUP):
            while True:
                try:
                    part = descriptors[start : start + GROUP]
                    retry_short(socket.send_fds, visitor.connection, [WITH_DESCRIPTORS], part)
                    break
                except OSError as error:
                    # The kernel limits a user's descriptors in flight; other ranks are still receiving theirs.
                    if error.errno == errno.ETOOMANYREFS and patience.seconds_left():
                        time.sleep(0.001)
                        continue
                    if isinstance(error, BrokenPipeError | ConnectionResetError | TimeoutError):
                        return
                    raise

    def _refuse_members(self, error: RendezvousError) -> None:
        """Send an error to all ranks that came, so that every rank raises the same."""
        for visitor in self.members.values():
            if visitor.hello is not None:
                self._send(visitor, visitor.stream.encode(make_refusal(error)))
        if self.inter_host is not None and self.inter_host.done:
            return  # The engines use the connections between hosts by now, and notice that they end.
        if self.inter_host is not None and not isinstance(error, CalledOff):  # The driver tells every host of it.
            self.inter_host.send_refusal(error)
