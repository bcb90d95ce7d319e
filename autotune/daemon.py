"""Tuner as a process beside rank 0: `python -m autotune.daemon DESCRIPTOR PARENT`, started by rank 0.

It answers messages (session.py) on an inherited SOCK_SEQPACKET socket, one message per packet, until the socket is
closed. It never outlives the thread that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence

from autotune.session import LIMIT, Session, SessionError, decode_message, encode_message

PR_SET_PDEATHSIG = 1
NICE = 10
#: Signals sent to the whole job: rank 0 handles them, and ends this process.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str]) -> int:
    """Serve and return the exit code: 0 when the other side has closed the socket, 2 when the search cannot go on."""
    descriptor, parent = map(int, arguments)
    _prepare_process(parent)
    with socket.socket(fileno=descriptor) as peer:
        return serve(peer)


def serve(peer: socket.socket) -> int:
    """Answer messages until the other side closes the socket or an error occurs, which is the last answer."""
    session = Session()
    placed = False
    with contextlib.suppress(ConnectionError):  # rank 0 is gone
        while True:
            try:
                data = receive(peer)
                if not data:
                    return 0
                if not placed:
                    _widen_affinity(data)  # before numpy is imported, because it counts the CPUs
                    placed = True
                answer = session.answer_message(data)
            except SessionError as error:
                peer.send(encode_message({"type": "failed", "reason": str(error)}))
                return 2
            peer.send(answer)
    return 0


def receive(peer: socket.socket) -> bytes:
    """Receive one message; return empty bytes at the end, or raise SessionError for a message longer than allowed."""
    data, _, flags, _ = peer.recvmsg(LIMIT)
    if flags & socket.MSG_TRUNC:
        raise SessionError(f"a message is longer than {LIMIT} bytes")
    return data


def _prepare_process(parent: int) -> None:
    """Make this process die with its parent, lower its priority, and ignore the job's signals."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # rank 0 has blocked them until now
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request above
        os._exit(0)
    os.nice(NICE)


def _widen_affinity(data: bytes) -> None:
    """Run on any CPU of the job, as rank 0's are busy; stay on rank 0's if that is refused."""
    cpus = decode_message(data).get("cpus")
    if isinstance(cpus, list) and cpus:
        with contextlib.suppress(OSError, TypeError, ValueError, OverflowError):
            os.sched_setaffinity(0, cpus)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
