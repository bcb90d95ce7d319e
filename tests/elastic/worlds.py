"""A small driver for tests of consecutive worlds: it starts processes, gives them places, and kills them.

Everything is on this host. The test assigns processes to worlds; `tests/elastic/member.py` is the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.elastic.member import LIMIT

ROOT = Path(__file__).parents[2]


class Worker:
    """A process, and its messages."""

    def __init__(self, number: int, pid: int, connection: socket.socket) -> None:
        self.number = number
        self.pid = pid
        self.alive = True
        self.worlds = 0
        self._connection = connection
        self._said: list[dict[str, Any]] = []

    def tell(self, **message: Any) -> None:
        """Send the worker a packet; a dead one gets none."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(json.dumps(message).encode())

    def heard(self, *kinds: str, seconds: float = 30.0) -> dict[str, Any]:
        """Wait for the next message of these kinds, and skip earlier ones of other kinds."""
        end = time.monotonic() + seconds
        while True:
            while self._said:
                said = self._said.pop(0)
                if said["kind"] in kinds:
                    return said
                if said["kind"] in ("raised", "failed", "called_off"):
                    raise AssertionError(f"worker {self.number} did not say {kinds}, but {said}")
            ready, _, _ = select.select([self._connection], [], [], max(0.0, end - time.monotonic()))
            data = self._connection.recv(LIMIT) if ready else b""
            if not data:
                raise AssertionError(f"worker {self.number} {'ended' if ready else 'did not say'}: {', '.join(kinds)}")
            self._said.append(json.loads(data))

    def kill(self) -> float:
        """Kill the worker, and return the time."""
        self.alive = False
        os.kill(self.pid, signal.SIGKILL)
        return time.monotonic()

    def close(self) -> None:
        """Kill the worker, unless it has ended."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Fork server (`tests/elastic/nursery.py`), as a context manager.

    It imports the given modules, too; the variables are also those of its forks.
    """

    def __init__(self, *modules: str, **environ: str) -> None:
        self._modules = modules
        self._environ = environ

    def __enter__(self) -> Nursery:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.elastic.nursery", *self._modules]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **self._environ}
        self._process = subprocess.Popen(command, stdin=theirs, cwd=ROOT, env=environment)
        theirs.close()
        assert select.select([self._socket], [], [], 120.0)[0], "the nursery has not begun"
        assert self._socket.recv(LIMIT)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(30)

    def fork(self, request: dict[str, Any], connection: socket.socket) -> int:
        """Fork a process that gets the connection, and return its pid."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], [connection.fileno()])
        return int(json.loads(self._socket.recv(LIMIT))["pid"])


class Worlds:
    """A job of worlds, as a context manager.

    The program is a function of a `Member`, in `tests/elastic/programs.py` or, as `module:function`, in another module.
    `environ` holds further variables of the processes, which `nursery` forks.
    """

    def __init__(self, nursery: Nursery, program: str, **environ: str) -> None:
        self.workers: list[Worker] = []
        self.number = 0
        self._program = program
        self._job = f"worlds-{os.getpid()}-{secrets.token_hex(4)}"
        self._records = tempfile.TemporaryDirectory(prefix="engine-worlds-", ignore_cleanup_errors=True)
        places = {"ENGINE_GATE": "none", "ENGINE_OUTPUT_DIR": self._records.name}
        self._environ = places | {"ENGINE_START_TIMEOUT": "20", "ENGINE_STALL_LIMIT": "30"} | environ
        self._nursery = nursery

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()
        self._records.cleanup()

    def start(self, count: int = 1, **environ: str) -> list[Worker]:
        """Start processes, which wait for a place."""
        started = []
        for _ in range(count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            place = {"ENGINE_RANK": "0", "ENGINE_SIZE": "2", "ENGINE_LOCAL_RANK": "0", "ENGINE_LOCAL_SIZE": "2"}
            request = {"number": len(self.workers), "program": self._program}
            request["environ"] = place | {"ENGINE_JOB": self._job} | self._environ | environ
            pid = self._nursery.fork(request, theirs)
            theirs.close()
            started.append(Worker(len(self.workers), pid, ours))
            self.workers.append(started[-1])
        return started

    def place(self, members: Sequence[Worker], number: int | None = None) -> int:
        """Send the members of the next world their places, in the order of ranks; return the world's number."""
        self.number = self.number + 1 if number is None else number
        for rank in range(len(members)):
            self.place_one(members, rank)
        return self.number

    def place_one(self, members: Sequence[Worker], rank: int) -> None:
        """Send one member its place in the current world."""
        size = len(members)
        members[rank].tell(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            job=self._job,
            secret="a secret of the test",
            source="elastic",
            number=self.number,
            workers=[worker.number for worker in members],
        )

    def void(self, members: Sequence[Worker], number: int | None = None) -> float:
        """Cancel a world, and return the time."""
        for worker in members:
            worker.tell(void=self.number if number is None else number)
        return time.monotonic()
