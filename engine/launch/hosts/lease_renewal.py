"""A relay thread between the driver of an elastic job and its agents, which renews leases while the driver is blocked.

The driver writes to files and consoles, starts commands and reads directories. If a file system hangs, each of these
can block for minutes, and agents must not kill their workers because of that. So this thread owns the agents' pipes. It
sends heartbeats, confirms those of agents, and passes everything else on over pipes of its own. It makes no blocking
call: no file, no process, no name look-up. A check enforces that.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from ...host.sockets import is_short
from ...net import frames
from ..process.outgoing import Outgoing
from .channel import LENGTHS, READ_BYTES, Channel, ChannelError, Decoder, Message, pack_message

HIGH = 16 << 20  # high-water mark: unread bytes of an agent above which it must hold output back
LOW = 1 << 20  # low-water mark: unread bytes at which it may send output again
DOWN = 1 << 20  # most bytes from the driver that wait for an agent to read them
FAREWELL = 1.0  # seconds in which an agent can read the last messages after the driver has hung up


class _Link:
    """State of the relay for one agent: descriptors and buffers of both directions."""

    def __init__(self, channel: Channel) -> None:
        self.from_agent, self.to_agent = channel.reading, channel.out.descriptor
        channel.reading, self.to_driver = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.from_driver, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        channel.out = Outgoing(writing)
        self.up, self.down = bytearray(), bytearray()
        self.part = bytearray()  # an incomplete message of the driver
        self.decoder: Decoder | None = Decoder(channel.decoder.greeted)
        self.beats = self.held = False
        self.stamped: float | None = None  # time of the last heartbeat of the agent
        self.wanted = False  # whether the driver wants output held back
        self.until = 0.0  # time to close the connection to the agent, after the driver has hung up

    def list_descriptors(self) -> list[int]:
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
                    self._confirm_heartbeat(message)
            except ChannelError:  # the driver detects it, too, and gives the agent up
                self.decoder, self.beats = None, False

    def _confirm_heartbeat(self, message: Message) -> None:
        if message.kind == "beat" and self.beats:
            self.stamped = time.monotonic()
            self.down += pack_message("heard", at=message.get_seconds("at"))

    def write_driver(self) -> None:
        if not _write(self.to_driver, self.up):  # the driver reads no more
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
        while len(self.part) >= LENGTHS.size:  # whole messages only, since others are inserted between them
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

    def update_state(self, now: float) -> None:
        """Close finished directions; tell the agent to hold output back, or to send it again."""
        if self.to_driver >= 0 and self.from_agent < 0 and not self.up:
            self.close("to_driver")
        if self.to_agent >= 0 and self.from_driver < 0 and (not self.down or now >= self.until):
            self.close("to_agent")
        if self.beats and self.held != (self.wanted or len(self.up) > (LOW if self.held else HIGH)):
            self.held = not self.held
            self.down += pack_message("hold" if self.held else "go_on")


class LeaseRenewer:
    """Relay thread that renews the leases of all agents of a job; `period` is the seconds between two heartbeats."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._lock = threading.Lock()
        self._links: dict[Channel, _Link] = {}
        self._waking, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closing = self._held = False
        self._beaten = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="enginerun-leases", daemon=True)
        self._thread.start()

    def add_channel(self, channel: Channel) -> None:
        """Relay the messages of an agent's channel, from which nothing has been read yet."""
        with self._lock:
            self._links[channel] = link = _Link(channel)
            link.wanted = self._held
        os.write(self._wake, b".")

    def hold_output(self, held: bool) -> None:
        """Tell all agents to hold output back, or to send it again."""
        with self._lock:
            self._held = held
            for link in self._links.values():
                link.wanted = held
        os.write(self._wake, b".")

    def stop(self, channel: Channel | None) -> float | None:
        """Stop confirming an agent's heartbeats, and return the time of the last confirmed one.

        It is a time of `time.monotonic`; None if none was confirmed.
        """
        with self._lock:
            link = None if channel is None else self._links.get(channel)
            if link is None:
                return None
            link.beats = False
            return link.stamped

    def close(self) -> None:
        """End the thread and close all connections; a second call does nothing."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake, b".")
        self._thread.join()  # the byte above wakes it, and nothing else blocks it
        for descriptor in (self._wake, self._waking):
            os.close(descriptor)

    def _run(self) -> None:
        while not self._closing:
            poll, acts = select.poll(), self._list_descriptors()
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
                        if descriptor in link.list_descriptors():
                            act()
                self._send_heartbeats(time.monotonic())
        with self._lock:
            for link in self._links.values():
                link.close()

    def _list_descriptors(self) -> dict[int, tuple[int, _Link, Callable[[], None]]]:
        """Return the descriptors to poll, each with the events, its connection and the function to call."""
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

    def _send_heartbeats(self, now: float) -> None:
        beat = now >= self._beaten + self._period
        self._beaten = now if beat else self._beaten
        for channel, link in list(self._links.items()):
            if beat and link.beats and len(link.down) < DOWN:
                link.down += pack_message("beat")
            link.update_state(now)
            if not link.list_descriptors():
                del self._links[channel]


def _read(descriptor: int) -> bytes | None:
    """Read available bytes; empty at the end of the stream, None if nothing is available."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None
    except OSError as error:
        return None if is_short(error) else b""


def _write(descriptor: int, data: bytearray) -> bool:
    """Write as much as there is room for and remove it from `data`; return False if the reader has gone."""
    try:
        if data:
            del data[: os.write(descriptor, memoryview(bytes(data[:READ_BYTES])))]
        else:
            return False  # nothing to write: it was polled only for an error of the pipe
    except BlockingIOError:
        pass
    except OSError as error:
        return is_short(error)
    return True
