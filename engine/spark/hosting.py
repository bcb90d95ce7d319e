"""Task of an elastic job in Spark: runs an agent when the launcher wants one, and after its end the next one.

The task is an ordinary one. Spark never learns what happens to ranks and agents. If the task's own process or its
executor goes, Spark reruns only this task, and the new attempt offers itself again. The agent is that of every elastic
job (`engine.launch.agent`), in a child process that ends with this one. Its channel to the launcher uses the
connection by which this task has authenticated.
"""

from __future__ import annotations

import functools
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..host import processes
from ..host.sockets import retry_short
from ..launch.process.plan import without_places
from ..net.stream import Seal
from .task_channel import BEGIN, reach_driver
from .task_relay import RELAY, relay_bytes

UNREACHED = "it does not reach the driver under any of its addresses"


@dataclass(frozen=True)
class HostSpec:
    """Instructions for every task."""

    addresses: tuple[tuple[str, int], ...]  # addresses on which the driver listens
    secret: str = field(repr=False)  # secret of the connections between tasks and driver
    executable: str = ""  # Python interpreter of agents and ranks; empty: the executor's


class UnreachableError(RuntimeError):
    """A task cannot reach the driver."""


def host_agents(spec: HostSpec, batches: Iterable[Any]) -> Iterator[Any]:
    """Serve as a host of the job until the driver is gone. Spark calls this function in a task. Yields nothing."""
    from pyspark import TaskContext

    for _ in batches:
        pass
    context = TaskContext.get()
    assert context is not None
    task, attempt = context.partitionId(), context.attemptNumber()
    known = False
    while (channel := reach_driver(spec.addresses, spec.secret, task)) is not None:
        known = True
        channel.send("host", attempt=attempt, pid=os.getpid())
        assert channel.sealed is not None
        seal = Seal(channel.sealed.derive_key(RELAY), "agent", "launcher")
        connection = socket.socket(fileno=os.dup(channel.reading))
        channel.close()
        with connection:
            if not _await_order(connection):
                break
            _run_agent(spec, connection, seal)
    if not known:
        raise UnreachableError(f"task {task}: {UNREACHED}")
    yield from ()


def _await_order(connection: socket.socket) -> bool:
    """Wait without a timeout until an agent is wanted; False if the driver has gone."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.poll()
    try:
        return retry_short(connection.recv, len(BEGIN)) == BEGIN
    except OSError:
        return False


def _run_agent(spec: HostSpec, connection: socket.socket, seal: Seal) -> None:
    """Run an agent to its end, and relay its channel to the launcher."""
    environment = without_places(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # includes modules that Spark has distributed
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            agent = subprocess.Popen(
                [spec.executable or sys.executable, "-P", "-m", "engine.launch.agent"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=environment,
                start_new_session=True,
                # Spark kills this process without notice; the agent's guardian then ends the ranks. A `preexec_fn` is
                # safe: this process has one thread, as long as no agent runs.
                preexec_fn=functools.partial(processes.die_with, os.getpid()),
            )
        relay_bytes(connection, ours.fileno(), ours.fileno(), seal)
        ours.shutdown(socket.SHUT_RDWR)  # at which the agent ends
        agent.wait()
