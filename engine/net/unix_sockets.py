"""Unix sockets: the user of the other side, and messages that carry descriptors."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct

from ..host.sockets import retry_short

GROUP = 250  # descriptors per message


def close_all(descriptors: list[int]) -> None:
    """Close descriptors; those that are not open are skipped."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the other side, as the kernel knows it."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def receive_with_descriptors(
    connection: socket.socket, nbytes: int, descriptors: list[int], most: int = GROUP
) -> bytes:
    """Receive bytes, and append the descriptors that come with them (close-on-exec) to `descriptors`.

    The kernel closes those beyond `most`, so that a stranger cannot use up this process's descriptors.
    """
    # socket.recv_fds ignores its flags in some versions of Python, and would leave them open across exec.
    numbers = array.array("i")
    room = socket.CMSG_LEN(most * numbers.itemsize)
    data, ancillary, _, _ = retry_short(connection.recvmsg, nbytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
    descriptors += numbers
    return data
