"""The hub, rank 0 among the leaders of hosts: it collects and compares all ranks, and decides their layout."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import asdict, dataclass, field
from typing import Any

from ...config.hub_address import HubAddress
from ...config.world import World
from ...errors import RendezvousError
from ...host import network
from ...host.network import Address
from ...host.patience import Patience
from ...text import readable
from ...text.bounded_reader import parse_natural, shorten_text
from ..acceptor import Acceptor
from ..connection import GRACE, Connection
from ..event_loop import Coroutine
from ..frames import MALFORMED
from .inter_host import STRANGERS, HubDecision, InterHostRendezvous, accept_ranks, raise_refusal
from .layout import Layout
from .messages import TELLING, Hello, common_kernels, compare_hellos, failed_start


@dataclass(eq=False)
class Host:
    """The hub's state of a host."""

    leader: int  # rank of its leader
    pid: int  # process id of its leader
    name: str  # host name that its leader gives
    processes: int  # number of processes that the launcher has started there
    connection: Connection | None = None  # connection to its leader; None for the hub's own host
    pids: dict[int, int] = field(default_factory=dict)  # process id of each rank that has come there
    hellos: list[Hello] = field(default_factory=list)  # hellos of all its ranks; empty until all have come
    # Address at which its leader accepts lanes; None for the hub if lanes use its trunks' address
    lane_address: Address | None = None
    ready: bool = False  # whether its memory is made and its lanes are open
    address: str = ""  # address as the hub sees it; for the hub's host, as the first leader sees it

    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.address else self.name


class Hub(InterHostRendezvous):
    """Rank 0 among the leaders; it takes the parameters of `InterHostRendezvous`."""

    def __init__(self, world: World, patience: Patience, timeout: float, interface: str | None, sockets: int) -> None:
        super().__init__(world, patience, timeout, interface, sockets)
        self.own = Host(0, os.getpid(), self.name, world.local_size, pids={0: os.getpid()})
        self.hosts = [self.own]
        assert world.hub is not None
        self.address = world.hub
        self.hurried = False
        self.lane_acceptor: Acceptor | None = None  # port for lanes, if they have an interface of their own

    def begin_meeting(self) -> None:
        """Listen for the leaders of other hosts; raises as `InterHostRendezvous.begin_meeting` does."""
        self._shorten_wait()
        chosen = self.chosen_address()
        listeners = _open_listeners(self.address, self.world.size, chosen)
        self.acceptor = accept_ranks(self.loop, listeners, self.key, self._handle_connection)
        if chosen is not None:
            listener = network.listen(chosen, 0, self.world.size + STRANGERS)
            self.lane_acceptor = accept_ranks(self.loop, [listener], self.key, self._handle_connection)
            self.own.lane_address = self.lane_acceptor.address

    def record_rank(self, hello: Hello) -> None:
        """Record a rank of this host that has come."""
        self.note_failure(hello)
        self._record_processes(self.own, {hello.rank: hello.pid})
        self._shorten_wait()

    def record_all_ranks(self, hellos: list[Hello]) -> None:
        """Record that all ranks of this host have come."""
        self.own.hellos = hellos
        self._decide_layout()

    def list_trunks(self) -> dict[int, Connection]:
        """Return the connection to each host's leader, by host number; the numbers are final after `_decide_layout`."""
        connections = [host.connection for host in self.hosts if host.connection is not None]
        return dict(enumerate(connections, 1))

    def record_memory(self) -> None:
        """Record that the memory of this host's ranks is made."""
        super().record_memory()
        self.own.ready = True
        self._finish_if_ready()

    def drop_unauthenticated(self) -> bool:
        """Close an unauthenticated connection to free a descriptor; return False if there is none."""
        lanes = self.lane_acceptor
        return super().drop_unauthenticated() or (lanes is not None and lanes.drop_unauthenticated())

    def close(self) -> None:
        """Close every listener, and every connection that was not handed over."""
        super().close()
        if self.lane_acceptor is not None:
            self.lane_acceptor.close()

    def make_timeout_error(self, absent: int) -> RendezvousError:
        """Return the error of a timeout: the ranks that came, those that did not, and the connections turned away."""
        if self.decision is not None:
            late = ", ".join(str(host) for host in self.hosts if not host.ready)
            return RendezvousError(f"{late} did not make memory and connections within {self.decision.seconds:.3g} s")
        known = {rank for host in self.hosts for rank in host.pids}
        missing_ranks = [rank for rank in range(self.world.size) if rank not in known]
        missing = readable.format_ranks(missing_ranks)
        if self.failures:
            return failed_start(self.failures, missing)
        lines = [f"{missing} did not come within {self.timeout:g} s (ENGINE_START_TIMEOUT)"]
        for host in self.hosts:
            came = f"{host}: {readable.format_ranks(host.pids)} came"
            lack = host.processes - len(host.pids)
            lines.append(came + (f", {lack} of its {host.processes} processes did not" if lack > 0 else ""))
        assert self.acceptor is not None
        called = sum(host.processes for host in self.hosts)
        if called < self.world.size and not self.acceptor.saw_stranger:  # A connection turned away may be from there.
            others = "the other hosts" if len(self.hosts) == 1 else "the remaining hosts"
            lines.append(
                f"nobody from {others} has called: they are still importing, or the network keeps them from "
                f"{self.name} at {self.address}, where rank 0 listens; start_timeout (ENGINE_START_TIMEOUT, "
                "--start-timeout) gives them more time"
            )
        lines += [f"somebody at {host} {wrong}" for host, wrong in self.acceptor.rejected.items()]
        return RendezvousError("\n  ".join(lines), missing_ranks[0] if missing_ranks else None)

    def _handle_connection(self, connection: Connection, greeting: dict[str, Any]) -> Coroutine[None] | None:
        """Continue with an authenticated connection: a lane, or one of a leader."""
        if greeting.get("role") == "lane":
            self.answer_lane(connection, greeting, self.own.pids)
            return None
        numbers: list[Any] = [greeting.get(name) for name in ("rank", "pid", "processes", "size")]
        if not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers):
            raise ValueError("a greeting of no leader")
        rank, pid, processes, _ = numbers
        host = Host(rank, pid, readable.replace_unprintable(str(greeting.get("name"))), processes, connection)
        host.address = connection.there.host
        return self._with_leader(host, connection, greeting)

    def _with_leader(self, host: Host, connection: Connection, greeting: dict[str, Any]) -> Coroutine[None]:
        """Exchange messages with a leader until all hosts are ready."""
        try:
            name = str(self.own) if self.own.address else f"{self.own} ({connection.here.host})"
            connection.send_message({"seconds": self.patience.seconds_left(), "name": name})
            first = yield from connection.receive_message()
        except (OSError, ValueError):
            connection.close()  # The leader has tried another address meanwhile, and may call again.
            return
        self.own.address = self.own.address or connection.here.host
        self.hosts.append(host)
        try:
            if greeting["size"] != self.world.size:
                raise RendezvousError(
                    f"rank {host.leader} on {host} belongs to a world of {greeting['size']}, rank 0 to one of "
                    f"{self.world.size}"
                )
            self._handle_leader_message(host, first)
            while not self.done:
                message = yield from connection.receive_message()
                self._handle_leader_message(host, message)
        except (OSError, ValueError):
            # Its next message is lost with the connection.
            raise RendezvousError(
                f"rank {host.leader} (pid {host.pid}), which leads the ranks on {host}, ended or was cut off while the "
                "ranks were gathering"
            ) from None

    def _handle_leader_message(self, host: Host, message: dict[str, Any]) -> None:
        """Handle a message of an authenticated leader, which may run another version of the engine."""
        try:
            self._apply_leader_message(host, message)
        except MALFORMED as error:
            raise RendezvousError(
                f"rank {host.leader} (pid {host.pid}), which leads the ranks on {host}, says what no leader says: "
                f"{shorten_text(repr(error), 200)}; install the same version on all hosts"
            ) from None

    def _apply_leader_message(self, host: Host, message: dict[str, Any]) -> None:
        """Handle a leader's message: `come`, `crew`, `ready` or a refusal."""
        raise_refusal(message)
        if "come" in message:
            self._record_processes(host, _parse_rank_pids(message["come"]))
            failures = dict(message.get("failures", ()))
            self.failures |= {
                _parse_rank(rank): readable.replace_unprintable(str(text)) for rank, text in failures.items()
            }
            self._shorten_wait()
        elif "crew" in message:
            host.hellos = [Hello.read(hello) for hello in message["crew"]]
            if sorted(hello.rank for hello in host.hellos) != sorted(host.pids):
                raise ValueError("ranks that have not come there")
            host.lane_address = network.read_address(message["lane_address"])
            self._decide_layout()
        elif "ready" in message:
            host.ready = True
            self._finish_if_ready()

    def _record_processes(self, host: Host, pids: dict[int, int]) -> None:
        """Record processes that have come to a host; raise a `RendezvousError` for a rank that is taken or invalid."""
        for rank, pid in pids.items():
            if not 0 <= rank < self.world.size:
                raise RendezvousError(f"pid {pid} on {host} says it is rank {rank}, in a world of {self.world.size}")
            for other in self.hosts:
                if rank in other.pids and other is not host:
                    raise RendezvousError(
                        f"two processes say they are rank {rank}: pid {other.pids[rank]} on {other} and pid {pid} on "
                        f"{host}"
                    )
        host.pids |= pids

    def _shorten_wait(self) -> None:
        """Shorten the wait for the others to `TELLING` seconds, once it is known that the start fails."""
        if self.failures and not self.hurried:
            self.hurried = True
            self.patience.reset(min(self.patience.seconds_left(), TELLING))

    def _decide_layout(self) -> None:
        """If all ranks have come, compare them and send the layout to every leader."""
        hellos = sorted((hello for host in self.hosts for hello in host.hellos), key=lambda hello: hello.rank)
        if len(hellos) < self.world.size:
            return
        self.hosts.sort(key=lambda host: host.leader)
        kernels = common_kernels(hellos)
        places = {hello.rank: f" on {host}" for host in self.hosts for hello in host.hellos}
        compare_hellos(hellos, places, {"kernels"} if kernels else ())
        self._check_addresses()
        left = max(self.patience.seconds_left(), GRACE)
        self.decision = HubDecision(
            list(Layout.from_crews([hello.rank for hello in host.hellos] for host in self.hosts).hosts),
            [str(host) for host in self.hosts],
            [host.lane_address for host in self.hosts],
            [hello.pid for hello in hellos],
            [hello.processors for hello in hellos],
            kernels,
            left,
            max(hello.worlds for hello in hellos),
        )
        self.patience.reset(left + GRACE)
        self._send_to_leaders({"layout": asdict(self.decision)})

    def _check_addresses(self) -> None:
        """Raise a `RendezvousError` for a loopback address, unless all hosts are on one machine."""
        if all(network.is_loopback(host.address) for host in self.hosts):
            return
        for host in self.hosts:
            if host.lane_address is not None and network.is_loopback(host.lane_address.host):
                raise RendezvousError(
                    f"rank {host.leader} on {host.name} gives {host.lane_address.host} as its address, where no "
                    "other host reaches it. Set ENGINE_INTERFACE there to the interface that leads to the others, or "
                    "ENGINE_HUB everywhere to an address of rank 0's host that is not its loopback."
                )

    def _finish_if_ready(self) -> None:
        """If all hosts are ready, tell them so. This is the last message: the engines use the connections next."""
        if all(host.ready for host in self.hosts):
            assert self.lanes_are_open()
            self.done = True
            self._send_to_leaders({"go": True})

    def _send_to_leaders(self, message: dict[str, Any]) -> None:
        for host in self.hosts:
            if host.connection is not None:
                try:
                    host.connection.send_message(message)
                except OSError as error:
                    raise RendezvousError(
                        f"rank {host.leader} (pid {host.pid}), which leads the ranks on {host}, cannot be told "
                        f"anything: {error.strerror or error}"
                    ) from None


def _parse_rank(digits: Any) -> int:
    """Parse a rank, which JSON represents as a string where it is a field's name."""
    rank = parse_natural(str(digits))
    if rank is None:
        raise ValueError(f"no rank: {digits!r}")
    return rank


def _parse_rank_pids(entries: Any) -> dict[int, int]:
    """Parse a leader's list of ranks and their process ids; return them as a dictionary."""
    try:
        found = dict(entries)
    except TypeError:
        raise ValueError("no list of processes") from None
    if not all(type(number) is int and 0 <= number < 1 << 31 for pair in found.items() for number in pair):
        raise ValueError("no list of processes")
    return found


def _open_listeners(hub: HubAddress, size: int, chosen: str | None) -> list[socket.socket]:
    """Return the listening socket that the launcher has left for rank 0, if it is still open; else open new ones."""
    if hub.descriptor is not None:
        try:
            listener = socket.socket(fileno=hub.descriptor)
        except OSError:  # It was closed by the first world of this process.
            return _own_listeners(hub, size, chosen)
        # The descriptor's number may have been reused for another file.
        tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
        listens = tcp and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and listener.getsockname()[1] == hub.port:
            listener.set_inheritable(False)
            listener.setblocking(False)
            return [listener]
        listener.detach()
    return _own_listeners(hub, size, chosen)


def _own_listeners(hub: HubAddress, size: int, chosen: str | None) -> list[socket.socket]:
    try:
        with contextlib.ExitStack() as opened:
            listeners = [
                opened.enter_context(network.listen(address, hub.port, size + STRANGERS))
                for address in _choose_addresses(hub, chosen)
            ]
            opened.pop_all()
            return listeners
    except OSError as error:
        raise RendezvousError(
            f"rank 0 cannot listen on port {hub.port}, where the other hosts look for it: {error.strerror}. Set "
            "ENGINE_HUB=HOST:PORT in every process, to a free port of rank 0's host."
        ) from None


def _choose_addresses(hub: HubAddress, chosen: str | None) -> list[str | None]:
    """Return the addresses to listen on; None stands for all addresses.

    If an interface is chosen and the other hosts look for rank 0 at its address, that is the only one. They may look
    for it on another network than that of the lanes; then these are the addresses of this host that they know. All
    addresses are used if no interface is chosen, or if the others know none of this host's own, as behind NAT.
    """
    if chosen is None:
        return [None]
    known: list[str] = []
    for host in (hub.host, *hub.others):
        with contextlib.suppress(OSError):
            known += [address.host for address in network.resolve(host, hub.port)]
    here = {*network.own_addresses(), chosen}  # a chosen loopback address is not among own_addresses()
    own = [address for address in dict.fromkeys(known) if address in here]
    return [chosen] if chosen in own else [*own] or [None]
