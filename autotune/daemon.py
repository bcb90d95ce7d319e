"""The tuner as a process beside rank 0: `python -m autotune.daemon DESCRIPTOR PARENT`, which rank 0 starts.

It answers messages (session.py) on an inherited socket of type SOCK_SEQPACKET, whose packets are the messages, until
the socket is closed. It lives no longer than the thread that has started it, whatever happens to that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence

from autotune.session import LIMIT, Session, SessionError, decoded, encoded

PR_SET_PDEATHSIG = 1
NICE = 10
#: Signals to the job as a whole: they end rank 0, and this process with it.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str]) -> int:
    """Serve; the exit code: 0 when the other side has closed the socket, 2 when the search could not go on."""
    descriptor, parent = map(int, arguments)
    _settle(parent)
    with socket.socket(fileno=descriptor) as peer:
        return serve(peer)


def serve(peer: socket.socket) -> int:
    """Answer what comes until there is no more, or something is wrong: that is the last answer."""
    session = Session()
    placed = False
    with contextlib.suppress(ConnectionError):  # rank 0 is gone
        while True:
            try:
                data = receive(peer)
                if not data:
                    return 0
                if not placed:
                    _place(data)  # before numpy is imported, and looks how many CPUs there are
                    placed = True
                answer = session.answer(data)
            except SessionError as error:
                peer.send(encoded({"type": "failed", "reason": str(error)}))
                return 2
            peer.send(answer)
    return 0


def receive(peer: socket.socket) -> bytes:
    """One message; empty at the end.

    Raises
    ------
    SessionError
        It is longer than a message may be.
    """
    data, _, flags, _ = peer.recvmsg(LIMIT)
    if flags & socket.MSG_TRUNC:
        raise SessionError(f"a message is longer than {LIMIT} bytes")
    return data


def _settle(parent: int) -> None:
    """Die with the parent, stay out of its way, and leave the job's signals to it."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # rank 0 has blocked them up to here
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request above
        os._exit(0)
    os.nice(NICE)


def _place(data: bytes) -> None:
    """Run on any CPU of the job, since rank 0's are busy. Where that is refused, on rank 0's."""
    cpus = decoded(data).get("cpus")
    if isinstance(cpus, list) and cpus:
        with contextlib.suppress(OSError, TypeError, ValueError, OverflowError):
            os.sched_setaffinity(0, cpus)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
