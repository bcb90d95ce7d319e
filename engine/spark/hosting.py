"""A task of an elastic job in Spark: it has an agent started in it when the launcher wants one, and another after that.

The task is an ordinary one. What becomes of ranks, and of an agent, never reaches Spark; if the task's own process or
its executor goes, Spark runs the task again alone, and the new attempt offers itself as this one has. The agent is that
of every elastic job (`engine.launch.elastic_agent`), a child that ends with this process; its channel to the launcher
goes over the connection by which this task has proven itself.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..host import processes
from ..host.sockets import retry_short
from ..launch.channel import Seal
from ..launch.plan import without_places
from .carrier import RELAY, relay
from .line import BEGIN, reach_driver

UNREACHED = "it does not reach the driver under any of its addresses"


@dataclass(frozen=True)
class Offer:
    """What every task is told.

    Attributes
    ----------
    addresses : tuple of (str, int)
        Where the driver listens.
    secret : str
        Of the lines between tasks and driver.
    executable : str
        The Python of agents and ranks; empty: the executor's.
    """

    addresses: tuple[tuple[str, int], ...]
    secret: str = field(repr=False)
    executable: str = ""


class UnreachableError(RuntimeError):
    """A task does not get to the driver."""


def host_agents(offer: Offer, batches: Iterable[Any]) -> Iterator[Any]:
    """Serve as a host of the job until the driver is gone; the function that Spark calls in a task. Yields nothing."""
    from pyspark import TaskContext

    for _ in batches:
        pass
    context = TaskContext.get()
    assert context is not None
    task, attempt = context.partitionId(), context.attemptNumber()
    known = False
    while (channel := reach_driver(offer.addresses, offer.secret, task)) is not None:
        known = True
        channel.send("offer", attempt=attempt, pid=os.getpid())
        assert channel.sealed is not None
        seal = Seal(channel.sealed.derive(RELAY), "agent", "launcher")
        connection = socket.socket(fileno=os.dup(channel.reading))
        channel.close()
        with connection:
            if not _begins(connection):
                break
            _agent(offer, connection, seal)
    if not known:
        raise UnreachableError(f"task {task}: {UNREACHED}")
    yield from ()


def _begins(connection: socket.socket) -> bool:
    """Wait until an agent is wanted, as long as the job may last; False: the driver has gone."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll()
    try:
        return retry_short(connection.recv, len(BEGIN)) == BEGIN
    except OSError:
        return False


def _agent(offer: Offer, connection: socket.socket, seal: Seal) -> None:
    """Run an agent, and relay what it and the launcher say, to its end."""
    environment = without_places(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # with what Spark has brought to executors
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            agent = subprocess.Popen(
                [offer.executable or sys.executable, "-P", "-m", "engine.launch.agent"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=environment,
                start_new_session=True,
                preexec_fn=_ends_with(os.getpid()),  # this process has one thread, as long as no agent runs
            )
        relay(connection, ours.fileno(), ours.fileno(), seal)
        ours.shutdown(socket.SHUT_RDWR)  # at which the agent ends
        agent.wait()


def _ends_with(task: int) -> Callable[[], None]:
    """Have the agent die with this process, which Spark kills without a word; the agent's guardian ends the ranks."""

    def prepare() -> None:
        processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != task:
            os._exit(128 + signal.SIGKILL)

    return prepare
