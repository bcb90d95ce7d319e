"""The line between a task and the driver: who may speak on it, and how a task finds the driver.

Both sides prove that they know the job's secret, which Spark has brought to the tasks, before anything else is said:
whoever else can reach the driver's port is turned away, and nobody can pretend to be the driver. Until then a message
has `UNPROVEN` bytes at most; from then on each is sealed. What is said is not encrypted. Messages are those of
`engine.launch.channel`.
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

from ..frames import UNPROVEN
from ..host.network import keep_watch
from ..host.patience import Patience
from ..launch.channel import LIMIT, Channel, ChannelError, Message, Seal

SEARCH = 4.0  # seconds that a task looks for the driver
TRY = 1.5  # seconds for one of its addresses
ROUNDS = 4  # tries of an address that ends the connection, as it does where strangers crowd
PAUSE = 0.05  # seconds before the next
BEGIN = b"\n"  # what tells a task that offers itself as a host that its agent is wanted
HEAD = 64 << 10  # bytes of the head of a message from somebody who has proven itself
SILENCE = 20  # seconds after which a connection whose other side does not answer has ended


def proof(secret: str, role: str, *said: str) -> str:
    """Return what only somebody who knows the secret can answer.

    Parameters
    ----------
    secret : str
    role : str
        Who answers: an answer of one side is none of the other.
    *said : str
        The other side's nonce first; then what else the proof holds for.

    Returns
    -------
    str
        In hex.
    """
    return hmac.new(secret.encode(), "\0".join((role, *said)).encode(), sha256).hexdigest()


def proven(expected: str, answer: object) -> bool:
    """Whether an answer is the `proof` that was expected."""
    return isinstance(answer, str) and hmac.compare_digest(expected.encode(), answer.encode(errors="replace"))


def channel_over(connection: socket.socket) -> Channel:
    """The channel over a connection, which it owns from now on. The other side has proven nothing yet."""
    keep_watch(connection, SILENCE)
    writing = os.dup(connection.fileno())  # before anything is taken over: there may be no descriptor for it
    channel = Channel(connection.detach(), writing)
    channel.restrict(UNPROVEN, UNPROVEN)
    return channel


def session_key(secret: str, nonces: tuple[str, str]) -> bytes:
    """The key of one connection's messages, by the driver's nonce and the task's."""
    return hmac.digest(secret.encode(), "\0".join(("session", *nonces)).encode(), "sha256")


def trust(channel: Channel, seal: Seal) -> None:
    """Both sides have proven themselves: messages may be long from now on, and are sealed."""
    channel.restrict(LIMIT, HEAD)
    channel.seal(seal)


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
    left = [*addresses]
    for _ in range(ROUNDS):
        again = []
        for number, address in enumerate(left):
            share = patience.left() / (len(left) - number)  # so that strangers who say nothing leave time for the last
            if not share:
                return None
            channel, displaced = _reach(address, secret, task, Patience(min(TRY, share)))
            if channel is not None:
                return channel
            again += [address] if displaced else []
        left = again
    return None


def _reach(address: tuple[str, int], secret: str, task: int, patience: Patience) -> tuple[Channel | None, bool]:
    """Try one address. The channel, and whether the other side has ended it: as it does if strangers crowd there."""
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
    """Prove who we are, and have the driver prove who it is."""
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
    """Return which task has answered a challenge with this nonce; None: whoever it is does not know the secret."""
    task, theirs = message.head.get("task"), message.head.get("nonce")
    if message.kind != "proof" or type(task) is not int or not isinstance(theirs, str) or len(theirs) != len(nonce):
        return None
    expected = proof(secret, "task", nonce, theirs, str(task))
    return task if proven(expected, message.head.get("proof")) else None


def welcome(channel: Channel, secret: str, nonce: str, message: Message) -> None:
    """Prove to a task that has proven itself by this message that this is its driver; from now on all is sealed."""
    theirs = str(message.head["nonce"])
    channel.send("welcome", proof=proof(secret, "driver", theirs, nonce))
    trust(channel, Seal(session_key(secret, (nonce, theirs)), "driver", "task"))


def admitted(connection: socket.socket, secret: str, patience: Patience) -> tuple[Channel | None, int]:
    """Challenge whoever has connected: the other end of `reach_driver`.

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
