"""Socket calls that survive a short lack of system memory, which is not the end of a connection.

The native engine does the same for the connections of a world (`engine_ext/platform/sockets.h`).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .patience import Patience

Result = TypeVar("Result")
SHORT = (errno.ENOBUFS, errno.ENOMEM)  # errors of a call for which the system has no memory at the moment
PAUSE = 0.002  # seconds between two tries: the system does not notify when it has memory again
LONGEST_SHORTAGE = 4.0  # seconds after which a shortage is an error; less than any lease or start timeout


def is_short(error: OSError) -> bool:
    """Return whether the system had no memory for a call; if so, pause first, so that a later call may succeed."""
    if error.errno not in SHORT:
        return False
    time.sleep(PAUSE)
    return True


def retry_short(call: Callable[..., Result], /, *arguments: Any) -> Result:
    """Call a system function, again and again while the system has no memory for it, and return its result.

    It raises the call's error, BlockingIOError included, and gives up after a shortage of `LONGEST_SHORTAGE`.
    """
    patience: Patience | None = None
    while True:
        try:
            return call(*arguments)
        except OSError as error:
            patience = patience or Patience(LONGEST_SHORTAGE)
            if not patience.seconds_left() or not is_short(error):
                raise


def wait_readable(descriptors: Iterable[int], seconds: float | None = None) -> set[int]:
    """Wait up to `seconds`, or without a limit, until descriptors have data or have ended, and return these.

    It polls, because `select` takes no descriptor above 1023.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0.0, seconds) * 1000)}


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[retry_short(os.write, descriptor, view) :]


def send_all(connection: socket.socket, data: bytes, seconds: float) -> None:
    """Send all bytes, on a blocking or non-blocking connection.

    It raises a TimeoutError if the receiver accepts nothing for `seconds`, and another OSError if the connection has
    ended.
    """
    view, patience, poll = memoryview(data), Patience(seconds), select.poll()
    poll.register(connection, select.POLLOUT)
    while view:
        try:
            sent = retry_short(connection.send, view, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not patience.seconds_left():
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
            poll.poll(1000 * patience.wait())
            continue
        view = view[sent:]
        patience.reset(seconds)
