"""A thread between the driver of an elastic job and its agents, which keeps leases while the driver stands still.

The driver writes to files and consoles, starts commands and reads directories. On a file system that hangs each of
these can block for minutes, and no agent may end its workers for that. So this thread owns the agents' pipes. It sends
the beat and answers what agents say to it, and passes everything else on over pipes of its own. It calls nothing that
can block: no file, no process, no name look-up; a check holds that.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from .. import frames
from ..host.sockets import is_short
from .channel import LENGTHS, READ_BYTES, Channel, ChannelError, Decoder, Message, pack
from .outgoing import Outgoing

HIGH = 16 << 20  # bytes that an agent has sent and the driver has not read, from which on agents hold output back
LOW = 1 << 20  # and from which on they send it again
DOWN = 1 << 20  # bytes for an agent that are taken from the driver before the agent has read them
FAREWELL = 1.0  # seconds that an agent has to read the last words, once the driver has hung up


class _Link:
    """Both directions between the driver and one agent."""

    def __init__(self, channel: Channel) -> None:
        self.from_agent, self.to_agent = channel.reading, channel.out.descriptor
        channel.reading, self.to_driver = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.from_driver, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        channel.out = Outgoing(writing)
        self.up, self.down = bytearray(), bytearray()
        self.part = bytearray()  # of a message of the driver's that is not whole
        self.decoder: Decoder | None = Decoder(channel.decoder.greeted)
        self.beats = self.held = False
        self.stamped: float | None = None  # when the agent's own time was last heard
        self.wanted = False  # whether the driver wants output held back
        self.until = 0.0  # when the connection to the agent is closed, since the driver has hung up

    def descriptors(self) -> list[int]:
        return [each for each in (self.from_agent, self.to_agent, self.from_driver, self.to_driver) if each >= 0]

    def close(self, *names: str) -> None:
        for name in names or ("from_agent", "to_agent", "from_driver", "to_driver"):
            if (descriptor := getattr(self, name)) >= 0:
                os.close(descriptor)
                setattr(self, name, -1)

    # ---- from the agent to the driver

    def read_agent(self) -> None:
        data = _read(self.from_agent)
        if data is None:
            return
        if not data:
            self.close("from_agent")
            return
        self.up += data
        if self.decoder is not None:
            try:
                for message in self.decoder.feed(data):
                    self._answer(message)
            except ChannelError:  # the driver finds that, too, and gives the agent up
                self.decoder, self.beats = None, False

    def _answer(self, message: Message) -> None:
        if message.kind == "beat" and self.beats:
            self.stamped = time.monotonic()
            self.down += pack("heard", at=message.seconds("at"))

    def write_driver(self) -> None:
        if not _write(self.to_driver, self.up):  # it does not listen any more
            self.close("to_driver", "from_agent")

    # ---- from the driver to the agent

    def read_driver(self) -> None:
        data = _read(self.from_driver)
        if data is None:
            return
        if not data:
            self.close("from_driver")
            self.beats, self.until = False, time.monotonic() + FAREWELL
            return
        self.part += data
        while len(self.part) >= LENGTHS.size:  # messages stay whole, since others come between them
            size = frames.HEADER + LENGTHS.unpack_from(self.part)[0]
            if len(self.part) < size:
                return
            if self.part.startswith(b'["start"', LENGTHS.size):
                self.beats = True
            self.down += self.part[:size]
            del self.part[:size]

    def write_agent(self) -> None:
        if not _write(self.to_agent, self.down):
            self.close("to_agent")

    def look(self, now: float) -> None:
        """Close what has had its time, and have the agent hold back output, or send it."""
        if self.to_driver >= 0 and self.from_agent < 0 and not self.up:
            self.close("to_driver")
        if self.to_agent >= 0 and self.from_driver < 0 and (not self.down or now >= self.until):
            self.close("to_agent")
        if self.beats and self.held != (self.wanted or len(self.up) > (LOW if self.held else HIGH)):
            self.held = not self.held
            self.down += pack("hold" if self.held else "go_on")


class LeaseRelay:
    """Keeps the leases of all agents of a job.

    Parameters
    ----------
    period : float
        Seconds from one beat to the next.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self._lock = threading.Lock()
        self._links: dict[Channel, _Link] = {}
        self._waking, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closing = self._held = False
        self._beaten = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="enginerun-leases", daemon=True)
        self._thread.start()

    def take(self, channel: Channel) -> None:
        """Stand between the driver and an agent from now on; nothing was read from the channel yet."""
        with self._lock:
            self._links[channel] = link = _Link(channel)
            link.wanted = self._held
        os.write(self._wake, b".")

    def hold(self, held: bool) -> None:
        """Have all agents hold output back, or send it again."""
        with self._lock:
            self._held = held
            for link in self._links.values():
                link.wanted = held
        os.write(self._wake, b".")

    def stop(self, channel: Channel | None) -> float | None:
        """Answer no beat of an agent any more.

        Parameters
        ----------
        channel : Channel or None

        Returns
        -------
        float or None
            When the last that was answered came, by `time.monotonic`; None: none was.
        """
        with self._lock:
            link = None if channel is None else self._links.get(channel)
            if link is None:
                return None
            link.beats = False
            return link.stamped

    def close(self) -> None:
        """End the thread, and close what is left of all links; a second call does nothing."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake, b".")
        self._thread.join()  # it waits for nothing but this word
        for descriptor in (self._wake, self._waking):
            os.close(descriptor)

    def _run(self) -> None:
        while not self._closing:
            poll, acts = select.poll(), self._watched()
            poll.register(self._waking, select.POLLIN)
            for descriptor, (events, _, _) in acts.items():
                poll.register(descriptor, events)
            ready = poll.poll(1e3 * min(self._period, FAREWELL) / 2)
            with contextlib.suppress(BlockingIOError):
                os.read(self._waking, 4096)
            with self._lock:
                for descriptor, _ in ready:
                    if descriptor in acts:
                        _, link, act = acts[descriptor]
                        if descriptor in link.descriptors():
                            act()
                self._look(time.monotonic())
        with self._lock:
            for link in self._links.values():
                link.close()

    def _watched(self) -> dict[int, tuple[int, _Link, Callable[[], None]]]:
        """Descriptors to be looked at: for which events, and what is done then."""
        acts: dict[int, tuple[int, _Link, Callable[[], None]]] = {}
        with self._lock:
            for link in self._links.values():
                if link.from_agent >= 0:
                    acts[link.from_agent] = select.POLLIN, link, link.read_agent
                if link.from_driver >= 0 and len(link.down) < DOWN:
                    acts[link.from_driver] = select.POLLIN, link, link.read_driver
                if link.to_driver >= 0:
                    acts[link.to_driver] = select.POLLOUT if link.up else 0, link, link.write_driver
                if link.to_agent >= 0 and link.down:
                    acts[link.to_agent] = select.POLLOUT, link, link.write_agent
        return acts

    def _look(self, now: float) -> None:
        beat = now >= self._beaten + self._period
        self._beaten = now if beat else self._beaten
        for channel, link in list(self._links.items()):
            if beat and link.beats and len(link.down) < DOWN:
                link.down += pack("beat")
            link.look(now)
            if not link.descriptors():
                del self._links[channel]


def _read(descriptor: int) -> bytes | None:
    """Read what there is; empty: that was the end; None: nothing is there."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None
    except OSError as error:
        return None if is_short(error) else b""


def _write(descriptor: int, data: bytearray) -> bool:
    """Write what there is room for, and forget that much; return whether anybody can read it."""
    try:
        if data:
            del data[: os.write(descriptor, memoryview(bytes(data[:READ_BYTES])))]
        else:
            return False  # asked only because of an error of the pipe
    except BlockingIOError:
        pass
    except OSError as error:
        return is_short(error)
    return True
