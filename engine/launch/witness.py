"""Sees for itself that none of a lost agent's workers runs any more: what is certain need not be waited for.

When an agent is lost, nobody tells the launcher what becomes of its workers. They end with the agent, or with its
lease, which takes seconds. So the launcher starts another agent in the same way, for this alone: it kills what it finds
of the workers, and says so when it finds nothing. That counts only if it is where the lost one was, and sees the same
processes: a container or a PID namespace of its own would show it none.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Any

from ..host import processes
from .channel import PIDS, Channel, ChannelError, Message
from .guardian import end_all, runs

LOOK = 0.02  # seconds from one look to the next


def where() -> str:
    """What tells apart two views of processes: which boot of which machine, and which PID namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def testify(channel: Channel, order: Message) -> None:
    """End the workers of an agent that is lost, and tell when none is left; returns when the launcher hangs up.

    Parameters
    ----------
    channel : Channel
    order : Message
        `job` and `host`, by which their processes are known; `where` the agent was; `workers`: of each its number and
        when it began, in ticks since boot.
    """
    head = order.head
    known = [_process(told) for told in head["workers"]]
    if not processes.visible() or where() != head["where"]:
        channel.send("blind")
    else:
        while _end(known) | end_all(str(head["job"]), str(head["host"])):
            if _hung_up(channel):
                return
        channel.send("clear")
    channel.out.drain()
    for _ in channel.messages():
        pass


def _process(told: Any) -> tuple[int, int]:
    """A worker's number and beginning; a pid of 0 or below would be that of a group, or of all."""
    if isinstance(told, list) and len(told) == 2 and all(type(each) is int for each in told):
        pid, born = told
        if PIDS[0] <= pid <= PIDS[1] and born >= 0:
            return pid, born
    raise ChannelError(f"the launcher speaks of a worker {told!r}, which is no process")


def _end(workers: list[tuple[int, int]]) -> bool:
    """Kill workers with their groups; whether any runs. A program may have overwritten its variables."""
    found = [(pid, process) for pid, born in workers if (process := processes.look(pid)) and process.born == born]
    running = [pid for pid, process in found if runs(process)]
    for pid in running:
        processes.send_group(pid, signal.SIGKILL)
    return bool(running)


def _hung_up(channel: Channel) -> bool:
    """Wait for a moment; whether the launcher wants to know no more."""
    poll = select.poll()
    poll.register(channel.reading, select.POLLIN)
    if poll.poll(1e3 * LOOK):
        for _ in channel.receive():
            pass
    return channel.ended
