"""Authenticated connection between a task and the driver, and how a task finds the driver.

Both sides first prove that they know the job's secret, which Spark has brought to the tasks (`engine.net.stream`). The
task's greeting has its number. Then they exchange messages of `engine.launch.hosts.channel`, each of them sealed.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence

from ..host.network import keep_watch
from ..host.patience import Patience
from ..launch.hosts.channel import LIMIT, Channel, ChannelError, Message
from ..net.connection import Connection, greet_server, receive_greeting
from ..net.event_loop import run
from ..net.frames import wrap
from ..net.stream import CLIENT, SERVER, StreamError, derive_key

SEARCH = 4.0  # seconds that a task looks for the driver
TRY = 1.5  # seconds for one of its addresses
ROUNDS = 4  # tries of an address that closes the connection, as the driver does if too many strangers connect
PAUSE = 0.05  # seconds before the next try
BEGIN = b"\n"  # tells a task that has offered itself as a host to start its agent
HEAD = 64 << 10  # largest head of a message from an authenticated peer, in bytes
SILENCE = 20  # seconds after which a connection to a peer that does not answer is closed


def task_key(secret: str) -> bytes:
    """Return the key of the connections between tasks and driver, from the job's secret."""
    return derive_key(secret, "spark")


def channel_over(connection: Connection) -> Channel:
    """Return a channel over a connection whose peer is authenticated, which it owns from now on."""
    keep_watch(connection.socket, SILENCE)
    writing = os.dup(connection.socket.fileno())  # first, as it may fail for lack of descriptors
    channel = Channel(connection.socket.detach(), writing)
    channel.limit_sizes(LIMIT, HEAD)
    channel.authenticate_with(connection.stream.seal)
    return channel


def reach_driver(addresses: Sequence[tuple[str, int]], secret: str, task: int) -> Channel | None:
    """Look for the driver at several addresses, in their order; `task` is the number of the calling task.

    Returns None if none of the addresses is the driver's, or none can be reached.
    """
    patience = Patience(SEARCH)
    left = [*addresses]
    for _ in range(ROUNDS):
        again = []
        for number, address in enumerate(left):
            # A silent stranger must leave time for later addresses.
            share = patience.seconds_left() / (len(left) - number)
            if not share:
                return None
            channel, displaced = _try_address(address, secret, task, Patience(min(TRY, share)))
            if channel is not None:
                return channel
            again += [address] if displaced else []
        left = again
    return None


def _try_address(address: tuple[str, int], secret: str, task: int, patience: Patience) -> tuple[Channel | None, bool]:
    """Try one address; return the channel, and whether the peer has closed it for lack of room."""
    try:
        connection = Connection(
            socket.create_connection(address, max(0.1, patience.seconds_left())), task_key(secret), CLIENT
        )
    except OSError:
        return None, False
    try:
        run(greet_server(connection, {"task": task}, patience, patience))
        return channel_over(connection), False
    except (ConnectionResetError, BrokenPipeError):
        time.sleep(PAUSE)
        return None, True
    except (OSError, StreamError):
        return None, False
    finally:
        connection.close()  # does nothing to what a channel has taken over


def admit_task(connection: Connection, greeting: dict[str, object], tasks: int) -> tuple[Channel, int]:
    """Take over the connection of a task; return the channel that owns it now, and the number of the task.

    `answer_task` must follow, which authenticates the driver. Raises ValueError if there is no such task among `tasks`,
    and OSError if there is no descriptor for the channel.
    """
    task = greeting.get("task")
    if type(task) is not int or not 0 <= task < tasks:  # True is no number of a task
        raise ValueError(f"there is no task {task!r}")
    return channel_over(connection), task


def answer_task(channel: Channel) -> None:
    """Answer the greeting of a task."""
    assert channel.sealed is not None
    channel.out.write(wrap(channel.sealed.close(b"{}")))


def receive_task(connected: socket.socket, secret: str, tasks: int) -> tuple[Channel | None, int]:
    """Authenticate the peer that has connected: the driver's side of `reach_driver` in a thread of its own.

    Returns a channel over copies of the descriptor of `connected`, which remains the caller's, and the number of the
    task; None and -1 if the peer is no task, or does not answer in time. `tasks` is the number of tasks.
    """
    connection = Connection(connected, task_key(secret), SERVER)
    try:
        greeting = run(receive_greeting(connection))
        connection.socket = connected.dup()  # only now, so that strangers use up no spare descriptors
    except (OSError, ValueError):
        return None, -1
    try:
        channel, task = admit_task(connection, greeting, tasks)
    except (OSError, ValueError):
        return None, -1
    finally:
        connection.close()
    answer_task(channel)
    return channel, task


def next_message(channel: Channel, patience: Patience) -> Message | None:
    """Return the next message; None if none comes in time, or an invalid one. The peer sends one at a time."""
    poll = select.poll()
    while not channel.ended and patience.seconds_left():
        poll.register(channel.reading, select.POLLIN)
        poll.poll(1000 * patience.wait())
        try:
            for message in channel.receive():
                return message
        except ChannelError:
            return None
    return None
