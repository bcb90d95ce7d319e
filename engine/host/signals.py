"""Signal handling that also ends a wait in a selector."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterable, Iterator

from .sockets import retry_short

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a user ends a program."""
FLIGHT = signal.SIGRTMIN + 8
"""Signal that asks a rank for its flight record. SIGUSR1 and SIGUSR2 belong to the program, which must find them
unhandled: Lightning, for one, requeues a Slurm job on SIGUSR1 only if nothing else handles that signal."""


@contextlib.contextmanager
def catch_signals(numbers: Iterable[signal.Signals], handler: Callable[..., object]) -> Iterator[socket.socket]:
    """Handle signals, and turn each into a byte, its number, on a non-blocking socket for a selector.

    The interpreter calls a handler between two of its instructions. A signal that arrives between the last of them and
    the system call of a wait is only handled after the wait. The byte arrives at once, and ends a wait that polls the
    socket.

    Signals that the user has this process ignore (`nohup`, a background job) stay ignored. The handler gets the
    signal's number and a frame, and may raise.
    """
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    old_wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    old = {}
    for number in numbers:
        if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
            old[number] = signal.signal(number, handler)
    try:
        yield reading
    finally:
        for number, before in old.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(old_wakeup)
        reading.close()
        writing.close()


def read_signals(wakeup: socket.socket) -> bytes:
    """Return the numbers of the signals that arrived at the socket of `catch_signals`, in order; empty without any."""
    try:
        return retry_short(wakeup.recv, 4096)
    except BlockingIOError:
        return b""
