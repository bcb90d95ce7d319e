"""Run a program on N ranks through the real launcher, and check that it leaves nothing behind.

finished = run_ranks(3, "import engine; engine.init(); print(engine.rank())")
finished.ranks[0].stdout

finished = run_ranks(4, module.function, 1.5)  # calls function(1.5) on every rank
finished.values                                # what it returned, by rank

with start_ranks(2, source) as job:            # to act while it runs
    job.wait_for("ready.0", "ready.1")         # files that ranks make in their working directory
    os.kill(job.pid(1), signal.SIGKILL)
    finished = job.finish(check=False)
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .waiting import MARK, PATIENCE, SLOWNESS, Found, NotWithin, let_pass, marked, until

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 6000  # characters of a rank's stream in a failure's text
DUMP = signal.SIGUSR2  # a rank that gets it writes the stacks of its threads to its stderr


@dataclass(frozen=True)
class Rank:
    """Output of one rank."""

    stdout: str
    stderr: str


@dataclass(frozen=True)
class Finished:
    """Result of a job."""

    code: int  # exit code of the launcher; negative if it was killed
    out: str  # output of the launcher
    err: str
    ranks: tuple[Rank, ...]
    values: list[Any]  # return values of the function by rank; None where it did not return, or for a program
    seconds: float
    files: dict[str, str]  # text of all ranks' failure reports and flight records, by path such as `rank.0/flight.json`

    def __str__(self) -> str:
        parts = [f"exit code {self.code} after {self.seconds:.1f} s", f"--- launcher\n{self.err[-SHOWN:]}"]
        for number, rank in enumerate(self.ranks):
            parts += [f"--- rank {number}, stdout\n{rank.stdout[-SHOWN:]}" if rank.stdout else ""]
            parts += [f"--- rank {number}, stderr\n{rank.stderr[-SHOWN:]}" if rank.stderr else ""]
        return "\n".join(part for part in parts if part)


class RanksFailed(AssertionError):
    """A job did not end as it should have."""


class Job:
    """A running job. As a context manager it ends the job with the block, whatever happens.

    The program is source, or a function of a module with pickled arguments: every rank imports it, so keep pytest out
    of it. Its working directory is the job's own, and `tests` can be imported.
    """

    def __init__(
        self,
        np: int,
        program: str | Callable[..., Any],
        *args: Any,
        timeout: float = 100.0,  # seconds until every process is killed; long enough for a busy machine
        env: Mapping[str, str] | None = None,  # beside the caller's, from which the engine's settings are removed
        options: Iterable[str] = (),  # further arguments of the launcher
        prefix: Iterable[str] = (),  # a command that runs the launcher, such as one that limits it
        python: str = "",  # interpreter of the ranks; empty: the one that runs the tests
    ) -> None:
        self.size = np
        self.timeout = timeout * SLOWNESS
        self.mark = uuid.uuid4().hex
        self.home = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.directory = self.home / "work"  # working directory of the ranks
        self.output = self.home / "out"
        self.directory.mkdir()
        self._shm = _shm_entries()
        self._started = time.monotonic()
        source = self._call(program, args) if callable(program) else textwrap.dedent(program)
        script = self.home / "rank.py"
        script.write_text(self._prelude() + source)
        command = [sys.executable, "-m", "engine.launch", "-np", str(np), "--output-dir", str(self.output)]
        with open(self.home / "stdout", "wb") as out, open(self.home / "stderr", "wb") as err:
            self.process = subprocess.Popen(
                [*prefix, *command, *options, "--", python or sys.executable, str(script)],
                cwd=self.directory,
                env=self._environment(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Return the job's variables, without the caller's settings, outer launchers, or a result cache in the home."""
        foreign = ("ENGINE_", "HOROVOD_", "OMP_", "OMPI_", "PMI", "MASTER_", "TORCHELASTIC_")
        outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign) and name not in outer}
        own = {MARK: self.mark, "PYTHONFAULTHANDLER": "1", "ENGINE_AUTOTUNE_CACHE": "off"}
        return {**kept, **own, **extra}

    def _prelude(self) -> str:
        """Return code of one line, so that line numbers in tracebacks are off by one only."""
        hosts = "import tests.pretended_hosts; " if pretended_hosts() else ""
        return (
            f"import faulthandler, os, sys; faulthandler.register({int(DUMP)}); sys.path.append({str(ROOT)!r}); {hosts}"
            f"open({str(self.home)!r} + '/pid.' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        )

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
        (self.home / "args").write_bytes(pickle.dumps(args))
        return textwrap.dedent(f"""
            import importlib, pickle
            function = importlib.import_module({function.__module__!r}).{function.__qualname__}
            value = function(*pickle.load(open({str(self.home / "args")!r}, "rb")))
            path = {str(self.home)!r} + "/value." + os.environ["RANK"]
            with open(path + ".part", "wb") as file:
                pickle.dump(value, file)
            os.replace(path + ".part", path)  # Whole or not at all: it may be looked for at any time.
        """)

    def pid(self, rank: int) -> int:
        """Return the pid of a rank, once it runs."""
        path = self.home / f"pid.{rank}"
        return int(self._until(lambda: path.exists() and path.read_text(), f"rank {rank} started"))

    def wait_for(self, *names: str, timeout: float = PATIENCE) -> None:
        """Wait until ranks have made these files in their working directory."""
        self._until(lambda: all((self.directory / name).exists() for name in names), f"files {names}", timeout)

    def _until(self, condition: Callable[[], Found], what: str, timeout: float = PATIENCE) -> Found:
        def look() -> Found:
            if not (found := condition()) and self.process.poll() is not None and not (found := condition()):
                raise RanksFailed(f"the job ended before this became true: {what}\n{self.result()}")
            return found

        try:
            return until(look, what, timeout)
        except NotWithin as error:
            self.dump()
            raise RanksFailed(f"{error}\n{self.result()}") from None

    def allow(self, seconds: float) -> None:
        """Set the time limit to this many seconds from now, instead of `timeout` from the start."""
        self.timeout = time.monotonic() - self._started + seconds * SLOWNESS

    def dump(self) -> None:
        """Make the ranks write the stacks of their threads to their stderr."""
        for path in self.home.glob("pid.*"):
            try:
                os.kill(int(path.read_text() or 0), DUMP)
            except (ProcessLookupError, ValueError):
                continue
        let_pass(0.3)  # until the stacks are written, which no state shows

    def result(self) -> Finished:
        """Return the result so far."""
        streams = [
            Rank(_text(self.output / f"rank.{rank}" / "stdout"), _text(self.output / f"rank.{rank}" / "stderr"))
            for rank in range(self.size)
        ]
        values = []
        for rank in range(self.size):
            path = self.home / f"value.{rank}"
            values.append(pickle.loads(path.read_bytes()) if path.exists() else None)
        files = {
            str(path.relative_to(self.output)): _text(path)
            for path in sorted(self.output.rglob("*"))
            if path.is_file() and path.name not in ("stdout", "stderr")
        }
        code = self.process.returncode
        seconds = time.monotonic() - self._started
        out, err = _text(self.home / "stdout"), _text(self.home / "stderr")
        return Finished(-1 if code is None else code, out, err, tuple(streams), values, seconds, files)

    def finish(self, check: bool = True) -> Finished:
        """Wait for the job's end, and check that nothing of it is left.

        Raises `RanksFailed` if the job did not end within the timeout, left something behind, or, with `check`, failed.
        """
        try:
            self.process.wait(max(0.1, self._started + self.timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.dump()
            self.kill()
            raise RanksFailed(f"not done within {self.timeout} s\n{self.result()}") from None
        finished = self.result()
        try:
            until(lambda: not marked(self.mark), "no process is left", 20.0)
        except NotWithin:
            left = marked(self.mark)
            lines = "\n".join(f"{pid}: {_text(Path(f'/proc/{pid}/cmdline'))}" for pid in left)
            self.kill()
            raise RanksFailed(f"processes are left:\n{lines}\n{finished}") from None
        try:
            until(lambda: not ownerless(_shm_entries() - self._shm), "nothing is left in /dev/shm", 10.0)
        except NotWithin:
            raise RanksFailed(f"left in /dev/shm: {ownerless(_shm_entries() - self._shm)}\n{finished}") from None
        if check and finished.code != 0:
            raise RanksFailed(str(finished))
        return finished

    def kill(self) -> None:
        """End every process of the job at once."""

        def none_left() -> bool:
            pids = marked(self.mark)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        with contextlib.suppress(NotWithin):  # a process that the kernel does not release
            until(none_left, "all are dead", 10.0, pause=0.01)
        self.process.wait()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)


def pretended_hosts() -> bool:
    """Return whether ranks shall take themselves for ranks of several hosts."""
    return int(os.environ.get("PRETENDED_HOSTS") or 1) > 1


def start_ranks(np: int, program: str | Callable[..., Any], *args: Any, **options: Any) -> Job:
    """Start a job; the parameters are those of `run_ranks`. Use it in a `with` statement."""
    return Job(np, program, *args, **options)


def run_ranks(np: int, program: str | Callable[..., Any], *args: Any, check: bool = True, **options: Any) -> Finished:
    """Run a program on `np` ranks and wait for its end; `options` are those of `Job`.

    Raises `RanksFailed` if the job failed or, with `check`, its exit code is not 0; the text has all that they wrote.
    """
    with Job(np, program, *args, **options) as job:
        return job.finish(check)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _shm_entries() -> set[str]:
    """Return the names in /dev/shm, except what a killed MPICH leaves there: other tests kill one."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("mpich_shm_")}


def ownerless(names: set[str]) -> list[str]:
    """Return names in /dev/shm that no living process has mapped: others use this directory too."""
    if not names:
        return []
    used = ""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            used += "".join(line for line in _text(entry / "maps").splitlines(True) if "/dev/shm/" in line)
    return sorted(name for name in names if f"/dev/shm/{name}\n" not in used)


def report(failures: Mapping[str, str]) -> None:
    """Fail with all failures by name, for functions that run many cases on a rank."""
    if failures:
        shown = {name: text[:600] for name, text in list(failures.items())[:12]}
        raise AssertionError(f"{len(failures)} cases failed: {json.dumps(shown, indent=1, ensure_ascii=False)}")
