"""Watch the ranks of a job until all have ended and no process of theirs is left.

One thread waits in one selector for pidfds, pipes, signals and room in the channel to the launcher. After the first
failure, or a signal to end, the stages are::

    RUNNING --> ENDING (ranks end by themselves) --grace--> TERMINATING (SIGTERM) --grace--> KILLING (SIGKILL)
"""

from __future__ import annotations

import functools
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from ...exit_report.report import take_page
from ...host import processes, stacks
from ...host.patience import Patience
from ...host.signals import FLIGHT
from ...text import readable
from .guardian import Guardian
from .job_signals import ending_line, handle_signals
from .output import Stream
from .rank_end import RankEnd, describe_code
from .reader_loop import ReaderLoop
from .spawn import RankProcess
from .writer import LOOK

PIPE_DRAIN = 4 << 20
SWEEP_LOOK = 0.02
SWEEP_PATIENCE = 0.5
SWEEP_GRACE = 2.0
SWEEP_LIMIT = 10.0
UNKILLABLE = 10.0  # seconds after SIGKILL, after which a rank that has not ended is given up
TRACED = 5.0  # seconds for which a debugger may hold a rank that has ended


class EndingStage(IntEnum):
    """Stage in the ending of a job."""

    RUNNING = 0
    ENDING = 1
    TERMINATING = 2
    KILLING = 3


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job."""

    ends: list[RankEnd]  # ends of the ranks, in the order of ranks
    signum: int | None  # signal by which the user ended the job; None if a rank had failed before, or no signal came
    hurried: bool = False  # whether the ranks were killed at once, as by a second signal of the user

    @property
    def failed(self) -> bool:
        """True if a rank has failed."""
        return any(end.code != 0 for end in self.ends)


class Supervisor:
    """Supervisor of a job's ranks on this host.

    Its owner closes `loop`. While one of the loop's sinks is full, ranks are not read, and block when their pipes are
    full. The guardian learns of every process group. `wakeup` delivers the numbers of `SIGNALS`
    (`engine.host.signals`).
    """

    def __init__(
        self,
        loop: ReaderLoop,
        guardian: Guardian,
        wakeup: socket.socket,
        grace: float,
        say: Callable[[str], None],
        ended: Callable[[RankProcess, RankEnd], None] = lambda *_: None,
    ) -> None:
        self._loop = loop
        self._guardian = guardian
        self._wakeup = wakeup
        self._full = self._held_back = False
        self._grace = grace  # seconds between the stages of an ending
        self._say = say  # shows a line of the launcher's own
        self._tell_end = ended  # called with each rank that has ended, and its end, once all its output has been read
        loop.add_reader(wakeup.fileno(), self._handle_signals)
        loop.hold_by(self._hold_streams)
        self._alive: dict[int, RankProcess] = {}
        self._streams: dict[int, list[Stream]] = {}
        self._groups: set[int] = set()
        self._ends: list[RankEnd] = []
        self._stage = EndingStage.RUNNING
        self._patience: Patience | None = None
        self._signum: int | None = None
        self._why = ""
        self._hurry = False
        self._held = False
        self._asked: set[int] = set()
        self._traced: list[
            tuple[RankProcess, float, Patience]
        ] = []  # ended ranks that a debugger holds, and when they ended
        self._foreign = {process.pid for process in processes.list_processes() if process.parent == os.getpid()}

    def add(self, rank: RankProcess) -> None:
        """Watch a rank that has just been started."""
        self._guardian.watch_group(rank.pid)
        self._groups.add(rank.pid)
        self._alive[rank.number] = rank
        self._streams[rank.number] = []
        # Deaths come first, so that their order is recorded correctly.
        self._loop.add_reader(rank.pidfd, functools.partial(self._note_end, rank), urgent=True)

    def listen(self, stream: Stream) -> None:
        """Relay one more stream of a rank that is watched."""
        self._streams[stream.rank].append(stream)
        self._loop.add_reader(stream.pipe, functools.partial(self._read, stream))

    def hold_open(self) -> None:
        """Keep `run` from returning until `release` is called: ranks on other hosts may still run."""
        self._held = True

    def release(self) -> None:
        """Let `run` return as soon as the ranks have ended."""
        self._held = False

    def end(self, why: str) -> None:
        """Begin the ending, because a rank has failed, here or on another host; do nothing if it has begun.

        The reason `why` is shown with ranks that do not end by themselves.
        """
        if self._stage == EndingStage.RUNNING and self._signum is None:
            self._why = why
            self._enter(EndingStage.ENDING)

    def kill(self) -> None:
        """Kill all ranks and their process groups now."""
        self._hurry = True
        self._enter(EndingStage.KILLING)

    def run(self) -> Outcome:
        """Serve the ranks until all have ended and no process of theirs is left."""
        while (seconds := self.advance_stages()) is not None:
            self._loop.step(seconds)
        return self.finish()

    def advance_stages(self) -> float | None:
        """Do what is due; return the seconds until more may be, or None once all ranks have ended.

        The caller handles events of the loop between two calls.
        """
        if self._patience is not None and not self._patience.seconds_left():
            self._enter_next_stage()
        self._look_at_traced()
        if not (self._alive or self._held):
            return None
        seconds = math.inf if self._patience is None else self._patience.wait()
        return min(seconds, LOOK) if self._traced else seconds

    def finish(self) -> Outcome:
        """End what ranks that have ended have left, and show their last output."""
        self._end_leftovers()
        for streams in self._streams.values():
            for stream in streams:
                stream.drain(PIPE_DRAIN)
                self._close(stream)
        return Outcome(sorted(self._ends, key=lambda end: end.rank), self._signum, self._hurry)

    def hold_back(self, held: bool) -> None:
        """Pause reading the ranks' output, or resume it."""
        self._held_back = held

    def _hold_streams(self, full: bool) -> None:
        """Register the streams for reading only while all sinks have room."""
        held = full or self._held_back
        if held or held != self._full:
            self._full = held
            for stream in (stream for streams in self._streams.values() for stream in streams if stream.pipe >= 0):
                if held:
                    self._loop.remove_reader(stream.pipe)
                elif not self._loop.has_reader(stream.pipe):
                    self._loop.add_reader(stream.pipe, functools.partial(self._read, stream))

    def _note_end(self, rank: RankProcess) -> None:
        """Reap a rank that has ended, unless a debugger traces it, which must see its end first."""
        self._loop.remove_reader(rank.pidfd)
        os.close(rank.pidfd)
        now = self._loop.woken_at
        if (code := rank.process.poll()) is None:
            self._traced.append((rank, now, Patience(TRACED)))
        else:
            self._record_end(rank, code, now)

    def _look_at_traced(self) -> None:
        """Reap ended ranks that their debuggers have released; treat others as reaped after `TRACED` seconds."""
        for entry in list(self._traced):
            rank, ended, patience = entry
            code = rank.process.poll()
            if code is None and not patience.seconds_left():
                code = rank.process.returncode = processes.exit_code(rank.pid)
                self._say(
                    f"rank {rank.number} (pid {rank.pid}) has ended ({describe_code(code)}), and a debugger holds it "
                    f"({processes.name_tracer(rank.pid)}): it is not waited for"
                )
            if code is not None:
                self._traced.remove(entry)
                self._record_end(rank, code, ended)

    def _record_end(self, rank: RankProcess, code: int, now: float) -> None:
        """Record the end of a reaped rank, show its last output, and begin the ending of the job if it failed."""
        del self._alive[rank.number]
        by_launcher = self._stage >= EndingStage.TERMINATING or self._signum is not None
        end = RankEnd(rank.number, code, now, by_launcher, report=take_page(rank.page))
        self._ends.append(end)
        self._forget_empty()
        for stream in self._streams[rank.number]:
            self._read(stream, functools.partial(stream.drain, PIPE_DRAIN))
        self._tell_end(rank, end)
        if code != 0:
            self._handle_failure(rank, end)

    def _handle_failure(self, rank: RankProcess, end: RankEnd) -> None:
        """End all ranks after the failure of one, and ask a rank that it blames for a stall where it stands."""
        self.end(f"after the first rank failed (rank {rank.number}, {describe_code(end.code)})")
        if self._stage == EndingStage.ENDING and (stalled := end.report.stalled_rank) is not None:
            self.ask_where(stalled)

    def ask_where(self, number: int) -> None:
        """Ask a rank that others blame for a stall, once, to write its stacks; it has the grace period for that.

        Does nothing if the rank has ended, or is not on this host.
        """
        blamed = self._alive.get(number)
        if blamed is not None and number not in self._asked:
            self._asked.add(number)
            for pid in self._find_handlers(blamed, stacks.SIGNAL):
                processes.send(pid, stacks.SIGNAL)

    def _read(self, stream: Stream, read: Callable[[], object] | None = None) -> None:
        """Read from a stream, and unregister it if that closes it; it may have been closed by an earlier event."""
        if (pipe := stream.pipe) >= 0:
            (read or stream.read)()
            if stream.pipe < 0:
                self._loop.remove_reader(pipe)

    def _close(self, stream: Stream) -> None:
        """Close a stream, although another process may still hold its pipe."""
        if stream.pipe >= 0:
            self._loop.remove_reader(stream.pipe)
            stream.close()

    def _handle_signals(self) -> None:
        """Handle the signals that have come to this process."""
        if signal.SIGCHLD in handle_signals(self._wakeup, self):
            self._reap_orphans()

    def end_by(self, signum: int) -> None:
        """Handle a signal to end this process as one to end the job."""
        self.end_job_by(signum)

    def end_job_by(self, signum: int) -> None:
        """Forward a signal to end to the ranks; if it is the second one, or a rank has failed before, kill them."""
        if self._stage == EndingStage.RUNNING and self._signum is None:
            self._signum = signum
            self._why = f"after {processes.signal_name(signum)}"
            self._say(ending_line(signum, self._grace))
            for group in self._groups:
                processes.send_group(group, signum)
            self._patience = Patience(self._grace)
        else:
            self.kill()

    def pass_on(self, signum: int) -> None:
        """Forward a signal to each rank, or its child processes, that have a handler; it would kill others."""
        # SIGUSR1 also asks for flight records, for which a rank's engine handles another signal.
        signums = (signum, FLIGHT) if signum == signal.SIGUSR1 else (signum,)
        deaf = [
            rank.number
            for rank in self._alive.values()
            if not any([processes.send(pid, each) for each in signums for pid in self._find_handlers(rank, each)])
        ]
        if deaf:
            name = processes.signal_name(signum)
            self._say(f"{name}: not passed on to {readable.format_ranks(deaf)}, which would die of it")

    def _find_handlers(self, rank: RankProcess, signum: int) -> list[int]:
        """Return the pids that handle a signal: the rank's, or, as below a shell, those of its topmost handlers."""
        if processes.catches_signal(rank.pid, signum):
            return [rank.pid]
        members = {process.pid: process for process in processes.list_processes() if process.group == rank.pid}
        catching = {pid for pid in members if processes.catches_signal(pid, signum)}
        return [pid for pid in catching if members[pid].parent not in catching]

    def _enter_next_stage(self) -> None:
        """Enter the next stage, because the grace period is over."""
        if self._stage == EndingStage.KILLING:
            self._leave_unkillable()
        else:
            self._enter(EndingStage.KILLING if self._signum is not None else EndingStage(self._stage + 1))

    def _leave_unkillable(self) -> None:
        """Give up ranks that SIGKILL does not end."""
        self._patience = None
        traced = [rank for rank, _, _ in self._traced]
        for rank in [rank for rank in self._alive.values() if rank not in traced]:
            self._say(
                f"rank {rank.number} (pid {rank.pid}) cannot be killed: it waits in the kernel, as for a file system "
                "that stands still; it ends when that goes on, and is not waited for"
            )
            self._loop.remove_reader(rank.pidfd)
            os.close(rank.pidfd)
            self._record_end(rank, -signal.SIGKILL, time.time())

    def _enter(self, stage: EndingStage) -> None:
        """Enter a stage of the ending and send its signal; do nothing if the stage has been reached."""
        if stage <= self._stage:
            return
        self._stage = stage
        self._patience = Patience(UNKILLABLE if stage == EndingStage.KILLING else self._grace)
        if stage == EndingStage.ENDING or not self._groups:
            return
        if self._alive and not self._hurry:
            action = "SIGTERM" if stage == EndingStage.TERMINATING else "SIGKILL"
            self._say(f"{readable.format_ranks(self._alive)} did not end within the grace period {self._why}: {action}")
        found = [processes.read_process(rank.pid) for rank in self._alive.values()]
        stopped = {process.pid for process in found if process is not None and process.state == "T"}
        for group in self._groups:
            kill = stage == EndingStage.KILLING or group in stopped  # a stopped process acts on no other signal
            processes.send_group(group, signal.SIGKILL if kill else signal.SIGTERM)

    def _reap_orphans(self) -> None:
        """Reap orphans of ranks, which this process inherits, so that zombies do not pile up in a long job."""
        ranks = {rank.pid for rank in self._alive.values()}
        for process in processes.list_processes():
            if (
                process.parent == os.getpid()
                and process.state == "Z"
                and process.pid not in ranks
                and process.pid not in self._foreign
            ):
                os.waitpid(process.pid, os.WNOHANG)
        self._forget_empty()

    def _forget_empty(self) -> None:
        """Forget empty process groups of ended ranks, whose numbers the system may reuse."""
        for group in self._groups - {rank.pid for rank in self._alive.values()}:
            if not processes.send_group(group, 0):
                self._groups.discard(group)
                self._guardian.forget_group(group)

    def _end_leftovers(self) -> None:
        """End the processes that ranks have left, whatever their group or session: all descend from this process."""
        began = time.monotonic()
        told: set[int] = set()
        while left := self._left_behind():
            spent = time.monotonic() - began
            kill = self._hurry or spent > SWEEP_PATIENCE + SWEEP_GRACE
            for process in left:
                if kill:
                    processes.send(process.pid, signal.SIGKILL)
                elif spent > SWEEP_PATIENCE and process.pid not in told:
                    processes.send(process.pid, signal.SIGTERM)
            if spent > SWEEP_PATIENCE and (new := [process for process in left if process.pid not in told]):
                self._say("ending what the ranks left behind: " + ", ".join(f"{p.name} ({p.pid})" for p in new[:10]))
                told |= {process.pid for process in new}
            if spent > SWEEP_LIMIT:
                self._say("gave up on " + ", ".join(f"{process.name} ({process.pid})" for process in left[:10]))
                return
            self._loop.step(SWEEP_LOOK)

    def _left_behind(self) -> list[processes.Process]:
        """Return the running processes that ranks have left."""
        found = processes.list_descendants(os.getpid(), self._foreign)
        return [process for process in found if process.state != "Z"]
