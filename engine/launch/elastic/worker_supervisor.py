"""Supervisor of the workers of an elastic job on one host, which end independently of each other."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from ...host import processes
from ..process.output import Stream
from ..process.rank_end import RankEnd
from ..process.spawn import RankProcess
from ..process.supervisor import EndingStage, Supervisor


class WorkerSupervisor(Supervisor):
    """Supervisor of a host's workers.

    `leaving` is called with the name of a signal to the agent itself, which means that this host is about to go.
    """

    def __init__(self, *arguments: Any, leaving: Callable[[str], None]) -> None:
        super().__init__(*arguments)
        self._leaving = leaving
        self._asked_to_leave = False

    def kill_one(self, worker: int) -> None:
        """Kill a worker and its process group with SIGKILL; do nothing if it has ended."""
        if worker in self._alive:
            processes.send_group(self._alive[worker].pid, signal.SIGKILL)

    def end_by(self, signum: int) -> None:
        """Handle a signal to the agent itself: its workers leave; a second one kills them."""
        if self._asked_to_leave:
            self.kill()
            self.release()
        elif self._stage == EndingStage.RUNNING:
            self._asked_to_leave = True
            self._leaving(processes.signal_name(signum))

    def _handle_failure(self, rank: RankProcess, end: RankEnd) -> None:
        """Kill the child processes of a failed worker, so that they write nothing into the output of other workers."""
        processes.send_group(rank.pid, signal.SIGKILL)
        held = [worker for worker, streams in self._streams.items() if worker in self._alive or _has_open(streams)]
        self._streams = {worker: self._streams[worker] for worker in held}


def _has_open(streams: list[Stream]) -> bool:
    return any(stream.pipe >= 0 for stream in streams)
