"""Proxy between hosts that holds the keys: it reads every frame, and may change it.

Frames are those of `engine_ext/transport/frames.h`.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

HEAD = struct.Struct("=IHHiIQ")
LEFT, SLOT, PROGRESS, REQUESTS, SCHEDULE, WORDS, VERDICT, CLOCK, MESSAGE, CALL, HERE = range(1, 12)
WORD = struct.Struct("=IIQ")


@dataclass
class Frame:
    """One frame in transit."""

    type: int
    rank: int
    offset: int
    position: int
    payload: bytearray = field(default_factory=bytearray)
    sender: int = 0  # 0 for rank 0's side of the connection, 1 for the other
    link: int = 0  # index of the connection, in order of creation
    length: int | None = None  # length in the header, if not the payload's

    def packed(self) -> bytes:
        length = len(self.payload) if self.length is None else self.length
        return HEAD.pack(length, self.type, 0, self.rank, self.offset, self.position) + self.payload


Change = Callable[[Frame], Iterable[Frame]]


class Middle:
    """Carries bytes between pairs of sockets. `change` returns the frames that replace each frame."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self._selector = selectors.DefaultSelector()
        self._links = 0
        self._sockets: list[socket.socket] = []
        self._bell, self._ring = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Two ends of a connection that passes through this proxy."""
        ends = [socket.socketpair() for _ in range(2)]
        for sender in range(2):
            state = (self._links, sender, ends[1 - sender][1], bytearray())
            self._selector.register(ends[sender][1], selectors.EVENT_READ, state)
        self._links += 1
        self._sockets += [ends[0][1], ends[1][1]]
        return ends[0][0], ends[1][0]

    def ends(self, link: int) -> tuple[socket.socket, socket.socket]:
        """Proxy's ends of a connection; bytes sent on the first reach rank 0's side."""
        return self._sockets[2 * link], self._sockets[2 * link + 1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End all connections."""
        self._ring.send(b"x")
        self._thread.join()
        for each in (*self._sockets, self._bell, self._ring):
            each.close()
        self._selector.close()

    def cut(self) -> None:
        """Shut down all connections, as hosts see it, without freeing anything."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _carry(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                link, sender, other, buffered = key.data
                came = b""
                with suppress(OSError):
                    came = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                if not came:
                    self._selector.unregister(key.fileobj)
                    with suppress(OSError):
                        other.shutdown(socket.SHUT_WR)
                    continue
                buffered += came
                with suppress(OSError):
                    for frame in self._frames(link, sender, buffered):
                        other.sendall(frame)

    def _frames(self, link: int, sender: int, buffered: bytearray) -> Iterable[bytes]:
        while len(buffered) >= HEAD.size:
            length, type_, _, rank, offset, position = HEAD.unpack_from(buffered)
            if len(buffered) < HEAD.size + length:
                return
            payload = buffered[HEAD.size : HEAD.size + length]
            del buffered[: HEAD.size + length]
            for each in self.change(Frame(type_, rank, offset, position, payload, sender, link)):
                yield each.packed()
