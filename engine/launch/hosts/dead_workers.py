"""Confirmation that no worker of a lost agent runs any more, so that the driver need not wait for the lease.

When an agent is lost, the launcher does not learn what happens to its workers. They end with the agent or its lease,
which takes seconds. So the launcher starts another agent in the same way for this purpose alone. It kills the workers
that it finds, and reports when none is left. That counts only if it sees the same processes as the lost agent: a
container or PID namespace of its own would show it none.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ...host import processes
from ..process.guardian import end_all
from .channel import PIDS, Channel, ChannelError, Message

LOOK = 0.02  # seconds between two searches for workers


def process_view() -> str:
    """Return an identifier of the visible set of processes: the machine's boot id and the PID namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def confirm_dead_workers(channel: Channel, order: Message) -> None:
    """Kill the workers of a lost agent, and report when none is left; return when the launcher hangs up.

    Fields of `order`: `job` and `host` identify the processes. `where` is the lost agent's result of `process_view`.
    `workers` has the pid and start time (in ticks since boot) of each worker.
    """
    head = order.head
    known = [_parse_process(told) for told in head["workers"]]
    if not processes.is_proc_usable() or process_view() != head["where"]:
        channel.send("blind")
    else:
        while _kill_workers(known) | end_all(str(head["job"]), str(head["host"])):
            channel.await_end(LOOK)
            if channel.ended:
                return
        channel.send("clear")
    channel.out.drain()
    for _ in channel.wait_for_messages():
        pass


def _parse_process(told: Any) -> tuple[int, int]:
    """Return a worker's pid and start time, validated: a pid of 0 or below would mean a group or all processes."""
    if isinstance(told, list) and len(told) == 2 and all(type(each) is int for each in told):
        pid, born = told
        if PIDS[0] <= pid <= PIDS[1] and born >= 0:
            return pid, born
    raise ChannelError(f"the launcher speaks of a worker {told!r}, which is no process")


def _kill_workers(workers: list[tuple[int, int]]) -> bool:
    """Kill workers with their process groups, and return whether any was running.

    This finds programs that have overwritten their environment, by which `end_all` searches.
    """
    found = [
        (pid, process) for pid, born in workers if (process := processes.read_process(pid)) and process.born == born
    ]
    running = [pid for pid, process in found if processes.is_running(process)]
    for pid in running:
        processes.send_group(pid, signal.SIGKILL)
    return bool(running)
