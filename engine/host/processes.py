"""Processes from /proc: descendants, signal handlers, and ways to end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def call_prctl(option: int, value: int | bytes) -> None:
    """Call prctl(2) with one of the `PR_*` constants above; OSError if the kernel refuses."""
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(ctypes.c_int(option), argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies; end it now if the parent has died already.

    The caller gives the parent's process id, which the child cannot read itself without a race.
    """
    call_prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before the call of prctl
        os._exit(128 + signum)


@dataclass(frozen=True)
class Process:
    """Entry of a process in /proc."""

    pid: int
    parent: int
    group: int
    state: str  # one letter, as in ps: R running, S sleeping, T stopped, Z ended and not yet reaped
    name: str
    born: int  # start time in ticks since boot; distinguishes processes that reuse a process id


def is_proc_usable() -> bool:
    """Return whether /proc shows this process, and so all its descendants, by their own process ids.

    It is False without /proc, and if /proc belongs to another PID namespace, where the ids mean other processes.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def list_processes() -> Iterator[Process]:
    """Yield the processes that this user may see."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (found := read_process(int(entry))) is not None:
            yield found


def read_process(pid: int) -> Process | None:
    """Read the entry of one process; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(") ")
    fields = rest.split()  # from the third on, as proc(5) counts them
    return Process(pid, int(fields[1]), int(fields[2]), fields[0], name, int(fields[19]))


def is_running(process: Process) -> bool:
    """Return whether a process runs; one whose first thread has ended may still have others."""
    if process.state not in ("Z", "X"):
        return True
    try:
        return len(os.listdir(f"/proc/{process.pid}/task")) > 1
    except OSError:
        return False


def list_memory(pid: int, name: str) -> list[int]:
    """List a process's descriptors of anonymous memory whose name begins with `name`; empty if they may not be read."""
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed in the meantime
                if os.readlink(f"/proc/{pid}/fd/{entry}").startswith(f"/memfd:{name}"):
                    found.append(int(entry))
    return sorted(found)


def list_descendants(ancestor: int, spared: Collection[int] = ()) -> list[Process]:
    """List the descendants of a process, generation by generation, without itself.

    The processes with `spared` ids are left out, with all their descendants.
    """
    children: dict[int, list[Process]] = {}
    for process in list_processes():
        if process.pid not in spared:
            children.setdefault(process.parent, []).append(process)
    found = list(children.get(ancestor, []))
    for process in found:  # the list grows during the loop
        found.extend(children.get(process.pid, []))
    return found


def close_descriptors(kept: Collection[int]) -> None:
    """Close all descriptors of this process but `kept`, also inherited ones without close-on-exec."""
    # Only open ones: the limit may be a thousand million, and old kernels have no close_range.
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(int(entry))


def catches_signal(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal; False also if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    mask = text.partition("\nSigCgt:")[2].split(maxsplit=1)[0]
    return bool(int(mask, 16) >> (signum - 1) & 1)


def job_of(pid: int) -> str | None:
    """Read the job in which a process was started, `ENGINE_JOB`; None if it is not set or may not be read."""
    return variable_of(pid, "ENGINE_JOB")


def variable_of(pid: int, name: str) -> str | None:
    """Read a variable of a process's initial environment; None if it is not set or may not be read."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    for variable in variables:
        if variable.startswith(f"{name}=".encode()):
            return variable.partition(b"=")[2].decode(errors="replace")
    return None


def find_starter(name: str) -> Process | None:
    """Find the process that started this one, directly or through others such as shells; None if it is not visible.

    `name` is a variable that is set in the processes it starts, but not in itself.
    """
    pid = os.getppid()
    while pid > 1 and variable_of(pid, name) is not None:
        found = read_process(pid)
        pid = 0 if found is None else found.parent
    return read_process(pid) if pid > 1 else None


def exit_code(pid: int) -> int:
    """Return the exit code of a child that is not reaped yet, in the form of `subprocess.Popen.returncode`.

    It is that of SIGKILL if the kernel does not reveal it.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return os.waitstatus_to_exitcode(int(text.rpartition(") ")[2].split()[49]))  # field 52 of proc(5)
    except (OSError, ValueError, IndexError):
        return -signal.SIGKILL


def name_tracer(pid: int) -> str:
    """Name the process that traces another one, such as a debugger, with its id; "nobody" if there is none."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
        found = read_process(int(text.partition("\nTracerPid:")[2].split(maxsplit=1)[0]))
    except (OSError, ValueError, IndexError):
        found = None
    return "nobody" if found is None else f"{found.name}, pid {found.pid}"


def send(pid: int, signum: int) -> bool:
    """Send a signal to a process; return False if the process is gone or belongs to another user."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def send_group(group: int, signum: int) -> bool:
    """Send a signal to a process group; return False if it has no process left, or none that may be signalled."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_name(signum: int) -> str:
    """Return the name of a signal, such as `SIGKILL` for 9; `signal 40` for a signal without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
