"""Authenticated connection between a task and the driver, and how a task finds the driver.

Both sides first prove that they know the job's secret, which Spark has brought to the tasks. So strangers that reach
the driver's port are turned away, and nobody can pose as the driver. Until then a message has at most `UNPROVEN` bytes;
from then on each is sealed. Messages are not encrypted. Their format is that of `engine.launch.hosts.channel`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from hashlib import sha256

from ..host.network import keep_watch
from ..host.patience import Patience
from ..launch.hosts.channel import LIMIT, Channel, ChannelError, Message, Seal
from ..net.frames import UNPROVEN

SEARCH = 4.0  # seconds that a task looks for the driver
TRY = 1.5  # seconds for one of its addresses
ROUNDS = 4  # tries of an address that closes the connection, as the driver does if too many strangers connect
PAUSE = 0.05  # seconds before the next try
BEGIN = b"\n"  # tells a task that has offered itself as a host to start its agent
HEAD = 64 << 10  # largest head of a message from an authenticated peer, in bytes
SILENCE = 20  # seconds after which a connection to a peer that does not answer is closed


def proof(secret: str, role: str, *said: str) -> str:
    """Return the proof that only a process with the secret can compute.

    Parameters
    ----------
    secret : str
    role : str
        Role of the side that answers, so that an answer of one side cannot be reused for the other.
    *said : str
        The other side's nonce first; then further values that the proof covers.

    Returns
    -------
    str
        Hexadecimal digest.
    """
    return hmac.new(secret.encode(), "\0".join((role, *said)).encode(), sha256).hexdigest()


def proven(expected: str, answer: object) -> bool:
    """Return whether an answer is the `proof` that was expected."""
    return isinstance(answer, str) and hmac.compare_digest(expected.encode(), answer.encode(errors="replace"))


def channel_over(connection: socket.socket) -> Channel:
    """Return a channel over a connection, which it owns from now on. The peer is not authenticated yet."""
    keep_watch(connection, SILENCE)
    writing = os.dup(connection.fileno())  # before the connection is taken over, as it may fail for lack of descriptors
    channel = Channel(connection.detach(), writing)
    channel.restrict(UNPROVEN, UNPROVEN)
    return channel


def session_key(secret: str, nonces: tuple[str, str]) -> bytes:
    """Return the key of one connection's messages, from the driver's nonce and the task's."""
    return hmac.digest(secret.encode(), "\0".join(("session", *nonces)).encode(), "sha256")


def trust(channel: Channel, seal: Seal) -> None:
    """Allow long messages, and seal them from now on: both sides are authenticated."""
    channel.restrict(LIMIT, HEAD)
    channel.seal(seal)


def reach_driver(addresses: Sequence[tuple[str, int]], secret: str, task: int) -> Channel | None:
    """Look for the driver at several addresses.

    Parameters
    ----------
    addresses : sequence of (str, int)
        Addresses in the order in which they are tried.
    secret : str
    task : int
        Number of the calling task.

    Returns
    -------
    Channel or None
        None: none of the addresses is the driver's, or none can be reached.
    """
    patience = Patience(SEARCH)
    left = [*addresses]
    for _ in range(ROUNDS):
        again = []
        for number, address in enumerate(left):
            share = patience.left() / (len(left) - number)  # a silent stranger must leave time for later addresses
            if not share:
                return None
            channel, displaced = _reach(address, secret, task, Patience(min(TRY, share)))
            if channel is not None:
                return channel
            again += [address] if displaced else []
        left = again
    return None


def _reach(address: tuple[str, int], secret: str, task: int, patience: Patience) -> tuple[Channel | None, bool]:
    """Try one address; return the channel, and whether the peer has closed it for lack of room."""
    try:
        connection = socket.create_connection(address, max(0.1, patience.left()))
    except OSError:
        return None, False
    channel = channel_over(connection)
    if _agreed(channel, secret, task, patience):
        return channel, False
    displaced = channel.ended
    channel.close()
    if displaced:
        time.sleep(PAUSE)
    return None, displaced


def _agreed(channel: Channel, secret: str, task: int, patience: Patience) -> bool:
    """Authenticate both sides as the task; return whether that succeeded."""
    nonce = secrets.token_hex(16)
    challenge = next_message(channel, patience)
    if challenge is None or challenge.kind != "challenge":
        return False
    theirs = str(challenge.head.get("nonce"))
    try:
        channel.send("proof", task=task, nonce=nonce, proof=proof(secret, "task", theirs, nonce, str(task)))
    except OSError:
        return False
    welcome = next_message(channel, patience)
    if welcome is None or welcome.kind != "welcome":
        return False
    if not proven(proof(secret, "driver", nonce, theirs), welcome.head.get("proof")):
        return False
    trust(channel, Seal(session_key(secret, (theirs, nonce)), "task", "driver"))
    return True


def proven_task(secret: str, nonce: str, message: Message) -> int | None:
    """Return the number of the task that has answered the challenge with this nonce; None if the proof is wrong."""
    task, theirs = message.head.get("task"), message.head.get("nonce")
    if message.kind != "proof" or type(task) is not int or not isinstance(theirs, str) or len(theirs) != len(nonce):
        return None
    expected = proof(secret, "task", nonce, theirs, str(task))
    return task if proven(expected, message.head.get("proof")) else None


def welcome(channel: Channel, secret: str, nonce: str, message: Message) -> None:
    """Prove to an authenticated task that this is its driver; from now on messages are sealed."""
    theirs = str(message.head["nonce"])
    channel.send("welcome", proof=proof(secret, "driver", theirs, nonce))
    trust(channel, Seal(session_key(secret, (nonce, theirs)), "driver", "task"))


def admitted(connection: socket.socket, secret: str, patience: Patience) -> tuple[Channel | None, int]:
    """Challenge the peer that has connected: the driver's side of `reach_driver`.

    Parameters
    ----------
    connection : socket.socket
        Remains the caller's.
    secret : str
    patience : Patience

    Returns
    -------
    Channel or None
        Channel over copies of the connection's descriptor; None: the peer is no task, or does not answer in time.
    int
        Number of the task, or -1.
    """
    channel, nonce = channel_over(connection.dup()), secrets.token_hex(16)
    with contextlib.suppress(ChannelError, OSError):
        channel.send("challenge", nonce=nonce)
        message = next_message(channel, patience)
        task = None if message is None else proven_task(secret, nonce, message)
        if message is not None and task is not None:
            welcome(channel, secret, nonce, message)
            return channel, task
    channel.close()
    return None, -1


def next_message(channel: Channel, patience: Patience) -> Message | None:
    """Return the next message; None if none comes in time, or an invalid one. The peer sends one at a time."""
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
