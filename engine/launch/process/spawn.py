"""Start ranks as processes that cannot outlive the launcher.

A rank leads a process group of its own, so that it and its child processes can be ended together. It has no controlling
terminal. It also leads a session, unless there are more ranks than CPUs: the kernel divides processors among sessions
first (autogroups, see sched(7)), so that a rank which yields would get its processor back at once.

A rank requests SIGKILL at the death of its parent. The request is tied to the *thread* that spawned it, so spawn from
the main thread. It is made between fork and exec, which is safe because the launcher has one thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...exit_report.report import make_environment as reporting
from ...exit_report.report import make_page
from ...host import linux, machine, processes
from ..errors import LaunchError
from .child import Child
from .plan import RankPlan

PIPE_BYTES = 1 << 18
F_SETPIPE_SZ = 1031
DESCRIPTORS_PER_RANK = 8


@dataclass
class RankProcess:
    """A started rank."""

    plan: RankPlan
    process: Child  # process of the rank, the leader of its own process group
    pidfd: int  # descriptor that is readable when the process has ended
    stdout: int  # reading end of its pipe, which does not block
    stderr: int  # same for stderr
    page: int  # descriptor of the page for its exit report (`engine.exit_report`); -1: none
    started: float  # time of the start: seconds, CLOCK_MONOTONIC

    @property
    def number(self) -> int:
        """Number of the rank."""
        return self.plan.rank

    @property
    def pid(self) -> int:
        """Id of the process, and of its process group."""
        return self.process.pid

    def is_running(self) -> bool:
        """Return whether the supervisor has not reaped it yet."""
        return self.process.returncode is None


def find_command(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the path of a command's program, which is looked up on PATH of `environment`.

    If there is no such program, or it may not be executed, a `LaunchError` says why.
    """
    name = command[0]
    if found := shutil.which(name, path=environment.get("PATH")):
        return found
    path = Path(name)
    if path.is_dir():
        raise LaunchError(f"{name!r} is a directory: name a program to run, as in 'python train.py'")
    if path.is_file() and os.access(path, os.X_OK):
        raise LaunchError(f"{name!r} is here, but not on PATH: write './{name}'")
    if path.is_file():
        mend = f"write 'python {name}'" if path.suffix == ".py" else f"run 'chmod +x {name}'"
        raise LaunchError(f"{name!r} is not executable: {mend}")
    if path.suffix == ".py" or "/" in name:
        raise LaunchError(f"{name!r} does not exist (in {machine.working_directory()}): check the path")
    raise LaunchError(f"the command {name!r} is not found on PATH: check its spelling, or give its full path")


def start(
    plan: RankPlan,
    command: Sequence[str],
    program: str,
    descriptors: tuple[int, int],
    inherited: Sequence[int] = (),
    awaited: bool = True,
) -> RankProcess:
    """Start one rank; if the system cannot start or watch it, raise a `LaunchError` and leave no process.

    `program` is the path of the command's program, and `descriptors` the rank's soft and hard limit of open files. It
    inherits the descriptors `inherited` under the same numbers. If not `awaited`, its `process` reports later whether
    its program has been found.
    """
    opened: list[int] = []
    try:
        out_read, out_write = _make_pipe(opened)
        err_read, err_write = _make_pipe(opened)
        started = time.monotonic()
        if (page := make_page()) >= 0:
            opened.append(page)
        prepare = _before_exec(os.getpid(), plan, descriptors)
        environment = reporting(page, plan.environment)
        process = Child(command, program, environment, (out_write, err_write), inherited, prepare)
        if awaited:
            process.await_start()
    except OSError as error:
        for descriptor in opened:
            os.close(descriptor)
        raise LaunchError(not_started(plan.rank, program, error)) from error
    os.close(out_write)
    os.close(err_write)
    try:
        pidfd = linux.pidfd_open(process.pid)
    except OSError as error:
        processes.send_group(process.pid, signal.SIGKILL)
        process.wait(1.0)  # one in an uninterruptible wait ends later
        for descriptor in (out_read, err_read, page):
            if descriptor >= 0:
                os.close(descriptor)
        raise LaunchError(
            f"rank {plan.rank}: its process cannot be watched: {linux.explain_refusal('pidfd_open', error)}"
        ) from error
    return RankProcess(plan, process, pidfd, out_read, err_read, page, started)


def start_command(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command as `subprocess.Popen` does, but without blocking other threads while its program is loaded.

    Loading takes as long as the program's file system needs. With vfork(2), the interpreter's default, it would hold
    the GIL meanwhile.
    """
    subprocess._USE_VFORK = False  # type: ignore[misc]  # as the module's documentation recommends
    return subprocess.Popen(list(command), **options)


def raise_descriptor_limit(ranks: int) -> tuple[int, int]:
    """Raise the launcher's limit of open files to what it needs for its ranks, as far as the hard limit allows.

    The old limit, soft and hard, is returned for the ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 64 + ranks * DESCRIPTORS_PER_RANK
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # beyond the hard limit: a later open() reports the error
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft, hard


def _make_pipe(opened: list[int]) -> tuple[int, int]:
    """Make a pipe with room for a burst, whose reading end does not block."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    opened += [reading, writing]
    os.set_blocking(reading, False)
    with contextlib.suppress(OSError):  # the user's share of pipe memory is used up: the default size will do
        fcntl.fcntl(reading, F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def _before_exec(launcher: int, plan: RankPlan, descriptors: tuple[int, int]) -> Callable[[], None]:
    """Return the function that the child calls between fork and exec."""
    hard, memory = resource.getrlimit(resource.RLIMIT_DATA)[1], plan.memory
    if memory is not None and hard != resource.RLIM_INFINITY:
        memory = min(memory, hard)

    def prepare() -> None:
        if plan.crowded:
            os.setpgid(0, 0)
        else:
            os.setsid()
        processes.die_with(launcher)
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        if plan.cpus is not None:
            os.sched_setaffinity(0, plan.cpus)
        if plan.crowded:
            _leave_terminal()

    return prepare


def _leave_terminal() -> None:
    """Give up the controlling terminal, since reading from it in the background would stop the rank."""
    with contextlib.suppress(OSError):  # the launcher has no terminal either
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        try:
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
        finally:
            os.close(terminal)


def not_started(rank: int, program: str, error: OSError) -> str:
    """Return the error text on a rank that could not be started, with what to do."""
    return f"rank {rank}: cannot start {program!r}: {error.strerror or error}{_suggest_mend(error)}"


def _suggest_mend(error: OSError) -> str:
    """Return the clause of that text which says what to do; empty if nothing is known."""
    if isinstance(error, BlockingIOError):
        return "; there are too many processes: see 'ulimit -u'"
    if isinstance(error, FileNotFoundError):
        return "; the interpreter in its first line ('#!...') does not exist"
    if error.errno == errno.ENOEXEC:
        return "; it needs a first line that names its interpreter ('#!...')"
    if error.errno == errno.EMFILE:
        return "; raise 'ulimit -n'"
    return ""


def find_port(address: str = "127.0.0.1") -> int:
    """Find a free TCP port for `MASTER_PORT` by `machine.free_port`; raise a `LaunchError` if there is none."""
    try:
        return machine.free_port(address)
    except OSError as error:
        raise LaunchError(error.strerror) from error
