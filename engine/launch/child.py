"""A child process whose start is not waited for.

`subprocess.Popen` returns when the program has been found. Where its file system stands still that may take minutes,
and an agent has other workers to look after, and a lease to keep. So this forks, and tells later what became of it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from ..host.patience import Patience

_CODE = struct.Struct("=i")
_LOOK = 0.01  # seconds from one look for the end to the next
_NOT_STARTED = 127


class Child:
    """A process, from its fork on. Fork from a process with one thread.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.
    program : str
        Path of the program.
    environment : mapping of str to str
    output : tuple of int
        Descriptors that become its stdout and stderr; it reads from the null device.
    inherited : sequence of int
        Descriptors that it has under the same numbers.
    prepare : callable
        Called in the child before the program takes its place.

    Attributes
    ----------
    pid : int
    returncode : int or None
        As of `subprocess.Popen`.
    started : int
        Can be read when the program has been found, or cannot be; -1 once `failure` has told which.
    """

    def __init__(
        self,
        command: Sequence[str],
        program: str,
        environment: Mapping[str, str],
        output: tuple[int, int],
        inherited: Sequence[int],
        prepare: Callable[[], None],
    ) -> None:
        self.returncode: int | None = None
        self._failure: OSError | None = None
        self.started, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        collects = gc.isenabled()
        gc.disable()  # in the child no finalizer of ours may run
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _become(command, program, environment, output, inherited, prepare, writing)
        except OSError:
            os.close(self.started)
            raise
        finally:
            os.close(writing)
            if collects:
                gc.enable()

    def failure(self) -> OSError | None:
        """Return why the program could not be started; None: it could, or nothing is known yet (`started`)."""
        if self.started >= 0:
            try:
                told = os.read(self.started, _CODE.size)
            except BlockingIOError:
                return None
            if told:
                (code,) = _CODE.unpack(told)
                self._failure = OSError(code, os.strerror(code) if code else "its process could not be prepared")
            os.close(self.started)
            self.started = -1
        return self._failure

    def await_start(self) -> None:
        """Return when the program has been found.

        Raises
        ------
        OSError
            It cannot be started; nothing is left of the process.
        """
        poll = select.poll()
        poll.register(self.started, select.POLLIN)
        poll.poll()
        if (failure := self.failure()) is not None:
            self.wait(1.0)
            raise failure

    def poll(self) -> int | None:
        """Reap it if it has ended; its exit code, or None if it runs, or somebody traces it and sees its end first."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # whoever has started us lets the kernel reap children
                pid, status = self.pid, 0
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, seconds: float) -> int | None:
        """Wait for its end; its exit code, or None if that has not come in time."""
        patience, poll = Patience(seconds), select.poll()
        while self.poll() is None and patience.left():
            poll.poll(1e3 * _LOOK)
        return self.returncode


def _become(
    command: Sequence[str],
    program: str,
    environment: Mapping[str, str],
    output: tuple[int, int],
    inherited: Sequence[int],
    prepare: Callable[[], None],
    told: int,
) -> NoReturn:
    """Become the program, in the child; or tell why that cannot be."""
    code = 0
    try:
        _reset_signals()
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for descriptor, standard in zip((null, *output), range(3), strict=True):
            os.dup2(descriptor, standard)
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        prepare()
        _close_all_but({0, 1, 2, told, *inherited})
        os.execve(program, list(command), dict(environment))
    except OSError as error:
        code = error.errno or 0
    except BaseException:  # nothing of it may run as if it were its parent
        pass
    finally:
        with contextlib.suppress(OSError):
            os.write(told, _CODE.pack(code))
        os._exit(_NOT_STARTED)


def _reset_signals() -> None:
    """Have signals end this process instead of telling its parent."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def _close_all_but(kept: set[int]) -> None:
    """Close descriptors that would be inherited, as those that came with our own start without close-on-exec."""
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(entry))
