"""A process that outlives the launcher for a moment, and ends what is left when the launcher was killed.

A rank dies with the launcher by PR_SET_PDEATHSIG, but what the rank started does not: a shell's child, a data loader's
worker. The guardian is a fork of the launcher that sleeps on a pipe. It is told which process groups exist; when the
pipe ends without a farewell, it kills those groups and every process that was started with the job's `ENGINE_JOB`.

In an elastic job it also holds the lease of an agent on another host than the launcher's: one that has heard nothing of
the launcher for so long, or is stopped, is killed with all its workers, since the launcher may have given them up and
let others go on without them. A lease ends at a time of CLOCK_BOOTTIME, which goes on while a host is suspended. When a
host wakes up after the end, its workers are stopped at once, and killed if the launcher does not renew the lease then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection

from ..host import processes
from ..host.patience import Patience

SWEEP_LIMIT = 5.0
DISMISSAL = 2.0  # seconds that it has to end, once it is dismissed, or to read what it is told
LOOK = 0.001  # seconds between two looks for that


class Guardian:
    """The launcher's end of the pipe. Start it before the ranks, from a process with one thread.

    Parameters
    ----------
    job : str
        The value of `ENGINE_JOB`.
    discard : callable
        Called as well when the launcher was killed: removes files that would announce the job as running.
    host : str, optional
        The value of `ENGINE_CROSS_RANK`, of an agent that starts the ranks of one host: processes of other hosts, which
        may share this machine, are left alone.
    lease : float, optional
        Seconds from now to the end of the lease, unless it is renewed, when everything ends, this process too; none:
        there is no lease.
    """

    def __init__(
        self, job: str, discard: Callable[[], None], host: str | None = None, lease: float | None = None
    ) -> None:
        launcher = os.getpid()
        reading, self._pipe = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._pipe)
                _guard(reading, job, discard, host, launcher, lease)
            finally:
                os._exit(0)
        os.close(reading)

    def watch(self, group: int) -> None:
        """Tell it of a process group.

        Parameters
        ----------
        group : int
        """
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Tell it that a process group is empty, and that its number may come to mean another.

        Parameters
        ----------
        group : int
        """
        self._tell(f"-{group}\n")

    def renew(self, until: float) -> None:
        """Tell it when the lease ends now.

        Parameters
        ----------
        until : float
            By `boot_time`.
        """
        self._tell(f"={until:.3f}\n")

    def dismiss(self) -> None:
        """Let it go: nothing is left to guard."""
        self._tell(".\n")
        os.close(self._pipe)
        if not self._ended(DISMISSAL):  # somebody has stopped it
            processes.send(self.pid, signal.SIGKILL)
            self._ended(DISMISSAL)

    def _ended(self, seconds: float) -> bool:
        """Wait for its end; whether it has come."""
        patience = Patience(seconds)
        while True:
            try:
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    return True
            except ChildProcessError:  # who has started the launcher lets the kernel reap its children
                return True
            if not patience.left():
                return False
            time.sleep(min(LOOK, patience.wait()))

    def _tell(self, line: str) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLOUT)
        # Somebody killed it, or has stopped it for so long that its pipe is full: the job goes on without.
        with contextlib.suppress(BrokenPipeError):
            if poll.poll(1e3 * DISMISSAL):
                os.write(self._pipe, line.encode())


def boot_time() -> float:
    """Seconds since this host has started, those in which it was suspended too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _Told:
    """What the guardian was told. Lines come whole, or in parts: a reading ends anywhere.

    Attributes
    ----------
    groups : set of int
        Process groups that there are.
    farewell : bool
        Whether nothing is left to guard.
    """

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self.farewell = False
        self._rest = b""

    def take(self, part: bytes) -> list[float]:
        """Take what was read; until when the lease was renewed."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        renewals = []
        for line in lines:
            kind, value = line[:1], line[1:]
            if kind == b"+":
                self.groups.add(int(value))
            elif kind == b"-":
                self.groups.discard(int(value))
            elif kind == b"=":
                renewals.append(float(value))
            else:
                self.farewell = True
        return renewals


class _Lease:
    """Until when the workers of an agent may run, as the guardian knows."""

    def __init__(self, seconds: float) -> None:
        self._patience = Patience(seconds)  # as a process counts that may have stood still: after that there is no hope
        self._until = boot_time() + seconds
        self.held = False

    def renew(self, until: float) -> None:
        left = until - boot_time()
        if left > 0:
            self._until = until
            self._patience.begin(left)

    def left(self) -> float:
        return self._until - boot_time()

    def hopeless(self) -> bool:
        return not self._patience.left()

    def wait(self) -> float:
        """Seconds to the next look."""
        return min(self._patience.wait(), max(self.left(), 0.0) if not self.held else 1.0)


def _guard(
    pipe: int, job: str, discard: Callable[[], None], host: str | None, launcher: int, seconds: float | None
) -> None:
    """Wait for the end of the pipe in the forked process, or of the lease; sweep if no farewell came."""
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
        signal.signal(signum, signal.SIG_IGN)
    pipe = _keep_only(pipe)
    processes.prctl(processes.PR_SET_NAME, b"enginerun-guard")
    told = _Told()
    lease = None if seconds is None else _Lease(seconds)
    while not told.farewell:
        if lease is not None and not _told_in_time(pipe, lease, told.groups):
            processes.send(launcher, signal.SIGKILL)
            break
        part = os.read(pipe, 4096)
        if not part:
            break
        for until in told.take(part):
            if lease is not None:
                lease.renew(until)
    if told.farewell:
        return
    for group in told.groups:
        processes.send_group(group, signal.SIGKILL)
    discard()
    _sweep(job, host)


def _told_in_time(pipe: int, lease: _Lease, groups: Collection[int]) -> bool:
    """Wait for something to read, or for the end of the lease, at which the workers are held."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while not lease.hopeless():
        if lease.held != (lease.left() <= 0):
            lease.held = not lease.held
            for group in groups:
                processes.send_group(group, signal.SIGSTOP if lease.held else signal.SIGCONT)
        if poll.poll(1e3 * lease.wait()):
            return True
    return False


def _keep_only(pipe: int) -> int:
    """Close all descriptors but the pipe: a reader of the launcher's output must not wait for us."""
    null = os.open(os.devnull, os.O_RDWR)
    kept = os.dup2(pipe, 3) if null != 3 else os.dup2(pipe, 4)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    # Those that are open, not all that could be: these may be a thousand million, and old kernels have no close_range.
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > kept:
            os.closerange(int(entry), int(entry) + 1)  # ignores the one that the listing itself has used
    return kept


def _sweep(job: str, host: str | None) -> None:
    """Kill every process of the job until a look finds none."""
    deadline = time.monotonic() + SWEEP_LIMIT
    while time.monotonic() < deadline and end_all(job, host):
        time.sleep(0.01)


def end_all(job: str, host: str | None) -> bool:
    """Kill every process of a job, or of one host of it.

    Parameters
    ----------
    job : str
        The value of `ENGINE_JOB`.
    host : str, optional
        The value of `ENGINE_CROSS_RANK`.

    Returns
    -------
    bool
        Whether any was found that runs.
    """
    found = [
        process.pid
        for process in processes.processes()
        if runs(process) and process.pid != os.getpid() and _belongs(process.pid, job, host)
    ]
    for pid in found:
        processes.send(pid, signal.SIGKILL)
    return bool(found)


def runs(process: processes.Process) -> bool:
    """Whether a process is more than an entry that nobody has reaped: its first thread may have ended before others."""
    if process.state not in ("Z", "X"):
        return True
    try:
        return len(os.listdir(f"/proc/{process.pid}/task")) > 1
    except OSError:
        return False


def _belongs(pid: int, job: str, host: str | None) -> bool:
    """Whether a process was started in the job, and on that host of it."""
    return processes.job_of(pid) == job and host in (None, processes.variable_of(pid, "ENGINE_CROSS_RANK"))
