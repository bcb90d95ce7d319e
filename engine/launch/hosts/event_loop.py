"""Event loop for the agents of several hosts: one selector, which passes their messages on.

It does not interpret messages: `driver` does that for a job, and `cli.doctor` for an examination.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ...host.patience import Patience
from ...net.frames import MALFORMED
from ..process.outgoing import Outgoing
from ..process.reader_loop import ReaderLoop
from ..process.writer import Writer
from .channel import ChannelError, Message
from .lease_renewal import LeaseRenewer
from .remote import RemoteHost

DELIVERY = 1.0  # seconds in which a channel must deliver its last data and end, once its carrier has ended
LONGEST_WAIT = 0.5  # longest wait for events in seconds
FAREWELL = 15.0  # seconds in which agents must end what still runs, once their channels are closed


class AgentListener(Protocol):
    """Receiver of what agents report."""

    def handle_message(self, agent: RemoteHost, message: Message) -> None:
        """Handle a message; if this raises `ChannelError` or one of `MALFORMED`, the agent is treated as lost."""
        ...

    def agent_lost(self, agent: RemoteHost, how: str) -> None:
        """Handle the end of an agent's channel; the agent is unregistered by then."""
        ...

    def agent_printed(self, agent: RemoteHost, lines: list[str]) -> None:
        """Handle lines of an agent's stderr."""
        ...


class AgentLoop(ReaderLoop):
    """The channels to the agents, which hold the ranks' output back while one of `writers`, its destinations, is full.

    `relay` is the thread between this object and the agents, if any.
    """

    def __init__(self, writers: Iterable[Writer], listener: AgentListener, relay: LeaseRenewer | None = None) -> None:
        super().__init__(writers)
        self.hold_by(self._hold_output)
        self._hosts: list[RemoteHost] = []
        self._holding = False
        self._listener = listener
        self._relay = relay
        self._watched: dict[int, list[int]] = {}
        self._parting: list[RemoteHost] = []
        self._carried: dict[int, Patience] = {}  # host whose carrier has ended -> the rest of `DELIVERY`

    def start(self, host: RemoteHost) -> None:
        """Start the agent of a host and register it; if that fails, the host's `trouble` says why."""
        self._hosts.append(host)
        host.start()
        if host.channel is not None:
            if self._relay is not None:
                self._relay.add_channel(host.channel)
            self._watched[host.number] = [host.channel.reading, host.errors, host.carrier]
            self.add_reader(host.channel.reading, lambda: self._receive(host))
            self.add_reader(host.errors, lambda: self._read_errors(host))
            self.add_reader(host.carrier, lambda: self._carrier_ended(host))

    def step(self, seconds: float = LONGEST_WAIT) -> None:
        """Wait for events once, with hosts for at most `LONGEST_WAIT` seconds; close hosts that have ended."""
        super().step(min(seconds, LONGEST_WAIT) if self._hosts else seconds)
        for host in self._hosts:
            if host.number in self._carried and not self._carried[host.number].seconds_left():
                self._cut_off(host)
        for host in [host for host in self._parting if host.has_ended()]:
            self._parting.remove(host)
            self._hosts.remove(host)
            host.close(0.0)

    def send(self, host: RemoteHost, kind: str, body: bytes = b"", /, **head: Any) -> None:
        """Send a message, as `channel.pack_message` makes it, to a host, unless it is in trouble or done."""
        if host.channel is not None and not host.done and not host.trouble:
            host.channel.send(kind, body, **head)

    def tell(self, kind: str, /, **head: Any) -> None:
        """Send a message to all hosts."""
        for host in self._hosts:
            self.send(host, kind, **head)

    def unregister_host(self, host: RemoteHost) -> None:
        """Unregister a host; a second call does nothing."""
        self._carried.pop(host.number, None)
        for descriptor in self._watched.pop(host.number, ()):
            self.remove_reader(descriptor)
        if host.channel is not None and host.channel.out.descriptor >= 0:
            self.remove_reader(host.channel.out.descriptor)

    def close_later(self, host: RemoteHost) -> None:
        """Unregister a host; `step` closes it and forgets it when its carrier has ended."""
        self.unregister_host(host)
        self._parting.append(host)

    def close(self) -> None:
        """Close all channels, so that agents kill what still runs; no agent is left when this returns."""
        for host in self._hosts:
            self.unregister_host(host)
            host.hang_up()
        patience = Patience(FAREWELL)
        for host in self._hosts:
            host.close(patience.seconds_left())
        super().close()
        if self._relay is not None:
            self._relay.close()

    def _list_outputs(self) -> Iterator[Outgoing]:
        yield from (host.channel.out for host in self._hosts if host.channel is not None)

    def _hold_output(self, full: bool) -> None:
        """Tell agents to hold the ranks' output back while a writer is full, and to send it again afterwards."""
        if full == self._holding:
            return
        self._holding = full
        if self._relay is not None:
            self._relay.hold_output(self._holding)
        else:
            self.tell("hold" if self._holding else "go_on")

    def _read_errors(self, host: RemoteHost) -> None:
        descriptor = host.errors
        lines = host.hear_errors()
        if host.errors < 0:
            self.remove_reader(descriptor)
            self._watched[host.number].remove(descriptor)
        self._listener.agent_printed(host, lines)

    def _carrier_ended(self, host: RemoteHost) -> None:
        """Allow `DELIVERY` seconds for the end of the channel, which does not come if the agent holds the pipes."""
        self.remove_reader(host.carrier)
        self._watched[host.number].remove(host.carrier)
        self._carried[host.number] = Patience(DELIVERY)

    def _cut_off(self, host: RemoteHost) -> None:
        """Give up a host whose carrier has ended but whose channel has not, since its loss would go unnoticed."""
        self.unregister_host(host)
        host.cut_off = True
        host.hang_up()
        self._listener.agent_lost(host, f"was cut off: the command that started it {host.how_it_ended()}")

    def _receive(self, host: RemoteHost) -> None:
        """Pass on an agent's messages, and the end of its channel."""
        assert host.channel is not None
        try:
            for message in host.channel.receive():
                self._listener.handle_message(host, message)
        except (ChannelError, *MALFORMED) as error:
            self.unregister_host(host)
            host.channel.close()
            what = error if isinstance(error, ChannelError) else repr(error)
            self._listener.agent_lost(host, f"does not speak as an agent does: {what}")
            return
        if host.channel.ended:
            self.unregister_host(host)
            self._listener.agent_lost(host, host.how_it_ended())
