"""Processes as /proc shows them: descendants, signal handlers, and how to end them."""

from __future__ import annotations

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


def prctl(option: int, value: int | bytes) -> None:
    """Call prctl(2).

    Parameters
    ----------
    option : int
        One of the `PR_*` above.
    value : int or bytes
        Its argument.

    Raises
    ------
    OSError
        If the kernel refuses.
    """
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(ctypes.c_int(option), argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@dataclass(frozen=True)
class Process:
    """One line of /proc.

    Attributes
    ----------
    pid, parent, group : int
    state : str
        One letter, as in ps: R running, S asleep, T stopped, Z ended and not yet reaped.
    name : str
    born : int
        Start time in ticks since boot: tells apart processes that have had the same number.
    """

    pid: int
    parent: int
    group: int
    state: str
    name: str
    born: int


def visible() -> bool:
    """Tell whether /proc shows this process by its own number, and so all that descends from it.

    Returns
    -------
    bool
        False without /proc, and where it is that of another PID namespace: its numbers mean other processes there.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def processes() -> Iterator[Process]:
    """Yield the processes that this user may see.

    Yields
    ------
    Process
    """
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (found := look(int(entry))) is not None:
            yield found


def look(pid: int) -> Process | None:
    """Look at one process.

    Parameters
    ----------
    pid : int

    Returns
    -------
    Process or None
        None if it is gone.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(") ")
    fields = rest.split()  # from the third on, as proc(5) counts them
    return Process(pid, int(fields[1]), int(fields[2]), fields[0], name, int(fields[19]))


def descendants(ancestor: int, spared: Collection[int] = ()) -> list[Process]:
    """List what descends from a process, generation by generation.

    Parameters
    ----------
    ancestor : int
        Its pid.
    spared : collection of int
        Processes to leave out, with all that descends from them.

    Returns
    -------
    list of Process
        The descendants, without the ancestor.
    """
    children: dict[int, list[Process]] = {}
    for process in processes():
        if process.pid not in spared:
            children.setdefault(process.parent, []).append(process)
    found = list(children.get(ancestor, []))
    for process in found:  # grows as it goes
        found.extend(children.get(process.pid, []))
    return found


def catches(pid: int, signum: int) -> bool:
    """Tell whether a process has a handler for a signal.

    Parameters
    ----------
    pid, signum : int

    Returns
    -------
    bool
        False also if the process is gone.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    mask = text.partition("\nSigCgt:")[2].split(maxsplit=1)[0]
    return bool(int(mask, 16) >> (signum - 1) & 1)


def job_of(pid: int) -> str | None:
    """Read which job a process was started in.

    Parameters
    ----------
    pid : int

    Returns
    -------
    str or None
        `ENGINE_JOB` of the environment it was started with; None without one or without the right to look.
    """
    return variable_of(pid, "ENGINE_JOB")


def variable_of(pid: int, name: str) -> str | None:
    """Read a variable of the environment that a process was started with.

    Parameters
    ----------
    pid : int
    name : str

    Returns
    -------
    str or None
        None if it is not set, or without the right to look.
    """
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    for variable in variables:
        if variable.startswith(f"{name}=".encode()):
            return variable.partition(b"=")[2].decode(errors="replace")
    return None


def starter(name: str) -> Process | None:
    """Find the process that has started this one with a variable, though others may stand between, such as shells.

    Parameters
    ----------
    name : str
        A variable that the processes have which it starts, and it has not.

    Returns
    -------
    Process or None
        None if it cannot be seen.
    """
    pid = os.getppid()
    while pid > 1 and variable_of(pid, name) is not None:
        found = look(pid)
        pid = 0 if found is None else found.parent
    return look(pid) if pid > 1 else None


def exit_code(pid: int) -> int:
    """Tell how a process ended that nobody has reaped yet, as `subprocess.Popen.returncode` does.

    Parameters
    ----------
    pid : int
        A child of this process.

    Returns
    -------
    int
        That of SIGKILL if the kernel does not tell.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return os.waitstatus_to_exitcode(int(text.rpartition(") ")[2].split()[49]))  # field 52 of proc(5)
    except (OSError, ValueError, IndexError):
        return -signal.SIGKILL


def tracer(pid: int) -> str:
    """Name the process that traces another one, such as a debugger.

    Parameters
    ----------
    pid : int

    Returns
    -------
    str
        Its name and number; "nobody" if none does.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
        found = look(int(text.partition("\nTracerPid:")[2].split(maxsplit=1)[0]))
    except (OSError, ValueError, IndexError):
        found = None
    return "nobody" if found is None else f"{found.name}, pid {found.pid}"


def send(pid: int, signum: int) -> bool:
    """Send a signal to a process.

    Parameters
    ----------
    pid, signum : int

    Returns
    -------
    bool
        False if it is gone or belongs to somebody else.
    """
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def send_group(group: int, signum: int) -> bool:
    """Send a signal to a process group.

    Parameters
    ----------
    group, signum : int

    Returns
    -------
    bool
        False if nothing of it is left.
    """
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_name(signum: int) -> str:
    """Name a signal.

    Parameters
    ----------
    signum : int

    Returns
    -------
    str
        `SIGKILL` for 9; `signal 40` where there is no name.
    """
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
