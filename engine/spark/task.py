"""Task of a Spark job with one rank: starts the rank as a child process, watches it, and reports how it ended.

Spark kills the Python process of a task without notice: when another task fails, when the job is cancelled, or when the
executor goes. So the rank dies with that process (PR_SET_PDEATHSIG). A guardian, which outlives both for a moment, ends
whatever the rank has started. The rank has a process of its own, since Spark reuses its Python processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors.formatting import format_whole_exception
from ..host import network, private_files, processes
from ..host.patience import Patience
from ..host.signals import catch_signals
from ..launch.errors import LaunchError
from ..launch.hosts import remote_files
from ..launch.hosts.channel import Channel, ChannelError
from ..launch.hosts.reach import network_of
from ..launch.process import leftovers, spawn
from ..launch.process.cpu_binding import Allotment
from ..launch.process.guardian import NOWHERE, Guardian
from ..launch.process.job_signals import SIGNALS
from ..launch.process.output import Stream, Tail
from ..launch.process.plan import Job, RankPlan, plan, without_places
from ..launch.process.rank_end import RankEnd, describe_code
from ..launch.process.reader_loop import ReaderLoop
from ..launch.process.spawn import RankProcess
from ..launch.process.supervisor import Supervisor
from ..launch.report.failure_cause import claim_of
from ..runner.function import rank_command
from .rank_assignment import RankAssignment, TaskInfo, assign_ranks
from .record import STDERR, RankRecord
from .task_channel import reach_driver

if TYPE_CHECKING:
    import pyarrow as pa

CONSEQUENCE = 5.0  # seconds that a task waits if another rank caused its failure, so that the other task fails first
FAREWELL = 10.0  # seconds that the driver has to read the last output of a rank
FIRST, LAST = "[[rank", "rank]]"  # delimiters of a task's text in an exception, which Spark wraps in others


class RankFailedError(RuntimeError):
    """A rank has failed, and only this exception can tell the driver."""


@dataclass(frozen=True)
class JobSpec:
    """Instructions for every task of a job."""

    size: int  # number of ranks
    name: str  # unique name of the job
    secret: str = field(repr=False)
    addresses: tuple[tuple[str, int], ...]  # addresses on which the driver listens
    call: bytes = field(repr=False)  # pickled function with its arguments
    settings: Mapping[str, str] = field(repr=False)  # variables of the ranks, over the executor's own
    executable: str = ""  # Python interpreter of the ranks; empty: the executor's
    horovod: bool = False  # whether the ranks run scripts written for Horovod
    grace: float = 5.0  # seconds between the stages of ending a rank


def serve(spec: JobSpec, batches: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """Run this task's rank; Spark calls this function in a barrier stage.

    The content of `batches`, the task's part of the range of tasks, is ignored. Yields the record of the rank's end, in
    the schema of `record`.
    """
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    task = context.partitionId()
    channel = reach_driver(spec.addresses, spec.secret, task)
    address = context.getTaskInfos()[task].address.rpartition(":")[0].strip("[]")
    chosen = None
    if interfaces := spec.settings.get("ENGINE_INTERFACE"):
        with contextlib.suppress(LaunchError):  # irrelevant on one host; on several, `TaskSupervisor` raises it
            address = chosen = network_of(interfaces)[1]
    with network.listen(chosen, 0, backlog=256) as hub:
        info = TaskInfo.of_this_process(address, hub.getsockname()[1])
        infos = [TaskInfo.read(text) for text in context.allGather(info.to_json())]
        place = assign_ranks(infos)[task]
        try:
            record = TaskSupervisor(spec, place, info.name, channel).run(hub)
        except Exception as error:
            why = error if isinstance(error, LaunchError) else format_whole_exception(error)
            raise RankFailedError(f"{FIRST}rank {place.rank} on {info.name} cannot be run: {why}{LAST}") from error
    if channel is None and record.end.failed:
        _let_culprit_fail_first(record)
        raise RankFailedError(f"{FIRST}{_describe_failure(record)}{LAST}")
    for name, data in record.to_rows():
        yield pa.RecordBatch.from_pydict({"name": [name], "data": pa.array([data], pa.binary())})


def _let_culprit_fail_first(record: RankRecord) -> None:
    """Wait, if another rank is to blame, so that its task fails first: then Spark ends this one."""
    claim = claim_of(record.end)
    if claim is not None and claim.culprit is not None:
        time.sleep(CONSEQUENCE)


def _describe_failure(record: RankRecord) -> str:
    """Describe the failure of a rank whose task cannot reach the driver."""
    said = record.files.get(leftovers.ERROR) or record.files.get(STDERR, b"")
    how = describe_code(record.end.code)
    return f"rank {record.rank} on {record.host} failed ({how}):\n{said.decode(errors='replace')}"


class TaskSupervisor:
    """Supervision of one rank, from its start to its end."""

    def __init__(self, spec: JobSpec, place: RankAssignment, host: str, channel: Channel | None) -> None:
        self.spec = spec
        self.place = place
        self.host = host  # name of this host
        self.channel = channel  # channel to the driver; None: the driver cannot be reached
        self.home = Path(tempfile.mkdtemp(prefix=leftovers.PREFIX))
        self._lock = leftovers.lock(self.home)
        self._ends: list[RankEnd] = []
        self._stderr = Tail()
        self._dismissed = False

    def run(self, hub: socket.socket) -> RankRecord:
        """Start the rank, and return its record once none of its processes is left, whatever happens.

        `hub` listens for the other hosts, if this is the task of rank 0.
        """
        try:
            own = self.home / f"rank.{self.place.rank}"
            private_files.make_directory(own)
            rank_plan = self._plan()
            if self.channel is not None:
                self.channel.send("hello", rank=self.place.rank, host=self.host)
            guardian = Guardian(self.spec.name, self._kill_processes, NOWHERE)
            processes.call_prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
            try:
                with (
                    catch_signals(SIGNALS, lambda *_: None) as wakeup,
                    contextlib.closing(ReaderLoop(() if self.channel is None else (self.channel.out,))) as self._loop,
                ):
                    supervisor = Supervisor(
                        self._loop, guardian, wakeup, self.spec.grace, self._send_line, self._record_end
                    )
                    self._supervise_rank(supervisor, rank_plan, hub)
            finally:
                guardian.stop()
                processes.call_prctl(processes.PR_SET_CHILD_SUBREAPER, 0)
            record = RankRecord.from_directory(self.host, self._ends[0], own, bytes(self._stderr))
            self._tell(record)
            return record
        finally:
            shutil.rmtree(self.home, ignore_errors=True)
            os.close(self._lock)
            if self.channel is not None:
                self.channel.close()

    def _plan(self) -> RankPlan:
        """Plan this rank, and write the call that it will make."""
        spec, place = self.spec, self.place
        settings = dict(spec.settings)
        interfaces = settings.pop("ENGINE_INTERFACE", "")
        if interfaces and place.hub:
            settings["ENGINE_INTERFACE"] = network_of(interfaces)[0]
        call = pickle.dumps((sys.path, sys.executable, spec.call))
        private_files.write(self.home / remote_files.ENCLOSED, call)
        job = Job(
            size=spec.size,
            name=spec.name,
            secret=spec.secret,
            port=place.port,
            directory=self.home,
            settings=settings,
            horovod=spec.horovod,
            address=place.address,
            hub=place.hub,
        )
        # Spark has set the number of threads of a task; whoever started the executor has assigned its CPUs.
        plans = plan(job, Allotment(None, None, ""), without_places(os.environ), place.crew)
        self._command = rank_command(call, spec.executable)
        return next(each for each in plans if each.rank == place.rank)

    def _supervise_rank(self, supervisor: Supervisor, rank_plan: RankPlan, hub: socket.socket) -> None:
        channel = self.channel
        if channel is not None:
            self._loop.add_reader(channel.reading, lambda: self._handle_driver(supervisor, channel))
        inherited: list[int] = []
        if self.place.hub and self.place.rank == 0:
            inherited.append(hub.fileno())
            rank_plan.environment["ENGINE_HUB_FD"] = str(hub.fileno())
        program = spawn.find_command(self._command, rank_plan.environment)
        rank = spawn.start(rank_plan, self._command, program, spawn.raise_descriptor_limit(1), inherited)
        hub.close()
        supervisor.add(rank)
        for name, pipe in (("stdout", rank.stdout), (STDERR, rank.stderr)):
            supervisor.listen(Stream(rank.number, pipe, functools.partial(self.forward_output, name)))
        self._dismissed = supervisor.run().signum is not None

    def _handle_driver(self, supervisor: Supervisor, channel: Channel) -> None:
        """End the rank when the driver orders it, and kill it when the driver is gone."""
        descriptor = channel.reading
        try:
            for message in channel.receive():
                if message.kind == "end":
                    supervisor.end(str(message.head.get("why")))
        except ChannelError:
            channel.close()
        if channel.ended:
            self._loop.remove_reader(descriptor)
            channel.out.give_up()
            supervisor.kill()

    def forward_output(self, name: str, data: bytes) -> None:
        """Forward output of the rank to the driver, or to the executor's log if the driver cannot be reached."""
        if name == STDERR:
            self._stderr.add(data)
        if self.channel is not None:
            self.channel.send("output", data, stream=name)
        else:
            sys.stderr.buffer.write(data)
            sys.stderr.flush()

    def _send_line(self, line: str) -> None:
        if self.channel is not None:
            self.channel.send("say", line=line)

    def _record_end(self, rank: RankProcess, end: RankEnd) -> None:
        self._ends.append(end)

    def _tell(self, record: RankRecord) -> None:
        """Report the end to the driver at once: it has other tasks to end, and Spark may kill this one first."""
        channel = self.channel
        if channel is None or channel.ended or self._dismissed:
            return  # Spark is ending this process, as if its executor had gone: the driver counts the rank as lost
        channel.send("end", record.join_explanations(), **record.to_head())
        patience, poll = Patience(FAREWELL), select.poll()
        poll.register(channel.out.descriptor, select.POLLOUT)
        while channel.out.waiting and not channel.out.broken and patience.seconds_left():
            poll.poll(1000 * patience.wait())
            channel.out.write_available()

    def _kill_processes(self) -> None:
        """Kill all processes that the rank has started. It runs in the guardian, after this process was killed."""
        rank = str(self.place.rank)
        for process in processes.list_processes():
            ours = processes.job_of(process.pid) == self.spec.name and process.pid != os.getpid()
            if ours and processes.variable_of(process.pid, "ENGINE_RANK") == rank:
                processes.send(process.pid, signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)
