"""The line between a task and the driver: who may speak on it, and how a task finds the driver.

Both sides prove that they know the job's secret, which Spark has brought to the tasks, before anything else is said:
whoever else can reach the driver's port is turned away, and nobody can pretend to be the driver. What is said is not
encrypted. Messages are those of `engine.launch.channel`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
from collections.abc import Sequence
from hashlib import sha256

from ..host.network import keep_watch
from ..host.patience import Patience
from ..launch.channel import Channel, ChannelError, Message

SEARCH = 4.0  # seconds that a task looks for the driver
TRY = 1.5  # seconds for one of its addresses
BEGIN = b"\n"  # what tells a task that offers itself as a host that its agent is wanted
SILENCE = 20  # seconds after which a connection whose other side does not answer has ended


def proof(secret: str, role: str, nonce: str) -> str:
    """What only somebody who knows the secret can answer to a nonce.

    Parameters
    ----------
    secret : str
    role : str
        Who answers: an answer of one side is none of the other.
    nonce : str

    Returns
    -------
    str
        In hex.
    """
    return hmac.new(secret.encode(), f"{role} {nonce}".encode(), sha256).hexdigest()


def proven(secret: str, role: str, nonce: str, answer: object) -> bool:
    """Whether an answer is the `proof`."""
    return isinstance(answer, str) and hmac.compare_digest(proof(secret, role, nonce), answer)


def channel_over(connection: socket.socket) -> Channel:
    """The channel over a connection, which it owns from now on."""
    keep_watch(connection, SILENCE)
    descriptor = connection.detach()
    return Channel(descriptor, os.dup(descriptor))


def reach_driver(addresses: Sequence[tuple[str, int]], secret: str, task: int) -> Channel | None:
    """Look for the driver under several addresses.

    Parameters
    ----------
    addresses : sequence of (str, int)
        In the order in which they are tried.
    secret : str
    task : int
        Who asks.

    Returns
    -------
    Channel or None
        None: none of them is the driver's, or nothing gets there.
    """
    patience = Patience(SEARCH)
    for address in addresses:
        if not patience.left():
            return None
        with contextlib.suppress(OSError):
            channel = channel_over(socket.create_connection(address, min(TRY, max(0.1, patience.left()))))
            if _agreed(channel, secret, task, Patience(TRY)):
                return channel
            channel.close()
    return None


def _agreed(channel: Channel, secret: str, task: int, patience: Patience) -> bool:
    """Prove who we are, and have the driver prove who it is."""
    nonce = secrets.token_hex(16)
    for kind in ("challenge", "welcome"):
        message = next_message(channel, patience)
        if message is None or message.kind != kind:
            return False
        if kind == "challenge":
            answer = proof(secret, "task", str(message.head.get("nonce")))
            channel.send("proof", task=task, nonce=nonce, proof=answer)
        elif not proven(secret, "driver", nonce, message.head.get("proof")):
            return False
    return True


def admitted(connection: socket.socket, secret: str, patience: Patience) -> tuple[Channel | None, int]:
    """Have a task prove that it is one, and prove that this is its driver: the other end of `reach_driver`.

    Parameters
    ----------
    connection : socket.socket
        Stays the caller's.
    secret : str
    patience : Patience

    Returns
    -------
    Channel or None
        Over copies of the connection's descriptor; None: it is not a task, or does not say so in time.
    int
        The task.
    """
    channel, nonce = channel_over(connection.dup()), secrets.token_hex(16)
    channel.send("challenge", nonce=nonce)
    message = next_message(channel, patience)
    with contextlib.suppress(ChannelError):
        if message is not None and message.kind == "proof" and proven(secret, "task", nonce, message.head.get("proof")):
            channel.send("welcome", proof=proof(secret, "driver", str(message.head.get("nonce"))))
            return channel, message.number("task")
    channel.close()
    return None, -1


def next_message(channel: Channel, patience: Patience) -> Message | None:
    """The next message; None if none comes in time, or something else. The other side sends one at a time."""
    poll = select.poll()
    while not channel.ended and patience.left():
        poll.register(channel.reading, select.POLLIN)
        poll.poll(1000 * patience.wait())
        try:
            for message in channel.receive():
                return message
        except ChannelError:
            return None
    return None
