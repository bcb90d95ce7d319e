"""The guardian: a process that outlives a killed launcher for a moment, and kills the processes that it leaves.

A rank dies with the launcher by PR_SET_PDEATHSIG. Its child processes, such as a shell's child or a data loader's
worker, do not. The guardian is a fork of the launcher that sleeps on a pipe, over which it learns the process groups of
the job. When the pipe ends without a dismissal, it kills those groups and every process with the job's `ENGINE_JOB`.

In an elastic job the guardian of an agent on another host than the launcher's also enforces the lease. It kills the
agent and all its workers if the agent is stopped, or gets no message of the launcher for the length of the lease. By
then the launcher may have let others go on without them. A lease ends at a time of CLOCK_BOOTTIME, which includes
suspension. If a host wakes up after that time, its workers are stopped at once, and killed unless the launcher renews
the lease.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection

from ...host import processes
from ...host.patience import Patience
from ...host.signals import ENDING_SIGNALS
from .job_signals import PASSED_SIGNALS

NOWHERE = "-"  # number of no host: a guardian with it looks for no processes of the job, as others guard them
SWEEP_LIMIT = 5.0  # longest seconds for which processes that a killed launcher leaves are killed, until none is found
DISMISSAL = 2.0  # seconds in which a dismissed guardian must end, or read from its pipe
LOOK = 0.001  # seconds between two polls for its end


class Guardian:
    """The launcher's handle of its guardian. Make it before the ranks are started, in a process with one thread.

    `job` is the value of `ENGINE_JOB`. An agent gives its `ENGINE_CROSS_RANK` as `host`: only processes of that host
    are killed, because several hosts may share a machine. `discard` is called in the guardian if the launcher was
    killed, and removes files that announce the job as running. After `lease` seconds without renewal the workers and
    this process are killed; None: no lease.
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
                _run_guardian(reading, job, discard, host, launcher, lease)
            finally:
                os._exit(0)
        os.close(reading)

    def watch_group(self, group: int) -> None:
        """Add a process group to those that it guards."""
        self._tell(f"+{group}\n")

    def forget_group(self, group: int) -> None:
        """Remove a process group that is empty, and whose number the system may reuse."""
        self._tell(f"-{group}\n")

    def renew_lease(self, until: float) -> None:
        """Set the time of `boot_time` at which the lease expires."""
        self._tell(f"={until:.3f}\n")

    def stop(self) -> None:
        """End the guardian, because no process is left to guard."""
        self._tell(".\n")
        os.close(self._pipe)
        if not self._await_end(DISMISSAL):  # it was stopped by a signal
            processes.send(self.pid, signal.SIGKILL)
            self._await_end(DISMISSAL)

    def _await_end(self, seconds: float) -> bool:
        """Wait up to `seconds` for its end, and return whether it has ended."""
        patience = Patience(seconds)
        while True:
            try:
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    return True
            except ChildProcessError:  # SIGCHLD is ignored (inherited), so the kernel reaps children
                return True
            if not patience.seconds_left():
                return False
            time.sleep(min(LOOK, patience.wait()))

    def _tell(self, line: str) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLOUT)
        # If it was killed, or stopped for so long that its pipe is full, the job goes on without it.
        with contextlib.suppress(BrokenPipeError):
            if poll.poll(1e3 * DISMISSAL):
                os.write(self._pipe, line.encode())


def boot_time() -> float:
    """Return the seconds since this host was booted, including the time in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _GuardianInput:
    """Parser and state of the messages to the guardian; a read may end in the middle of a line."""

    def __init__(self) -> None:
        self.groups: set[int] = set()  # existing process groups of the job
        self.dismissed = False
        self._rest = b""

    def parse_part(self, part: bytes) -> list[float]:
        """Parse bytes that were read, and return the new ends of the lease."""
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
                self.dismissed = True
        return renewals


class _Lease:
    """The guardian's lease: the time until which an agent's workers may run."""

    def __init__(self, seconds: float) -> None:
        self._patience = Patience(seconds)  # its clock leaves out suspension; afterwards there is no hope of a renewal
        self._until = boot_time() + seconds
        self.held = False

    def renew_lease(self, until: float) -> None:
        left = until - boot_time()
        if left > 0:
            self._until = until
            self._patience.reset(left)

    def seconds_left(self) -> float:
        return self._until - boot_time()

    def is_hopeless(self) -> bool:
        return not self._patience.seconds_left()

    def wait(self) -> float:
        """Return the seconds until the lease must be examined again."""
        return min(self._patience.wait(), max(self.seconds_left(), 0.0) if not self.held else 1.0)


def _run_guardian(
    pipe: int, job: str, discard: Callable[[], None], host: str | None, launcher: int, seconds: float | None
) -> None:
    """Run the guardian in the forked process: wait for the end of pipe or lease; kill all if it was not dismissed."""
    os.setsid()
    for signum in (*ENDING_SIGNALS, *PASSED_SIGNALS, signal.SIGTSTP):
        signal.signal(signum, signal.SIG_IGN)
    pipe = _keep_only(pipe)
    processes.call_prctl(processes.PR_SET_NAME, b"enginerun-guard")
    told = _GuardianInput()
    lease = None if seconds is None else _Lease(seconds)
    while not told.dismissed:
        if lease is not None and not _told_in_time(pipe, lease, told.groups):
            processes.send(launcher, signal.SIGKILL)
            break
        part = os.read(pipe, 4096)
        if not part:
            break
        for until in told.parse_part(part):
            if lease is not None:
                lease.renew_lease(until)
    if told.dismissed:
        return
    for group in told.groups:
        processes.send_group(group, signal.SIGKILL)
    discard()
    deadline = time.monotonic() + SWEEP_LIMIT
    while time.monotonic() < deadline and end_all(job, host):
        time.sleep(0.01)


def _told_in_time(pipe: int, lease: _Lease, groups: Collection[int]) -> bool:
    """Wait until the pipe is readable and return True; return False if the lease has expired without hope of a renewal.

    While the lease's time is over but may still be renewed, the workers are stopped by SIGSTOP.
    """
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while not lease.is_hopeless():
        if lease.held != (lease.seconds_left() <= 0):
            lease.held = not lease.held
            for group in groups:
                processes.send_group(group, signal.SIGSTOP if lease.held else signal.SIGCONT)
        if poll.poll(1e3 * lease.wait()):
            return True
    return False


def _keep_only(pipe: int) -> int:
    """Close all descriptors but the pipe, so that readers of the launcher's output do not wait for the guardian."""
    null = os.open(os.devnull, os.O_RDWR)
    kept = os.dup2(pipe, 3) if null != 3 else os.dup2(pipe, 4)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    processes.close_descriptors({0, 1, 2, kept})
    return kept


def end_all(job: str, host: str | None) -> bool:
    """Kill every process of a job, or of one host of it; return whether any running process was found.

    `job` and `host` are the values of `ENGINE_JOB` and `ENGINE_CROSS_RANK`.
    """
    found = [
        process.pid
        for process in processes.list_processes()
        if processes.is_running(process) and process.pid != os.getpid() and _is_of_job(process.pid, job, host)
    ]
    for pid in found:
        processes.send(pid, signal.SIGKILL)
    return bool(found)


def _is_of_job(pid: int, job: str, host: str | None) -> bool:
    """Return whether a process belongs to the job, and to that host of it, if one is given."""
    return processes.job_of(pid) == job and host in (None, processes.variable_of(pid, "ENGINE_CROSS_RANK"))
