"""Watch the ranks of a job until all have ended and nothing of them is left.

One thread, one selector: pidfds, pipes, signals, and the channel to the launcher when that is slow. After the first
failure, or a signal to end, the stages are::

    RUNNING --> ENDING (ranks end by themselves) --grace--> TERMINATING (SIGTERM) --grace--> KILLING (SIGKILL)
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from .. import readable
from ..exit_report.report import take_page
from ..host import processes, stacks
from ..host.patience import Patience
from ..host.signals import FLIGHT, read_signals
from .guardian import Guardian
from .outgoing import Outgoing
from .output import Stream
from .spawn import Rank
from .verdict import End, describe
from .writer import LOOK, Writer

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (*ENDING_SIGNALS, *PASSED_SIGNALS, signal.SIGCHLD)
PIPE_DRAIN = 4 << 20
SWEEP_LOOK = 0.02
SWEEP_PATIENCE = 0.5
SWEEP_GRACE = 2.0
SWEEP_LIMIT = 10.0
UNKILLABLE = 10.0  # seconds after SIGKILL from which on a rank that has not ended is not waited for
TRACED = 5.0  # seconds that a debugger may hold a rank that has ended


class Stage(IntEnum):
    """How far the ending of a job has come."""

    RUNNING = 0
    ENDING = 1
    TERMINATING = 2
    KILLING = 3


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes
    ----------
    ends : list of End
        By rank.
    signum : int or None
        The signal that the user ended it with; None if a rank had failed before, or none came.
    hurried : bool
        Whether the user would not wait for its end.
    """

    ends: list[End]
    signum: int | None
    hurried: bool = False

    @property
    def failed(self) -> bool:
        """Whether a rank has."""
        return any(end.code != 0 for end in self.ends)


class Supervisor:
    """Runs a job's ranks to their end.

    Parameters
    ----------
    guardian : Guardian
        Told of every process group.
    wakeup : socket.socket
        Gives the numbers of `SIGNALS` that come (`engine.host.signals`).
    sinks : iterable of Outgoing or Writer
        Where the output goes. While one of them is full, ranks are not read: who writes more than a pipe holds waits.
    grace : float
        Seconds between the stages of an ending.
    say : callable
        Shows a line of the launcher's own.
    ended : callable, optional
        Told of each end, once all that the rank wrote has been taken.
    """

    def __init__(
        self,
        guardian: Guardian,
        wakeup: socket.socket,
        sinks: Iterable[Outgoing | Writer],
        grace: float,
        say: Callable[[str], None],
        ended: Callable[[Rank, End], None] = lambda *_: None,
    ) -> None:
        self._guardian = guardian
        self._wakeup = wakeup
        self._sinks = list(sinks)
        self._full = self._held_back = False
        self._grace = grace
        self._say = say
        self._tell_end = ended
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ)
        self._alive: dict[int, Rank] = {}
        self._streams: dict[int, list[Stream]] = {}
        self._groups: set[int] = set()
        self._ends: list[End] = []
        self._stage = Stage.RUNNING
        self._patience: Patience | None = None
        self._signum: int | None = None
        self._why = ""
        self._hurry = False
        self._held = False
        self._asked: set[int] = set()
        self._traced: list[tuple[Rank, float, Patience]] = []  # have ended, and when; a debugger holds them
        self._foreign = {process.pid for process in processes.processes() if process.parent == os.getpid()}

    def add(self, rank: Rank) -> None:
        """Watch one more rank.

        Parameters
        ----------
        rank : Rank
            Just started.
        """
        self._guardian.watch(rank.pid)
        self._groups.add(rank.pid)
        self._alive[rank.number] = rank
        self._streams[rank.number] = []
        self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)

    def listen(self, stream: Stream) -> None:
        """Relay one more stream.

        Parameters
        ----------
        stream : Stream
            Of a rank that is watched.
        """
        self._streams[stream.rank].append(stream)
        self._selector.register(stream.pipe, selectors.EVENT_READ, stream)

    def hear(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call back whenever a descriptor can be read.

        Parameters
        ----------
        descriptor : int
        act : callable
            Reads it, and does not block.
        """
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def forget(self, descriptor: int) -> None:
        """Hear no more of a descriptor, which is about to be closed.

        Parameters
        ----------
        descriptor : int
        """
        self._selector.unregister(descriptor)

    def hold(self) -> None:
        """Stay after the last rank has ended, until `release`: ranks on other hosts may still run."""
        self._held = True

    def release(self) -> None:
        """End as soon as the ranks have."""
        self._held = False

    def end(self, why: str) -> None:
        """Begin the ending: a rank has failed, here or on another host. Does nothing once it has begun.

        Parameters
        ----------
        why : str
            What the user is told of ranks that do not end by themselves.
        """
        if self._stage == Stage.RUNNING and self._signum is None:
            self._why = why
            self._enter(Stage.ENDING)

    def kill(self) -> None:
        """Kill all ranks now, and what they have started."""
        self._hurry = True
        self._enter(Stage.KILLING)

    def run(self) -> Outcome:
        """Return when every rank has ended and nothing of them is left.

        Returns
        -------
        Outcome
        """
        while self._alive or self._held:
            self._step(None if self._patience is None else self._patience.wait())
            if self._patience is not None and not self._patience.left():
                self._escalate()
        self._sweep()
        for streams in self._streams.values():
            for stream in streams:
                stream.drain(PIPE_DRAIN)
                self._close(stream)
        self._selector.close()
        return Outcome(sorted(self._ends, key=lambda end: end.rank), self._signum, self._hurry)

    def abandon(self) -> None:
        """Kill all ranks: the job could not be started whole."""
        self.kill()
        self.run()

    def _step(self, timeout: float | None) -> None:
        """Serve what is ready: deaths before signals before output, so that the order of deaths stays true."""
        self._await_room()
        if self._hold_streams():
            timeout = LOOK if timeout is None else min(timeout, LOOK)
        if self._traced:
            self._look_at_traced()
            timeout = LOOK if timeout is None else min(timeout, LOOK)
        ready = [key for key, _ in self._selector.select(timeout)]
        now = time.time()
        for key in ready:
            if isinstance(key.data, Rank):
                self._ended(key.data, now)
        for key in ready:
            if key.fileobj is self._wakeup:
                self._signals()
            elif isinstance(key.data, Outgoing):
                key.data.pump()
            elif isinstance(key.data, Stream) and key.data.pipe >= 0:
                pipe = key.data.pipe
                key.data.read()
                if key.data.pipe < 0:
                    self._unlisten(pipe)
            elif callable(key.data):
                key.data()

    def hold_back(self, held: bool) -> None:
        """Read no more of what ranks write, or go on."""
        self._held_back = held

    def _await_room(self) -> None:
        """Have the selector look at channels that are behind, and at no others."""
        registered = self._selector.get_map()
        for out in self._sinks:
            if not isinstance(out, Outgoing):
                continue
            if out.waiting and out.descriptor not in registered:
                self._selector.register(out.descriptor, selectors.EVENT_WRITE, out)
            elif not out.waiting and out.descriptor in registered:
                self._selector.unregister(out.descriptor)

    def _hold_streams(self) -> bool:
        """Listen to streams as long as there is room for what they bring; whether to look for room soon."""
        full = bool([sink for sink in self._sinks if sink.full()])  # all of them are looked at
        held = full or self._held_back
        if held or held != self._full:
            self._full = held
            registered = self._selector.get_map()
            for stream in (stream for streams in self._streams.values() for stream in streams if stream.pipe >= 0):
                if held and stream.pipe in registered:
                    self._selector.unregister(stream.pipe)
                elif not held and stream.pipe not in registered:
                    self._selector.register(stream.pipe, selectors.EVENT_READ, stream)
        return full

    def _ended(self, rank: Rank, now: float) -> None:
        """Reap a rank that has ended, if nobody traces it: a debugger is told of its end first, and may do nothing."""
        self._selector.unregister(rank.pidfd)
        os.close(rank.pidfd)
        if (code := rank.process.poll()) is None:
            self._traced.append((rank, now, Patience(TRACED)))
        else:
            self._reaped(rank, code, now)

    def _look_at_traced(self) -> None:
        """See whether those that trace ended ranks let go of them; what they hold for long has ended all the same."""
        for entry in list(self._traced):
            rank, ended, patience = entry
            code = rank.process.poll()
            if code is None and not patience.left():
                code = rank.process.returncode = processes.exit_code(rank.pid)
                self._say(
                    f"rank {rank.number} (pid {rank.pid}) has ended ({describe(code)}), and a debugger holds it "
                    f"({processes.tracer(rank.pid)}): it is not waited for"
                )
            if code is not None:
                self._traced.remove(entry)
                self._reaped(rank, code, ended)

    def _reaped(self, rank: Rank, code: int, now: float) -> None:
        """Show the last that a rank wrote which has ended, and begin the ending of the job if it failed."""
        del self._alive[rank.number]
        by_launcher = self._stage >= Stage.TERMINATING or self._signum is not None
        end = End(rank.number, code, now, by_launcher, report=take_page(rank.page))
        self._ends.append(end)
        self._forget_empty()
        for stream in self._streams[rank.number]:
            if stream.pipe >= 0:
                pipe = stream.pipe
                stream.drain(PIPE_DRAIN)
                if stream.pipe < 0:
                    self._unlisten(pipe)
        self._tell_end(rank, end)
        if code != 0:
            self._failed(rank, end)

    def _failed(self, rank: Rank, end: End) -> None:
        """What follows from the failure of one: the end of all."""
        self.end(f"after the first rank failed (rank {rank.number}, {describe(end.code)})")
        if self._stage == Stage.ENDING and (stalled := end.report.stalled_rank) is not None:
            self.ask_where(stalled)

    def ask_where(self, number: int) -> None:
        """Have a rank that others blame for standing still write where, once; it has the grace for that.

        Does nothing if the rank has ended, or is not of this host.

        Parameters
        ----------
        number : int
        """
        blamed = self._alive.get(number)
        if blamed is not None and number not in self._asked:
            self._asked.add(number)
            for pid in self._handling(blamed, stacks.SIGNAL):
                processes.send(pid, stacks.SIGNAL)

    def _close(self, stream: Stream) -> None:
        """Stop listening to a stream whose pipe something may still hold."""
        if stream.pipe >= 0:
            self._unlisten(stream.pipe)
            stream.close()

    def _unlisten(self, pipe: int) -> None:
        """Stop listening to a pipe, which may be held back."""
        if pipe in self._selector.get_map():
            self._selector.unregister(pipe)

    def _signals(self) -> None:
        """Act on the signals that have come."""
        for signum in read_signals(self._wakeup):
            if signum == signal.SIGCHLD:
                self._reap_orphans()
            elif signum in PASSED_SIGNALS:
                self._pass_on(signum)
            elif signum in ENDING_SIGNALS:
                self._end_by(signum)

    def _end_by(self, signum: int) -> None:
        """Forward a signal to end; at the second one, or during a failure's ending, kill."""
        if self._stage == Stage.RUNNING and self._signum is None:
            self._signum = signum
            self._why = f"after {processes.signal_name(signum)}"
            name = processes.signal_name(signum)
            self._say(f"{name}: passed on to the ranks, which have {self._grace:g} s to end; once more kills them now")
            for group in self._groups:
                processes.send_group(group, signum)
            self._patience = Patience(self._grace)
        else:
            self._hurry = True
            self._enter(Stage.KILLING)

    def _pass_on(self, signum: int) -> None:
        """Forward a signal to each rank that handles it, or to what it runs; it would kill one that does not."""
        # SIGUSR1 asks for flight records, too, for which a rank's engine listens to another signal.
        signums = (signum, FLIGHT) if signum == signal.SIGUSR1 else (signum,)
        deaf = [
            rank.number
            for rank in self._alive.values()
            if not any([processes.send(pid, each) for each in signums for pid in self._handling(rank, each)])
        ]
        if deaf:
            name = processes.signal_name(signum)
            self._say(f"{name}: not passed on to {readable.ranks(deaf)}, which would die of it")

    def _handling(self, rank: Rank, signum: int) -> list[int]:
        """Find what handles a signal: the rank, or below a shell the processes that do and whose parents do not."""
        if processes.catches(rank.pid, signum):
            return [rank.pid]
        members = {process.pid: process for process in processes.processes() if process.group == rank.pid}
        catching = {pid for pid in members if processes.catches(pid, signum)}
        return [pid for pid in catching if members[pid].parent not in catching]

    def _escalate(self) -> None:
        """Go on to the next stage: the grace is over."""
        if self._stage == Stage.KILLING:
            self._leave_unkillable()
        else:
            self._enter(Stage.KILLING if self._signum is not None else Stage(self._stage + 1))

    def _leave_unkillable(self) -> None:
        """Wait no longer for ranks that SIGKILL does not end."""
        self._patience = None
        traced = [rank for rank, _, _ in self._traced]
        for rank in [rank for rank in self._alive.values() if rank not in traced]:
            self._say(
                f"rank {rank.number} (pid {rank.pid}) cannot be killed: it waits in the kernel, as for a file system "
                "that stands still; it ends when that goes on, and is not waited for"
            )
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)
            self._reaped(rank, -signal.SIGKILL, time.time())

    def _enter(self, stage: Stage) -> None:
        """Begin a stage of the ending."""
        if stage <= self._stage:
            return
        self._stage = stage
        self._patience = Patience(UNKILLABLE if stage == Stage.KILLING else self._grace)
        if stage == Stage.ENDING or not self._groups:
            return
        if self._alive and not self._hurry:
            action = "SIGTERM" if stage == Stage.TERMINATING else "SIGKILL"
            self._say(f"{readable.ranks(self._alive)} did not end within the grace period {self._why}: {action}")
        stopped = {rank.pid for rank in self._alive.values() if _is_stopped(rank.pid)}
        for group in self._groups:
            kill = stage == Stage.KILLING or group in stopped  # a stopped process acts on no other signal
            processes.send_group(group, signal.SIGKILL if kill else signal.SIGTERM)

    def _reap_orphans(self) -> None:
        """Reap what ranks left behind and the launcher inherited, so that it does not pile up in a long job."""
        ranks = {rank.pid for rank in self._alive.values()}
        for process in processes.processes():
            if (
                process.parent == os.getpid()
                and process.state == "Z"
                and process.pid not in ranks
                and process.pid not in self._foreign
            ):
                os.waitpid(process.pid, os.WNOHANG)
        self._forget_empty()

    def _forget_empty(self) -> None:
        """Forget groups of ended ranks of which nothing is left: their numbers may come to mean others."""
        for group in self._groups - {rank.pid for rank in self._alive.values()}:
            if not processes.send_group(group, 0):
                self._groups.discard(group)
                self._guardian.forget(group)

    def _sweep(self) -> None:
        """End what the ranks left behind, wherever it has moved: all of it descends from the launcher."""
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
            self._step(SWEEP_LOOK)

    def _left_behind(self) -> list[processes.Process]:
        """List what is left of the ranks."""
        found = processes.descendants(os.getpid(), self._foreign)
        return [process for process in found if process.state != "Z"]


def _is_stopped(pid: int) -> bool:
    process = processes.look(pid)
    return process is not None and process.state == "T"
