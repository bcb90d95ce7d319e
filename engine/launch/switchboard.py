"""Listens to the agents of several hosts, with one selector, and passes on what they say.

Nothing here knows what messages mean: that is `conductor`'s for a job, and `doctor`'s for an examination.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterable
from typing import Any

from ..host.patience import Patience
from .channel import ChannelError, Message
from .lease_relay import LeaseRelay
from .remote import RemoteHost
from .writer import LOOK, Writer

DELIVERY = 1.0  # seconds that a channel has to end, or to bring the last, once the process that carries it has ended
FAREWELL = 15.0  # seconds that agents have to end what still runs, once their channels are closed

MALFORMED = (ChannelError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)  # what is read of it


class Switchboard:
    """The channels to the agents.

    Parameters
    ----------
    hosts : iterable of RemoteHost
    writers : iterable of Writer
        Where the output of ranks goes; agents hold it back while one of them is full.
    act : callable
        Called with a host and a message of its. A `ChannelError`, or another of `MALFORMED`, that it raises means that
        the host does not speak as an agent does.
    lost : callable
        Called with a host whose channel has ended, and how; the host is not listened to any more.
    heard : callable, optional
        Called with a host and lines that it wrote to stderr.
    relay : LeaseRelay, optional
        Stands between this and the agents.
    """

    def __init__(
        self,
        hosts: Iterable[RemoteHost],
        writers: Iterable[Writer],
        act: Callable[[RemoteHost, Message], None],
        lost: Callable[[RemoteHost, str], None],
        heard: Callable[[RemoteHost, list[str]], None] = lambda *_: None,
        relay: LeaseRelay | None = None,
    ) -> None:
        self._hosts = list(hosts)
        self._writers = list(writers)
        self._holding = False
        self._act = act
        self._lost = lost
        self._heard = heard
        self._relay = relay
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, list[int]] = {}
        self._parting: list[RemoteHost] = []
        self._carried: dict[int, Patience] = {}  # by host whose carrier has ended, what is left of `DELIVERY`

    def hear(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call back whenever a descriptor can be read.

        Parameters
        ----------
        descriptor : int
        act : callable
            Reads it, and does not block.
        """
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def forget(self, descriptor: int) -> None:
        """Hear no more of a descriptor, which is about to be closed.

        Parameters
        ----------
        descriptor : int
        """
        self._selector.unregister(descriptor)

    def start(self, host: RemoteHost) -> None:
        """Start the agent of a host and listen to it; if that is impossible, the host's `trouble` says why.

        Parameters
        ----------
        host : RemoteHost
            One that came later than the others is listened to as they are.
        """
        if host not in self._hosts:
            self._hosts.append(host)
        host.start()
        if host.channel is not None:
            if self._relay is not None:
                self._relay.take(host.channel)
            self._watched[host.number] = [host.channel.reading, host.errors, host.carrier]
            self.hear(host.channel.reading, lambda: self._receive(host))
            self.hear(host.errors, lambda: self._errors(host))
            self.hear(host.carrier, lambda: self._carrier_ended(host))

    def step(self, seconds: float = 0.5) -> None:
        """Serve what is ready.

        Parameters
        ----------
        seconds : float
            Longest wait.
        """
        self._await_room()
        self._hold_back()
        for key, _ in self._selector.select(min(seconds, LOOK if self._holding else 0.5)):
            key.data()
        for host in self._hosts:
            if host.number in self._carried and not self._carried[host.number].left():
                self._cut_off(host)
        for host in [host for host in self._parting if host.has_ended()]:
            self._parting.remove(host)
            self._hosts.remove(host)
            host.close(0.0)

    def send(self, host: RemoteHost, kind: str, body: bytes = b"", /, **head: Any) -> None:
        """Send a message to a host that can take part and has not done its own.

        Parameters
        ----------
        host : RemoteHost
        kind, body, **head
            As of `channel.pack`.
        """
        if host.channel is not None and not host.done and not host.trouble:
            host.channel.send(kind, body, **head)

    def tell(self, kind: str, /, **head: Any) -> None:
        """Send a message to all hosts."""
        for host in self._hosts:
            self.send(host, kind, **head)

    def ignore(self, host: RemoteHost) -> None:
        """Listen to a host no longer; a second call does nothing.

        Parameters
        ----------
        host : RemoteHost
        """
        self._carried.pop(host.number, None)
        for descriptor in self._watched.pop(host.number, ()):
            self._selector.unregister(descriptor)
        out = host.channel.out if host.channel is not None else None
        if out is not None and out.descriptor >= 0 and out.descriptor in self._selector.get_map():
            self._selector.unregister(out.descriptor)

    def part(self, host: RemoteHost) -> None:
        """Have no more to do with a host, which may end when it does; nothing of it is left here then."""
        self.ignore(host)
        self._parting.append(host)

    def close(self) -> None:
        """Close all channels, at which agents end whatever still runs; none is left when this returns."""
        for host in self._hosts:
            self.ignore(host)
            host.hang_up()
        patience = Patience(FAREWELL)
        for host in self._hosts:
            host.close(patience.left())
        self._selector.close()
        if self._relay is not None:
            self._relay.close()

    def _await_room(self) -> None:
        """Have the selector look at channels that are behind, and at no others."""
        channels = [host.channel.out for host in self._hosts if host.channel is not None]
        registered = self._selector.get_map()
        for out in channels:
            if out.descriptor < 0:  # it is closed
                continue
            if out.waiting and out.descriptor not in registered:
                self._selector.register(out.descriptor, selectors.EVENT_WRITE, out.pump)
            elif not out.waiting and out.descriptor in registered:
                self._selector.unregister(out.descriptor)

    def _hold_back(self) -> None:
        """Have agents hold back the output of ranks while there is no room for it, and send it again then."""
        full = [writer for writer in self._writers if writer.full()]
        if bool(full) == self._holding:
            return
        self._holding = not self._holding
        if self._relay is not None:
            self._relay.hold(self._holding)
        else:
            self.tell("hold" if self._holding else "go_on")

    def _errors(self, host: RemoteHost) -> None:
        descriptor = host.errors
        lines = host.hear_errors()
        if host.errors < 0 and host.number in self._watched:
            self._selector.unregister(descriptor)
            self._watched[host.number].remove(descriptor)
        self._heard(host, lines)

    def _carrier_ended(self, host: RemoteHost) -> None:
        """The end of the channel is to follow; it does not if the agent holds the pipes itself."""
        if host.number in self._watched:
            self._selector.unregister(host.carrier)
            self._watched[host.number].remove(host.carrier)
            self._carried[host.number] = Patience(DELIVERY)

    def _cut_off(self, host: RemoteHost) -> None:
        """The carrier of a channel has ended, and the channel has not: nobody would know when the host is gone."""
        self.ignore(host)
        host.cut_off = True
        host.hang_up()
        self._lost(host, f"was cut off: the command that started it {host.how_it_ended()}")

    def _receive(self, host: RemoteHost) -> None:
        """Pass on what an agent says, and that its channel has ended."""
        assert host.channel is not None
        if host.number not in self._watched:  # of the same batch, which has lost it meanwhile
            return
        try:
            for message in host.channel.receive():
                self._act(host, message)
        except MALFORMED as error:
            self.ignore(host)
            host.channel.close()
            what = error if isinstance(error, ChannelError) else repr(error)
            self._lost(host, f"does not speak as an agent does: {what}")
            return
        if host.channel.ended:
            self.ignore(host)
            self._lost(host, host.how_it_ended())
