"""Carries the channel between the launcher and an agent in a Spark task: `python carrier.py SOCKET HOST`.

The launcher starts it in the place of ssh. It asks the process that listens to tasks for the connection of one, over
the Unix socket of that path, and passes bytes on between the connection and its standard input and output. It imports
nothing of the engine, so that it is there at once.
"""

import os
import selectors
import socket
import sys

BYTES = 1 << 18


def main() -> int:
    """Pass bytes on until either side has ended.

    Returns
    -------
    int
        Exit code: 1 if there is no such connection any more.
    """
    path, host = sys.argv[1:3]
    keeper = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    keeper.settimeout(10)
    keeper.connect(path)
    keeper.sendall(f"{host}\n".encode())
    data, descriptors, _, _ = socket.recv_fds(keeper, 1, 1)
    if not data or not descriptors:
        print(f"{host} has gone", file=sys.stderr)
        return 1
    task = socket.socket(fileno=descriptors[0])  # the other side of it stays open until `keeper` is closed, too
    task.setblocking(True)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ, 1)
        selector.register(task, selectors.EVENT_READ, 0)
        while True:
            for key, _ in selector.select():
                to_task = key.data == 1
                data = os.read(0, BYTES) if to_task else _received(task)
                if not data and not to_task:
                    return 0
                if not data:
                    selector.unregister(0)
                    task.shutdown(socket.SHUT_WR)
                elif to_task:
                    task.sendall(data)
                else:
                    _write(data)


def _received(task: socket.socket) -> bytes:
    try:
        return task.recv(BYTES)
    except OSError:
        return b""


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BrokenPipeError, ConnectionError):
        sys.exit(1)
