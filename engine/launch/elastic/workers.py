"""The workers of an elastic job on one host, which its agent starts in slots when the driver asks for them.

Messages pass between workers and the driver. On a host other than the launcher's the agent holds a lease. The launcher
confirms the agent's heartbeats, and each confirmation extends the lease, counted from the time of the heartbeat. When
the lease expires, the guardian kills the agent and its workers, because the driver lets others go on without them. Only
agents start workers, and they have one thread.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...host import linux, processes
from ...net.stream import StreamError
from ..errors import LaunchError
from ..hosts.channel import WORLDS, Message
from ..hosts.dead_workers import process_view
from ..process import spawn
from ..process.guardian import Guardian, boot_time
from ..process.plan import Crew, RankPlan, plan_one
from ..process.rank_end import RankEnd
from ..process.spawn import RankProcess
from ..process.supervisor import EndingStage, Supervisor
from .worker_messages import WorkerMessageError, check
from .worker_server import WorkerServer

if TYPE_CHECKING:
    from ..agent import Agent

# Exit codes of shells for a program that the kernel cannot execute.
_NOT_EXECUTED = {errno.ENOENT: 127, errno.EACCES: 126, errno.ENOEXEC: 126}


class Workers:
    """The workers of this host, as a `RankGroup` of the agent; `order` is the launcher's message `prepare`."""

    def __init__(self, agent: Agent, order: Message) -> None:
        self._agent = agent
        self._running: set[int] = set()  # workers whose end is not reported yet
        self._killed: set[int] = set()
        self._server: WorkerServer | None = None
        self._most = order.get_number("most", 1)
        self.trouble = ""
        self.places = max(1, order.get_number("slots"))  # workers in slots that the host gets later may run on any CPU
        self.lease = None if order.head["lease"] is None else order.get_seconds("lease", 0)
        self.handlers: Mapping[str, Callable[[Message], None]] = {
            "beat": self._answer_heartbeat,
            "heard": self._renew_lease,
            "kill": self._kill_worker,
            "launch": self._launch_worker,
            "tell": self._tell_worker,
        }

    def prepare(self, address: str) -> dict[str, Any]:
        """Return what a later agent compares with its own view of this host's processes."""
        return {"where": process_view()}

    def make_supervisor(self, guardian: Guardian, wakeup: socket.socket) -> WorkerSupervisor:
        """Implement `RankGroup.make_supervisor`."""
        agent = self._agent
        self._guardian = guardian
        self._send_heartbeat()  # before all messages on workers: from it on the launcher relies on the lease
        self._supervisor = WorkerSupervisor(
            agent.loop,
            guardian,
            wakeup,
            agent.grace,
            agent.show_line,
            self._send_end,
            leaving=lambda why: agent.channel.send("leaving", why=why),
        )
        if self.lease is not None:
            self._watch_guardian()
        return self._supervisor

    def start(self, head: dict[str, Any]) -> None:
        """Open the server to which workers connect; the driver asks for them later."""
        agent = self._agent
        self._server = WorkerServer(agent.job.secret, bool(agent.head["several"]), self._most, agent.loop, self)

    def close(self) -> None:
        """Close the server."""
        if self._server is not None:
            self._server.close()

    def show_line(self, line: str) -> None:
        """Show a line in the launcher's output."""
        self._agent.show_line(line)

    def worker_said(self, worker: int, message: dict[str, Any]) -> None:
        """Pass a worker's message on to the launcher; raise a `StreamError` if the worker or the message is unknown."""
        if worker not in self._running:
            raise StreamError(f"no worker {worker} runs here")
        try:
            self._agent.channel.send("said", worker=worker, message=check(message))
        except WorkerMessageError as error:
            raise StreamError(str(error)) from None

    # ---- the lease

    def _watch_guardian(self) -> None:
        """Kill all workers if the guardian ends, because only the guardian enforces the lease."""
        pidfd = linux.pidfd_open(self._guardian.pid)

        def end() -> None:
            self.trouble = "its agent ends, because its guardian was killed: nobody would end the workers in time"
            self._agent.loop.remove_reader(pidfd)
            os.close(pidfd)
            if not self._agent.channel.ended:
                self._agent.loop.remove_reader(self._agent.channel.reading)  # no worker is started any more
            self._supervisor.release()
            self._supervisor.kill()

        self._agent.loop.add_reader(pidfd, end)

    def _send_heartbeat(self) -> None:
        """Send a heartbeat with its time, which the launcher sends back."""
        self._agent.channel.send("beat", at=boot_time())

    def _answer_heartbeat(self, message: Message) -> None:
        self._send_heartbeat()
        self._agent.copies.send(self._agent.channel)

    def _renew_lease(self, message: Message) -> None:
        if self.lease is not None:
            self._guardian.renew_lease(message.get_seconds("at", 0) + self.lease)

    # ---- workers

    def _kill_worker(self, message: Message) -> None:
        worker = message.get_number("worker", *WORLDS)
        self._killed.add(worker)
        self._supervisor.kill_one(worker)

    def _tell_worker(self, message: Message) -> None:
        if self._server is not None:
            self._server.send(
                message.get_number("worker", *WORLDS), str(message.head["kind"]), **message.head["fields"]
            )

    def _launch_worker(self, message: Message) -> None:
        """Start a worker; if it cannot be started, report that as its end."""
        worker = message.get_number("worker", *WORLDS)
        try:
            self._start_worker(worker, message)
        except LaunchError as error:
            self.show_line(str(error))
            code = _NOT_EXECUTED.get(getattr(error.__cause__, "errno", 0), 1)
            self._agent.channel.send("end", worker=worker, code=code, killed=worker in self._killed, started=False)

    def _start_worker(self, worker: int, message: Message) -> None:
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            raise LaunchError(f"workers are started by a process with one thread, and this one has {threads}")
        rank_plan = self._plan_worker(worker, message)
        rank = self._agent.start_rank(rank_plan, message.get_number("number"), awaited=False)
        self._running.add(worker)
        process = processes.read_process(rank.pid)
        assert process is not None  # it is not reaped yet
        self._agent.channel.send("started", worker=worker, pid=rank.pid, born=process.born, cpus=rank_plan.cpus)

    def _plan_worker(self, worker: int, message: Message) -> RankPlan:
        agent, number, slot = self._agent, message.get_number("number"), message.get_number("slot")
        assert self._server is not None
        job = replace(agent.job, size=message.get_number("size"))
        local = max(slot + 1, message.get_number("local_size"))
        sizes = (*(local,) * agent.crew.host, local)
        crew = Crew(agent.crew.host, sizes, tuple(range(local)), agent.crew.name)
        rank_plan = plan_one(job, agent.allotment, agent.environment, crew, message.get_number("rank"), slot)
        own = {
            "ENGINE_GATE": self._server.name,
            "ENGINE_WORKER": str(worker),
            "ENGINE_SLOT": str(slot),
        }
        if agent.head["counted"] and number in agent.crew.ranks:
            own["ENGINE_COUNTERS"] = agent.make_page(number)
        own |= message.head.get("environment", {})
        return replace(rank_plan, rank=worker, environment=rank_plan.environment | own)

    def _send_end(self, rank: RankProcess, end: RankEnd) -> None:
        assert self._server is not None
        self._server.forget_worker(end.rank)
        self._running.discard(end.rank)
        killed, code = end.by_launcher or end.rank in self._killed, end.code
        if (failure := rank.process.read_failure()) is not None:
            self.show_line(spawn.not_started(end.rank, self._agent.program, failure))
            code = _NOT_EXECUTED.get(failure.errno or 0, 1)
        told = {"worker": end.rank, "code": code, "killed": killed, "started": failure is None}
        self._agent.channel.send("end", end.report.to_bytes(), **told)


class WorkerSupervisor(Supervisor):
    """Supervisor of a host's workers, which end independently of each other.

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
        self._streams = {
            worker: streams
            for worker, streams in self._streams.items()
            if worker in self._alive or any(stream.pipe >= 0 for stream in streams)
        }
