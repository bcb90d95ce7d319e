"""A process that outlives the launcher for a moment, and ends what is left when the launcher was killed.

A rank dies with the launcher by PR_SET_PDEATHSIG, but what the rank started does not: a shell's child, a data loader's
worker. The guardian is a fork of the launcher that sleeps on a pipe. It is told which process groups exist; when the
pipe ends without a farewell, it kills those groups and every process that was started with the job's `ENGINE_JOB`.

In an elastic job it also holds the lease of an agent: one that has heard nothing of the launcher for so long, or is
stopped, is killed with all its workers, since the launcher may have given them up and let others go on without them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable

from ..host import processes
from ..host.patience import Patience

SWEEP_LIMIT = 5.0
RENEWAL = b"="


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
        Seconds without `renew` after which everything ends, this process too; none: no such thing.
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

    def renew(self) -> None:
        """Tell it that the lease begins anew."""
        self._tell(RENEWAL.decode())

    def dismiss(self) -> None:
        """Let it go: nothing is left to guard."""
        self._tell(".\n")
        os.close(self._pipe)
        os.waitpid(self.pid, 0)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed it: the job goes on without
            os.write(self._pipe, line.encode())


def _guard(
    pipe: int, job: str, discard: Callable[[], None], host: str | None, launcher: int, lease: float | None
) -> None:
    """Wait for the end of the pipe in the forked process, or of the lease; sweep if no farewell came."""
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
        signal.signal(signum, signal.SIG_IGN)
    pipe = _keep_only(pipe)
    processes.prctl(processes.PR_SET_NAME, b"enginerun-guard")
    text = b""
    patience = None if lease is None else Patience(lease)
    while True:
        if patience is not None and not _told_in_time(pipe, patience):
            processes.send(launcher, signal.SIGKILL)
            break
        part = os.read(pipe, 4096)
        if not part:
            break
        if patience is not None and RENEWAL in part:
            assert lease is not None
            patience.begin(lease)
        text += part.replace(RENEWAL, b"")
        if len(text) > 1 << 16:
            text = _compact(text)
    if text.endswith(b".\n"):
        return
    for group in _groups(text):
        processes.send_group(group, signal.SIGKILL)
    discard()
    _sweep(job, host)


def _told_in_time(pipe: int, patience: Patience) -> bool:
    """Wait for something to read, or for the end of the lease."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while not poll.poll(1e3 * patience.wait()):
        if not patience.left():
            return False
    return True


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


def _groups(text: bytes) -> set[int]:
    groups: set[int] = set()
    for line in text.split():
        number = int(line[1:])
        groups.add(number) if line.startswith(b"+") else groups.discard(number)
    return groups


def _compact(text: bytes) -> bytes:
    whole, newline, rest = text.rpartition(b"\n")
    return b"".join(b"+%d\n" % group for group in sorted(_groups(whole))) + (rest if newline else b"")


def _sweep(job: str, host: str | None) -> None:
    """Kill every process of the job until a look finds none."""
    deadline = time.monotonic() + SWEEP_LIMIT
    while time.monotonic() < deadline:
        found = [
            process.pid
            for process in processes.processes()
            if process.state != "Z" and process.pid != os.getpid() and _belongs(process.pid, job, host)
        ]
        if not found:
            return
        for pid in found:
            processes.send(pid, signal.SIGKILL)
        time.sleep(0.01)


def _belongs(pid: int, job: str, host: str | None) -> bool:
    """Whether a process was started in the job, and on that host of it."""
    return processes.job_of(pid) == job and host in (None, processes.variable_of(pid, "ENGINE_CROSS_RANK"))
