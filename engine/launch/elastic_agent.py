"""The agent of a host in an elastic job: it starts workers in the slots of its host when the driver asks for them.

It is an `Agent` that starts no ranks at first. It passes messages on between its workers and the driver. On a host
other than the launcher's it holds a lease. The launcher confirms the agent's heartbeats, and each confirmation extends
the lease, counted from the time of the heartbeat. When the lease expires, the guardian kills the agent and its workers,
because the driver lets others go on without them. Only agents start workers, and they have one thread.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from typing import Any

from ..elastic.worker.messages import TalkError
from ..host import linux, machine, processes
from ..host.signals import caught
from ..metrics import page
from .agent import Agent, Relay
from .elastic.worker_messages import WorkerMessageError, check
from .elastic.worker_server import WorkerServer
from .errors import LaunchError
from .hosts.channel import WORLDS, Channel, ChannelError, Message
from .hosts.dead_workers import where
from .process import spawn
from .process.cpu_binding import Allotment, allot
from .process.guardian import Guardian, boot_time
from .process.output import Stream
from .process.plan import Crew, plan_one
from .process.spawn import Rank
from .process.supervisor import ENDING_SIGNALS, PASSED_SIGNALS, SIGNALS, Stage, Supervisor
from .report.failure_cause import End

# Exit codes of shells for a program that the kernel cannot execute.
_NOT_EXECUTED = {errno.ENOENT: 127, errno.EACCES: 126, errno.ENOEXEC: 126}


class WorkerSupervisor(Supervisor):
    """Supervisor of a host's workers, which end independently of each other."""

    def __init__(self, *arguments: Any, leaving: Any) -> None:
        super().__init__(*arguments)
        self._leaving = leaving
        self._asked_to_leave = False

    def kill_one(self, worker: int) -> None:
        """Kill a worker and its process group with SIGKILL; do nothing if it has ended."""
        if worker in self._alive:
            processes.send_group(self._alive[worker].pid, signal.SIGKILL)

    def end_by(self, signum: int) -> None:
        """Pass the user's signal to end the job on to workers, which have a grace period; a second one kills them."""
        super()._end_by(signum)

    def _failed(self, rank: Rank, end: End) -> None:
        """Kill the child processes of a failed worker, so that they write nothing into the output of other workers."""
        processes.send_group(rank.pid, signal.SIGKILL)
        held = [worker for worker, streams in self._streams.items() if worker in self._alive or _open(streams)]
        self._streams = {worker: self._streams[worker] for worker in held}

    def _end_by(self, signum: int) -> None:
        """Handle a signal to the agent itself, which means that this host is about to go; a second one kills."""
        if self._asked_to_leave:
            self.kill()
            self.release()
        elif self._stage == Stage.RUNNING:
            self._asked_to_leave = True
            self._leaving(processes.signal_name(signum))


def _open(streams: list[Stream]) -> bool:
    return any(stream.pipe >= 0 for stream in streams)


class ElasticAgent(Agent):
    """Manager of the workers of this host.

    Parameters
    ----------
    channel : Channel
        Channel to the launcher.
    order : Message
        The launcher's message `prepare`. Its `ranks` are the possible slot numbers of the job, its `slots` the number
        of slots of this host.
    """

    def __init__(self, channel: Channel, order: Message) -> None:
        super().__init__(channel, order)
        self._running: set[int] = set()  # workers whose end is not reported yet
        self._killed: set[int] = set()
        self._worker_server: WorkerServer | None = None
        self._unguarded = False
        self._most, self._slots = order.number("most", 1), order.number("slots")
        self._lease = None if self.head["lease"] is None else order.seconds("lease", 0)

    def run(self, head: dict[str, Any]) -> None:
        """Start workers as the launcher asks for them, until it ends the job or has gone."""
        self._descriptors = spawn.raise_descriptor_limit(self._most)
        self.files.settle()
        self._guardian = Guardian(self.job.name, lambda: None, str(self.crew.host), self._lease)
        self._beat()  # precedes all messages on workers: the launcher relies on the lease from this message on
        processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
        with caught(SIGNALS, lambda *_: None) as wakeup:
            keeper = WorkerSupervisor(
                self._guardian,
                wakeup,
                (self.channel.out,),
                self.head["grace"],
                self._say,
                self._ended,
                leaving=lambda why: self.channel.send("leaving", why=why),
            )
            keeper.hold()
            keeper.add_reader(self.channel.reading, self._hear)
            self._supervisor = self._keeper = keeper
            if self._lease is not None:
                self._watch_guardian()
            several = bool(self.head["several"])
            worker_server = WorkerServer(self.job.secret, several, self._most, keeper, self._passed, self._say)
            self._worker_server = worker_server
            try:
                self._hear()  # messages that came together with `start`
                keeper.run()
            finally:
                worker_server.close_quietly()
        self._guardian.dismiss()
        if self._unguarded:
            raise LaunchError("its agent ends, because its guardian was killed: nobody would end the workers in time")
        self.copies.send(self.channel)

    def _watch_guardian(self) -> None:
        """Kill all workers if the guardian ends, because only the guardian enforces the lease."""
        pidfd = linux.pidfd_open(self._guardian.pid)

        def end() -> None:
            self._unguarded = True
            self._keeper.forget(pidfd)
            os.close(pidfd)
            if not self.channel.ended:
                self._keeper.forget(self.channel.reading)  # no worker is started any more
            self._keeper.release()
            self._keeper.kill()

        self._keeper.add_reader(pidfd, end)

    def _hear(self) -> None:
        """Handle the launcher's messages; at the end of the channel, kill the workers."""
        descriptor = self.channel.reading
        if self._unguarded:  # set by another event of the same batch
            return
        for message in self.channel.receive():
            self._do(message)
        if self.channel.ended:
            self._keeper.forget(descriptor)
            self.channel.out.give_up()
            self._keeper.release()
            self._keeper.kill()

    def _do(self, message: Message) -> None:
        kind, head, keeper = message.kind, message.head, self._keeper
        if kind == "launch":
            self._launch(message)
        elif kind == "kill":
            self._killed.add(message.number("worker", *WORLDS))
            keeper.kill_one(message.number("worker", *WORLDS))
        elif kind == "tell" and self._worker_server is not None:
            self._worker_server.send(message.number("worker", *WORLDS), str(head["kind"]), **head["fields"])
        elif kind in ("hold", "go_on"):
            keeper.hold_back(kind == "hold")
        elif kind == "beat":
            self._beat()
            self.copies.send(self.channel)
        elif kind == "heard":
            if self._lease is not None:
                self._guardian.renew(message.seconds("at", 0) + self._lease)
        elif kind == "signal" and message.number("number") in ENDING_SIGNALS:
            keeper.end_by(message.number("number"))
        elif kind == "signal" and message.number("number") in PASSED_SIGNALS:
            signal.raise_signal(message.number("number"))
        elif kind == "finish":
            keeper.release()
        else:
            raise ChannelError(f"the launcher asks for {kind!r}, which this agent does not know")

    def _beat(self) -> None:
        """Send a heartbeat with its time, which the launcher sends back."""
        self.channel.send("beat", at=boot_time())

    def _facts(self) -> dict[str, str]:
        return {"where": where()}

    def _launch(self, message: Message) -> None:
        """Start a worker; if it cannot be started, report that as its end."""
        worker = message.number("worker", *WORLDS)
        try:
            self._start_worker(worker, message)
        except LaunchError as error:
            self._say(str(error))
            code = _NOT_EXECUTED.get(getattr(error.__cause__, "errno", 0), 1)
            self.channel.send("end", worker=worker, code=code, killed=worker in self._killed, started=False)

    def _start_worker(self, worker: int, message: Message) -> None:
        number, slot = message.number("number"), message.number("slot")
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            raise LaunchError(f"workers are started by a process with one thread, and this one has {threads}")
        assert self._worker_server is not None
        job = replace(self.job, size=message.number("size"))
        local = max(slot + 1, message.number("local_size"))
        sizes = (*(local,) * self.crew.host, local)
        crew = Crew(self.crew.host, sizes, tuple(range(local)), self.crew.name)
        rank_plan = plan_one(job, self.allotment, self.environment, crew, message.number("rank"), slot)
        own = {
            "ENGINE_GATE": self._worker_server.name,
            "ENGINE_WORKER": str(worker),
            "ENGINE_SLOT": str(slot),
        }
        if self.head["counted"] and number in self.crew.ranks:
            own["ENGINE_COUNTERS"] = f"/proc/{os.getpid()}/fd/{self._page(number)}"
        own |= message.head.get("environment", {})
        rank_plan = replace(rank_plan, rank=worker, environment=rank_plan.environment | own)
        rank = spawn.start(rank_plan, self.command, self.program, self._descriptors, awaited=False)
        self._keeper.add(rank)
        self._running.add(worker)
        for name, pipe in (("stdout", rank.stdout), ("stderr", rank.stderr)):
            self._keeper.listen(Stream(worker, pipe, Relay(self.channel, name, number=number)))
        process = processes.look(rank.pid)
        assert process is not None  # it is not reaped yet
        self.channel.send("started", worker=worker, pid=rank.pid, born=process.born, cpus=rank_plan.cpus)

    def _ended(self, rank: Rank, end: End) -> None:
        assert self._worker_server is not None
        self._worker_server.forget(end.rank)
        self._running.discard(end.rank)
        killed, code = end.by_launcher or end.rank in self._killed, end.code
        if (failure := rank.process.failure()) is not None:
            self._say(spawn.not_started(end.rank, self.program, failure))
            code = _NOT_EXECUTED.get(failure.errno or 0, 1)
        told = {"worker": end.rank, "code": code, "killed": killed, "started": failure is None}
        self.channel.send("end", end.report.data(), **told)

    def _passed(self, worker: int, message: dict[str, Any]) -> None:
        """Pass a worker's message on to the launcher; raise a `TalkError` if the worker or the message is unknown."""
        if worker not in self._running:
            raise TalkError(f"no worker {worker} runs here")
        try:
            self.channel.send("said", worker=worker, message=check(message))
        except WorkerMessageError as error:
            raise TalkError(str(error)) from None

    def _page(self, number: int) -> int:
        """Return the page of counters of a slot, which outlives workers."""
        if number not in self.pages:
            try:
                self.pages[number] = page.make()
            except OSError as error:
                raise LaunchError(f"there is no memory for counters: {linux.refusal('memfd_create', error)}") from error
        return self.pages[number]

    def _make_pages(self) -> None:
        """Do nothing: pages are made when slots are used."""

    def _allot(self) -> Allotment:
        """Allot CPUs to the slots that the host has now; workers in slots that it gets later may run on any CPU."""
        return allot(
            machine.facts(),
            max(1, self._slots),
            self.environment,
            binding=self.head["binding"],
            cpus_per_rank=self.head["cpus_per_rank"],
        )
