"""Relay of the channel between the launcher and an agent in a Spark task: `task_relay.main` with SOCKET and HOST.

The launcher starts it instead of ssh. It asks the process that serves the tasks for the connection of one, over the
Unix socket at SOCKET. Then it relays bytes between that connection and its standard input and output. The task does the
same between the connection and its agent. On the connection each piece is a sealed frame, so that nobody on the network
can insert or change data.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

from ..host.patience import LONGEST
from ..host.sockets import retry_short, send_all, write_all
from ..net import frames
from ..net.stream import MAC, Seal, StreamError
from ..text import readable

BYTES = 1 << 18
RELAY = "relay"  # purpose for which the key is derived


def relay_bytes(connection: socket.socket, reading: int, writing: int, seal: Seal) -> None:
    """Relay bytes both ways, until the peer ends the connection or fails authentication.

    The connection is shut down, but not closed. At the end of input from `reading`, the sending direction is shut down.
    """
    connection.setblocking(True)
    sender = threading.Thread(target=_send, args=(connection, reading, seal), name="engine-relay", daemon=True)
    sender.start()
    with contextlib.suppress(OSError, StreamError, frames.FrameError):
        _receive(connection, writing, seal)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _send(connection: socket.socket, reading: int, seal: Seal) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(reading, BYTES):
            send_all(connection, frames.wrap(seal.close(data)), LONGEST)
        connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket, writing: int, seal: Seal) -> None:
    buffer = bytearray()
    while data := retry_short(connection.recv, BYTES):
        buffer += data
        while (content := frames.cut_frame(buffer, BYTES + MAC, MAC + 1)) is not None:
            write_all(writing, seal.open(content))


def main() -> int:
    """Relay bytes until either side has ended; return 1 if there is no such connection any more, else 0."""
    path, host = sys.argv[1:3]
    keeper = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    keeper.settimeout(10)
    keeper.connect(path)
    send_all(keeper, f"{host}\n".encode(), 10.0)
    key, descriptors, _, _ = retry_short(socket.recv_fds, keeper, MAC, 1)
    if not key or not descriptors:
        readable.print_plain(f"{host} has gone", file=sys.stderr)
        return 1
    task = socket.socket(fileno=descriptors[0])  # the driver keeps its copy until `keeper` is closed
    relay_bytes(task, 0, 1, Seal(key, "launcher", "agent"))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BrokenPipeError, ConnectionError):
        sys.exit(1)
