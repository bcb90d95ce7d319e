"""Signals that no wait misses."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterable, Iterator

from .sockets import retry_short

FLIGHT = signal.SIGRTMIN + 8
"""By which a rank is asked for its flight record. SIGUSR1 and SIGUSR2 are the program's, which must find them as they
were: Lightning, for one, requeues a job of Slurm by SIGUSR1 only if nobody handles that signal."""


@contextlib.contextmanager
def caught(numbers: Iterable[signal.Signals], handler: Callable[..., object]) -> Iterator[socket.socket]:
    """Handle signals, and turn each into a byte on a socket, for a selector.

    The interpreter calls a handler between two of its instructions. A signal that comes between the last of them and
    the system call of a wait is handled when the wait is over. The byte is there at once, and ends a wait that looks at
    it.

    Parameters
    ----------
    numbers : iterable of signal.Signals
        What the user has this process ignore (`nohup`, a shell's background job) stays ignored.
    handler : callable
        Called with a signal's number and a frame. It may raise.

    Yields
    ------
    socket.socket
        Each byte is a signal's number; does not block.
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
    """Return the numbers of the signals that have come to the socket of `caught`, in their order; empty: none has."""
    try:
        return retry_short(wakeup.recv, 4096)
    except BlockingIOError:
        return b""
