"""Process of the tuner, a program of its own (`autotune.daemon`), as rank 0 starts, asks and ends it.

They communicate over a socket pair, of which the process inherits one end: nobody else can connect, and the file
system stays clean. Each packet is a message: a JSON object with the protocol's `version` and a `type`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from ..config import config
from ..host import linux
from ..host.patience import Patience
from ..host.signals import ENDING_SIGNALS
from ..host.sockets import retry_short, wait_readable
from ..text.bounded_reader import ReadError, parse_json

VERSION = 2
LIMIT = 1 << 16  # maximum bytes of a message
ENDING = 1.0  # seconds in which the process must end by itself before it is killed
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
SECRET = "ENGINE_SECRET"


class TunerError(Exception):
    """Error after which there is no tuner any more; the text gives the reason for the user."""


def make_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs a module of the tuner, and its environment.

    The command finds the tuner beside this package, regardless of the working directory.
    """
    home = str(Path(__file__).parents[2])
    environ = {name: value for name, value in config.read_environment().items() if name != SECRET}
    paths = [path for path in (environ.get("PYTHONPATH", ""), home) if path]
    environ |= {**ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)}
    return [sys.executable, "-P", "-m", module, *arguments], environ


class TunerProcess:
    """Running tuner process, from construction to `close`. The thread that creates it must outlive it.

    If the process cannot be started, a TunerError is raised.
    """

    def __init__(self) -> None:
        try:
            self._output = linux.memfd_create("autotune")  # stderr of the process: its last output
        except OSError as error:
            raise TunerError(
                f"the tuner's process cannot be started: {linux.explain_refusal('memfd_create', error)}"
            ) from error
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command, environ = make_command("autotune.daemon", str(theirs.fileno()), str(os.getpid()))
        # Rank 0 handles signals that end the job. The process ignores them, and they are blocked until it can.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
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
        """Process id of the tuner."""
        return self._process.pid

    def send_request(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a message and wait for the answer.

        It raises a TunerError if no valid answer comes in time, the process has ended, or it reports that it cannot go
        on.
        """
        data = json.dumps({"version": VERSION, **message}, allow_nan=False).encode()
        try:
            self._socket.settimeout(seconds)
            retry_short(self._socket.send, data)
            patience = Patience(seconds)
            while not wait_readable([self._socket.fileno()], patience.wait()):
                if not patience.seconds_left():
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
        return self._parse_answer(answer)

    def interrupt_request(self) -> None:
        """Make a `send_request` in another thread fail at once. It also ends the process."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already, from either side

    def close(self) -> None:
        """Stop the tuner's child process, kill it if it has not exited after `ENDING` seconds, and wait for it."""
        self.interrupt_request()
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in an uninterruptible wait: init reaps it later
                self._process.wait(ENDING)
        self._socket.close()
        os.close(self._output)

    def __enter__(self) -> TunerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, t: TracebackType | None) -> None:
        self.close()

    @staticmethod
    def _parse_answer(data: bytes) -> dict[str, Any]:
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
        """Describe how the process ended."""
        try:
            code = self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            return "the tuner's process has closed its socket"
        if code < 0:
            return f"the tuner's process was killed by {signal.Signals(-code).name}"
        lines = os.pread(self._output, LIMIT, 0).decode(errors="replace").strip().splitlines()
        return f"the tuner's process has ended with exit code {code}" + (f": {lines[-1]}" if lines else "")
