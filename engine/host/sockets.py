"""Calls on connections while the system is short of memory for a moment: that is not the end of a connection.

The native engine does the same for the connections of a world (`engine_ext/platform/sockets.h`).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from .patience import Patience

Result = TypeVar("Result")
SHORT = (errno.ENOBUFS, errno.ENOMEM)  # what the system answers if it has no memory for a call just now
PAUSE = 0.002  # seconds between two tries: nothing announces that there is memory again
LONGEST_SHORTAGE = 4.0  # seconds, after which it counts as an error; less than any lease or start takes to end


def is_short(error: OSError) -> bool:
    """Tell whether the system had no memory for a call, and wait a moment if so: then a later call may succeed."""
    if error.errno not in SHORT:
        return False
    time.sleep(PAUSE)
    return True


def retry_short(call: Callable[..., Result], /, *arguments: Any) -> Result:
    """Return what a call of the system returns, as soon as the system has memory for it.

    Raises
    ------
    OSError
        What the call raises, also BlockingIOError; or it had no memory for `LONGEST_SHORTAGE`.
    """
    patience: Patience | None = None
    while True:
        try:
            return call(*arguments)
        except OSError as error:
            patience = patience or Patience(LONGEST_SHORTAGE)
            if not patience.left() or not is_short(error):
                raise


def send_all(connection: socket.socket, data: bytes, seconds: float) -> None:
    """Send all bytes, on a connection that may or may not block.

    Parameters
    ----------
    connection : socket.socket
    data : bytes
    seconds : float
        For which the other side may take nothing.

    Raises
    ------
    TimeoutError
        The other side takes nothing.
    OSError
        The connection has ended.
    """
    view, patience, poll = memoryview(data), Patience(seconds), select.poll()
    poll.register(connection, select.POLLOUT)
    while view:
        try:
            sent = retry_short(connection.send, view, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not patience.left():
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
            poll.poll(1000 * patience.wait())
            continue
        view = view[sent:]
        patience.begin(seconds)
