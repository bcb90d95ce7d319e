"""Monitoring of one engine in a Python process: monitor thread, exception hook, signal handler, exit.

The monitor is a daemon thread. `Monitor.start` starts it; it ends when the engine has been closed, and `Monitor.stop`
waits for that. It logs failures and stalls of the world, and writes the files about them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ..errors import WorldError
from ..errors.formatting import exception_text
from ..exit_report import writer
from ..host.signals import FLIGHT
from ..host.stacks import NOT_THE_USERS
from ..native import core
from ..text import readable
from ..text.logs import logger
from ..trace.flight import Recorder, make_record, read_clocks
from .registry import ProcessSetRegistry

TRACEBACK = "traceback.txt"
TOLD_SECONDS = 2.0  # longest wait of a line about an exception for the line about the failure
SHOWN = 3  # largest number of names in one line of a stall report


def summarize_exception(kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> str:
    """Format an exception in one line, with its place in the user's code: `ValueError: bad batch at train.py:12`."""
    text = [] if value is None else exception_text(value).strip().splitlines()
    where = ""
    frames = traceback.extract_tb(trace)
    if frames:
        own = [frame for frame in frames if not any(part in frame.filename for part in NOT_THE_USERS)]
        last = (own or frames)[-1]
        where = f" at {Path(last.filename).name}:{last.lineno}"
    return kind.__name__ + (f": {text[0]}" if value is not None and text else "") + where


def describe_waits(pending: list[dict[str, Any]], coordinator: int) -> list[str]:
    """Return lines about operations in flight and the ranks they wait for, one line for each set of such ranks.

    `pending` has operations from `Engine.pending`, without those that the coordinator, given by its world rank, reports
    itself.
    """
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in pending:
        if entry["missing"] != []:  # Otherwise all ranks have submitted it, and it only waits for its turn.
            key = tuple(entry["missing"] or ()), tuple(entry["brought"]), entry["kind"]
            alike.setdefault(key, []).append(entry)
    lines = []
    for (missing, brought, kind), entries in alike.items():
        names = ", ".join(repr(entry["name"]) for entry in entries[:SHOWN])
        more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
        who = readable.format_ranks(missing) if missing else f"ranks unknown here (rank {coordinator} knows)"
        told = f"; submitted by {readable.format_ranks(brought)}" if brought else ""
        have = "has" if len(entries) == 1 else "have"
        lines.append(f"{names}{more} ({kind}) {have} waited {entries[0]['seconds']:.0f} s for {who}{told}")
    return lines


class Monitor:
    """Hooks and monitor thread of one engine, from `start` to `stop`."""

    def __init__(self, engine: core.Engine, sets: ProcessSetRegistry, recorder: Recorder) -> None:
        self._engine = engine
        self._sets = sets
        self._recorder = recorder
        self._pid = os.getpid()
        self._reported = threading.Lock()
        self._stderr = threading.RLock()  # held while a thread writes about a failure
        self._told = threading.Event()  # set once a thread has reported the failure
        self._thread = threading.Thread(target=self._run, name="engine-monitor", daemon=True)
        self._chained: Callable[..., Any] = sys.excepthook
        self._handles_signal = False

    def start(self) -> None:
        """Start the thread and install the hooks."""
        writer.claim_rank()
        writer.clear()
        self._thread.start()
        self._chained, sys.excepthook = sys.excepthook, self._handle_uncaught
        if threading.current_thread() is threading.main_thread() and signal.getsignal(FLIGHT) is signal.SIG_DFL:
            # Python runs the handler when the main thread next executes Python code. A wait in the engine does so every
            # 100 ms; other native code delays the handler for as long as it runs.
            signal.signal(FLIGHT, self._on_signal)
            self._handles_signal = True

    def stop(self, timeout: float) -> None:
        """Remove the hooks and wait for the thread. The engine must have been closed."""
        # A hook that wraps ours stays installed. Ours then only calls the next one: a closed engine ignores aborts.
        if sys.excepthook == self._handle_uncaught:
            sys.excepthook = self._chained
        if self._handles_signal and threading.current_thread() is threading.main_thread():
            if signal.getsignal(FLIGHT) == self._on_signal:
                signal.signal(FLIGHT, signal.SIG_DFL)
            self._handles_signal = False
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def await_failure(self, seconds: float) -> bool:
        """Wait at most `seconds` until the world has failed and this rank has reported it; return whether it has."""
        return self._engine.failure is not None or self._told.wait(seconds)

    def report_failure(self) -> None:
        """Write the world's first cause and this rank's flight record, once. Also called when a process ends."""
        failure = self._engine.failure
        if failure is None or not self._reported.acquire(blocking=False):
            return
        rank, cause = self._engine.rank, "raised"
        if isinstance(failure, WorldError):
            rank, cause = failure.rank, failure.cause
        content = {"rank": rank, "cause": cause, "message": str(failure), **read_clocks(self._engine)}
        writer.report_failure(rank, cause, str(failure), time.time())
        try:
            path = self._write("failure.json", content)
            self._write_flight_record("abort")
            with self._hold_stderr():
                logger.error("%s (details in %s)", failure, path.parent if path else "no file")
        finally:
            self._told.set()

    def finish_report(self) -> None:
        """Wait until a failure of the world is reported, while this rank's process sets are still in the record."""
        if self._engine.failure is not None:
            self._await_report()

    def _await_report(self) -> None:
        """Report a failure, unless another thread does; wait at most 2 s for that."""
        self.report_failure()
        self._told.wait(TOLD_SECONDS)

    def _run(self) -> None:
        while True:
            event = self._engine.monitor()
            if event == "closed":
                return
            if event == "abort":
                self.report_failure()
            elif event == "stall":
                self._report_stall()
            else:
                logger.warning("SIGUSR1: schedule entries in %s", self._write_flight_record("signal"))

    def _report_stall(self) -> None:
        lines = []
        for engine in (self._engine, *self._sets.engines.values()):
            among = readable.format_members(engine.numbers, engine.group_name)
            where = "" if engine is self._engine else f" {among}"
            lines += [line + where for line in engine.overdue()]
            pending = [entry for entry in engine.pending() if engine.rank != 0 or entry["missing"] is not None]
            lines += [line + where for line in describe_waits(pending, engine.numbers[0])]
        path = self._write_flight_record("stall")
        if not lines:
            return
        logger.warning("stalled; schedule entries in %s\n  %s", path, "\n  ".join(lines))

    def _write_flight_record(self, reason: str) -> Path | None:
        return self._write("flight.json", make_record(self._engine, self._sets.engines, reason))

    def _write(self, name: str, content: dict[str, Any]) -> Path | None:
        """Write a file of a report. An error, such as a full disk, is only logged, so as not to hide the failure."""
        try:
            return self._recorder.write(name, content)
        except OSError as error:
            logger.error("cannot write %s: %s", name, error)
            return None

    def _handle_uncaught(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        """Tell the other ranks why this one ends, before the other hooks run.

        It is not called for `SystemExit`: a rank that exits, with any code, counts as having left.
        """
        if os.getpid() != self._pid:
            self._chained(kind, value, trace)
            return
        self._engine.abort(summarize_exception(kind, value, trace))
        writer.report_exception(value.with_traceback(trace))
        if self._chained is not sys.__excepthook__ or not self._show_in_one_line(kind, value, trace):
            with self._hold_stderr():
                self._chained(kind, value, trace)

    @contextlib.contextmanager
    def _hold_stderr(self) -> Iterator[None]:
        """Hold the lock of stderr, so that the line about a failure does not split a traceback.

        The wait for the lock has a time-out, so that a hook that waits for its user cannot block that line for long.
        """
        held = self._stderr.acquire(timeout=TOLD_SECONDS)
        try:
            yield
        finally:
            if held:
                self._stderr.release()

    def _show_in_one_line(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> bool:
        """Show an exception without news in one line, with its traceback in a file; False: show it in full.

        If many ranks fail because of one, or are interrupted together, their tracebacks would hide the important one.
        """
        another = isinstance(value, WorldError) and value.rank != self._engine.rank
        if not self._recorder.kept or not (another or issubclass(kind, KeyboardInterrupt)):
            return False
        self._await_report()  # The monitor thread may be about to report the cause, which has to go first.
        try:
            path = self._recorder.write_text(TRACEBACK, "".join(traceback.format_exception(kind, value, trace)))
        except OSError:
            return False
        # One write, so that no line of another thread can split it.
        sys.stderr.write(f"{summarize_exception(kind, None, trace)} (its traceback: {path})\n")
        sys.stderr.flush()
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._engine.notify_signal()
