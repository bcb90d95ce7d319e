"""A child process that is started asynchronously.

`subprocess.Popen` returns only when the program has been found. If its file system hangs, that may take minutes, in
which an agent could not serve its other workers or keep its lease. So this forks, and reports the result later.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from ...host import linux, processes
from ...host.patience import Patience

_CODE = struct.Struct("=i")
_LOOK = 0.01  # seconds between two polls for the end
_NOT_STARTED = 127


class Child:
    """A child process, from its fork on. The forking process must have only one thread.

    It inherits the descriptors `inherited` under the same numbers; its stdin is the null device, and the two of
    `output` become its stdout and stderr. It calls `prepare` before exec.
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
        self.returncode: int | None = None  # same as in `subprocess.Popen`
        self._failure: OSError | None = None
        self.started, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        collects = gc.isenabled()
        gc.disable()  # no finalizer of the parent may run in the child
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _execute_program(command, program, environment, output, inherited, prepare, writing)
        except OSError:
            os.close(self.started)
            raise
        finally:
            os.close(writing)
            if collects:
                gc.enable()

    def read_failure(self) -> OSError | None:
        """Return why the program could not be started; None if it could, or if that is not known yet (`started`)."""
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
        """Wait until the program has been started; raise an `OSError` if it cannot be: then the process has ended."""
        poll = select.poll()
        poll.register(self.started, select.POLLIN)
        poll.poll()
        if (failure := self.read_failure()) is not None:
            self.wait(1.0)
            raise failure

    def poll(self) -> int | None:
        """Reap the process if it has ended, and return its exit code.

        None if it runs, or if a tracer must see its end first.
        """
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored (inherited), so the kernel reaps children
                pid, status = self.pid, 0
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the end, and return the exit code; None if the end has not come."""
        patience = Patience(seconds)
        while self.poll() is None and patience.seconds_left():
            time.sleep(_LOOK)
        return self.returncode


def _execute_program(
    command: Sequence[str],
    program: str,
    environment: Mapping[str, str],
    output: tuple[int, int],
    inherited: Sequence[int],
    prepare: Callable[[], None],
    told: int,
) -> NoReturn:
    """Execute the program; if that fails, write the error number to `told` and exit. Runs in the child."""
    code = 0
    try:
        _reset_signals()
        null = linux.open_empty_input()
        for descriptor, standard in zip((null, *output), range(3), strict=True):
            os.dup2(descriptor, standard)
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        prepare()
        processes.close_descriptors({0, 1, 2, told, *inherited})
        os.execve(program, list(command), dict(environment))
    except OSError as error:
        code = error.errno or 0
    except BaseException:  # the child must never continue in the parent's code
        pass
    finally:
        with contextlib.suppress(OSError):
            os.write(told, _CODE.pack(code))
        os._exit(_NOT_STARTED)


def _reset_signals() -> None:
    """Restore the default actions of signals that the parent handles."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
