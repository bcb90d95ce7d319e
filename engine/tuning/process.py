"""The tuner's process as rank 0 starts, asks and ends it: a program of its own (`autotune.daemon`).

They talk over a socket pair of which the process inherits one end, so nobody else can connect and nothing is left in
the file system. A packet is a message: an object of JSON with the protocol's `version` and a `type`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import config
from ..bounded_reader import ReadError, parse_json
from ..host import linux
from ..host.patience import Patience
from ..host.sockets import retry_short

VERSION = 2
LIMIT = 1 << 16  # bytes of a message
ENDING = 1.0  # seconds that the process has to end by itself before it is killed
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
SECRET = "ENGINE_SECRET"
BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TunerError(Exception):
    """There is no tuner any more; says why, for people."""


def program(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a module of the tuner, and its environment.

    It finds the tuner where this package lies, whatever the working directory holds.
    """
    home = str(Path(__file__).parents[2])
    environ = {name: value for name, value in config.environment().items() if name != SECRET}
    paths = [path for path in (environ.get("PYTHONPATH", ""), home) if path]
    environ |= {**ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)}
    return [sys.executable, "-P", "-m", module, *arguments], environ


class TunerProcess:
    """The process, from here to `close`. The thread that makes it has to outlive it.

    Raises
    ------
    TunerError
        It cannot be started.
    """

    def __init__(self) -> None:
        try:
            self._output = linux.memfd_create("autotune")  # stderr of the process: its last words
        except OSError as error:
            raise TunerError(
                f"the tuner's process cannot be started: {linux.refusal('memfd_create', error)}"
            ) from error
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command, environ = program("autotune.daemon", str(theirs.fileno()), str(os.getpid()))
        # What ends the job is rank 0's to handle: the process ignores it, from before it can.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            self._process = subprocess.Popen(
                command,
                env=environ,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
            )
        except OSError as error:
            self._socket.close()
            os.close(self._output)
            raise TunerError(f"the tuner's process cannot be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a message and wait for the answer.

        Raises
        ------
        TunerError
            No answer within that time, or none that makes sense; the process has ended; it says that it cannot go on.
        """
        data = json.dumps({"version": VERSION, **message}, allow_nan=False).encode()
        try:
            self._socket.settimeout(seconds)
            retry_short(self._socket.send, data)
            patience = Patience(seconds)
            while not self._readable(patience.wait()):
                if not patience.left():
                    raise TimeoutError
            answer, _, flags, _ = retry_short(self._socket.recvmsg, LIMIT)
        except TimeoutError:
            raise TunerError(f"the tuner's process has not answered for {seconds:g} s") from None
        except OSError:
            answer, flags = b"", 0
        if not answer:
            raise TunerError(self._end())
        if flags & socket.MSG_TRUNC:
            raise TunerError(f"the tuner's process has sent a message of more than {LIMIT} bytes")
        return self._understood(answer)

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def interrupt(self) -> None:
        """Make an `ask` in another thread fail now. The process ends by it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already, from either side

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        self.interrupt()
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in an uninterruptible wait: the system reaps it
                self._process.wait(ENDING)
        self._socket.close()
        os.close(self._output)

    def __enter__(self) -> TunerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, t: TracebackType | None) -> None:
        self.close()

    @staticmethod
    def _understood(data: bytes) -> dict[str, Any]:
        try:
            answer = parse_json(data)
        except ReadError as error:
            raise TunerError(f"the tuner's process has sent a malformed message: {error}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("type"), str):
            raise TunerError("the tuner's process has sent a malformed message: it is no object with a type")
        if answer.get("version") != VERSION:
            raise TunerError(
                f"the tuner's process speaks version {answer.get('version')!r} of the protocol, and rank 0 {VERSION}"
            )
        if answer["type"] == "failed":
            raise TunerError(str(answer.get("reason")))
        return answer

    def _end(self) -> str:
        """How the process ended."""
        try:
            code = self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            return "the tuner's process has closed its socket"
        if code < 0:
            return f"the tuner's process was killed by {signal.Signals(-code).name}"
        lines = os.pread(self._output, LIMIT, 0).decode(errors="replace").strip().splitlines()
        return f"the tuner's process has ended with exit code {code}" + (f": {lines[-1]}" if lines else "")
