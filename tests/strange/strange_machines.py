"""Imitations of unusual machines around a command: filters, namespaces, other users."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import autotune
import engine
import engine_ext.core

from ..waiting import MARK, marked, until

JOB = Path(__file__).with_name("strange_job.py")
LAUNCH = [sys.executable, "-m", "engine.launch", "-np", "2"]
FOREIGN = ("ENGINE_", "HOROVOD_", "OMP_", "LC_", "LANG", "PYTHONUTF8", "PYTHONCOERCECLOCALE")
DONE = ["rank 0 of 2 is done", "rank 1 of 2 is done"]
DEADLINE = 90.0
# System call numbers by machine; those above 400 are the same everywhere.
CALLS = {"memfd_create": {"x86_64": 319, "aarch64": 279}, "pidfd_open": {}, "close_range": {}}
COMMON = {"pidfd_open": 434, "close_range": 436}


class Machine:
    """Runs commands for one test, and ensures that no process of them is left."""

    def __init__(self, home: Path, site: Path) -> None:
        self.home = home  # working directory of commands, and of their files
        self.site = site  # directory in which the engine is installed; `install` makes it
        self.deadline = DEADLINE
        self.marks: dict[int, str] = {}  # mark of each started command, by process ID
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        # An editable install checks for stale code at every import, and may write, which another user may not.
        skip = {"MESONPY_EDITABLE_SKIP": str(Path(engine_ext.core.__file__).parents[1])}
        self.environment |= {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **skip}

    def start(
        self,
        command: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,  # variables beside those of the test command
        before: Callable[[], object] | None = None,  # called between fork and exec
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command."""
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [str(part) if not isinstance(part, bytes) else part for part in command],
            cwd=cwd or self.home,
            env=self.environment | {MARK: mark} | dict(env or {}),
            preexec_fn=before,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            process_group=0,
        )
        self.marks[process.pid] = mark
        return process

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        """Wait for the end of a command, and check that no process of it is left."""
        try:
            out, err = process.communicate(timeout=self.deadline)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = process.communicate()
            raise AssertionError(f"not done within {self.deadline} s\n{out}\n{err}") from None
        until(lambda: not marked(self.marks[process.pid]), "nothing is left")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, command: Sequence[object], **options: object) -> subprocess.CompletedProcess[str]:
        """Start a command and wait for its end; the parameters are those of `start`."""
        return self.finish(self.start(command, **options))  # type: ignore[arg-type]

    def kill(self) -> None:
        """Kill all processes that a test has started."""
        for pid in [pid for mark in self.marks.values() for pid in marked(mark)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def install(site: Path) -> None:
    """Put the engine into a directory, as a non-editable installation would."""
    for package in (autotune, engine, engine_ext):
        source = Path(str(package.__file__)).parent
        shutil.copytree(source, site / package.__name__, ignore=shutil.ignore_patterns("__pycache__"))
    for module in source.rglob("*.pyx"):  # of an editable install; others have the libraries beside the sources
        place = module.relative_to(source.parent).with_suffix("")
        library = Path(str(importlib.import_module(".".join(place.parts)).__file__))
        shutil.copy(library, site / place.parent)


def lines(run: subprocess.CompletedProcess[str]) -> list[str]:
    """Output of the ranks without the launcher's prefix, sorted."""
    assert run.returncode == 0, run.stdout + run.stderr
    return sorted(line.partition(">:")[2] for line in run.stdout.split("\n") if line.startswith("["))


def refuse(calls: Sequence[str], error: int = errno.EPERM) -> None:
    """Make calls of this process, and of its children, fail with an error, by a seccomp filter."""
    numbers = [CALLS[call].get(platform.machine(), COMMON.get(call, -1)) for call in calls]
    load = struct.pack("=HBBI", 0x20, 0, 0, 0)  # the number of the call
    tests = [struct.pack("=HBBI", 0x15, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    allow, deny = (struct.pack("=HBBI", 0x06, 0, 0, verdict) for verdict in (0x7FFF0000, 0x00050000 | error))
    program = b"".join([load, *tests, allow, deny])
    memory = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(memory)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    for option, first, second in ((38, ctypes.c_ulong(1), zero), (22, ctypes.c_ulong(2), ctypes.byref(header))):
        if prctl(option, first, second, zero, zero) != 0:  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
            raise OSError(ctypes.get_errno(), "no seccomp filter can be set")


def obstacle(*programs: str) -> str:
    """Reason why this user cannot make namespaces here, or an empty string."""
    if os.geteuid() != 0:
        return "only root may make name spaces and become another user"
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        return f"{missing[0]} of util-linux is not installed"
    tried = subprocess.run(["unshare", "-m", "-p", "-f", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else ""
