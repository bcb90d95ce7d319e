"""The timeline of one rank: a file in Chrome's trace format that Perfetto opens, however the process ends.

A daemon thread writes what the engine has recorded, ten times a second: `Timeline.start` starts it, `stop` ends it.
The file is one JSON array, an event per line. The closing bracket comes last; the format allows it to be missing.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.logs import logger

if TYPE_CHECKING:
    from engine.native import core

VERSION = 1
RATE = 8000  # lines a second that a rank writes in the mean, at most: about 0.5 % of a processor
PERIOD = 0.1  # seconds between two looks
RESERVE = 1 << 16  # bytes of the limit for totals and the end
TOTALS_EVERY = 1.0  # seconds, at first
PATIENCE = 10.0  # seconds that the end waits for a disk
PAGE = 4096
LINE = 150  # bytes, about
ROWS = {1: "steps", 2: "callers waiting", 3: "entries", 4: "fuse", 5: "reduce", 6: "unpack", 7: "cycles"}  # tracer.pyx


def path_of(target: str | os.PathLike[str], rank: int) -> Path:
    """The file of one rank: `DIR/rank.N.trace.json`, or `NAME.rankN.json` where the target is `NAME.json`."""
    path = Path(os.path.abspath(os.path.expanduser(target)))
    if path.suffix == ".json" and not path.is_dir():
        return path.with_name(f"{path.stem}.rank{rank}.json")
    return path / f"rank.{rank}.trace.json"


class Timeline:
    """A recording, from `start` to `stop`.

    Parameters
    ----------
    target : path
        See `path_of`. An existing file is overwritten.
    rank, size : int
    limit : int
        Bytes that the file may grow to.
    mark_cycles : bool
        Show when each batch was closed.

    Raises
    ------
    OSError
        The file cannot be made.
    """

    def __init__(self, target: str | os.PathLike[str], rank: int, size: int, limit: int, mark_cycles: bool) -> None:
        self.path = path_of(target, rank)
        self._rank = rank
        self._size = size
        self._limit = max(limit, 2 * RESERVE)
        self._mark_cycles = mark_cycles
        self._offset = 0
        self._failed = False
        self._full = False
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o600)

    def start(self, engine: core.Engine) -> None:
        """Begin to record and to write.

        Raises
        ------
        EngineError
            The engine is recording for another timeline.
        """
        from engine.native import tracer  # Here: the command that reads timelines needs no extension.

        self._tracer = tracer.Tracer(engine)
        self._tracer.start(self._rate(0.0))
        self._started = self._reported = time.monotonic()
        self._head()
        self._thread = threading.Thread(target=self._run, name="engine-timeline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write what is left and close the file. The engine may have been closed before."""
        if self._thread is not None:
            self._tracer.stop()
            self._ending.set()
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                logger.warning("the timeline %s is not complete: a write has not ended in %g s", self.path, PATIENCE)
                return  # The thread still has the file, which is valid as it is.
            self._write(self._drain)
            self._write(self._totals)
            self._write(lambda: self._put("]\n"))
        os.close(self._file)

    def _run(self) -> None:
        while not self._ending.wait(PERIOD):
            elapsed = time.monotonic() - self._started
            self._tracer.set_rate(self._rate(elapsed))
            self._write(self._drain)
            if elapsed - (self._reported - self._started) >= max(TOTALS_EVERY, elapsed / 50):
                self._reported = time.monotonic()
                self._write(self._totals)

    def _rate(self, elapsed: float) -> int:
        """Lines a second. They become fewer with time, so that a file within its limit spans a run of any length."""
        return int(min(RATE, self._limit / (20 * LINE) / max(elapsed, 1.0)))

    def _drain(self) -> None:
        self._offset = self._tracer.drain(self._file, self._offset, self._limit - RESERVE, self._mark_cycles)
        if self._tracer.left_out and not self._full:
            self._full = True
            logger.warning(
                "the timeline %s has reached its limit of %d bytes and shows no more", self.path, self._limit
            )

    def _write(self, action: Any) -> None:
        """What cannot be written ends the timeline, not the program."""
        if self._failed:
            return
        try:
            action()
        except OSError as error:
            self._failed = True
            logger.warning("the timeline %s ends here: %s", self.path, error)

    def _put(self, line: str) -> None:
        """Append one line, in one call, on one page if it is not longer."""
        data = line.encode()
        left = PAGE - self._offset % PAGE
        if left < len(data) <= PAGE:
            self._offset += os.write(self._file, b" " * left)
        self._offset += os.write(self._file, data)

    def _event(self, name: str, args: dict[str, Any], **fields: Any) -> None:
        event = {"ph": "M", "pid": self._rank, **fields, "name": name, "args": args}
        self._put(("," if self._offset else "[") + json.dumps(event, separators=(",", ":")) + "\n")

    def _head(self) -> None:
        about = {"version": VERSION, "rank": self._rank, "size": self._size, "pid": os.getpid(), "time": time.time()}
        self._event("engine_timeline", {**about, "host": platform.node(), "boot": _boot()})
        self._event("process_name", {"name": f"rank {self._rank}"})
        self._event("process_sort_index", {"sort_index": self._rank})
        for row, name in ROWS.items():
            if name != "cycles" or self._mark_cycles:
                self._event("thread_name", {"name": name}, tid=row)

    def _totals(self) -> None:
        if self._offset < self._limit - PAGE:
            self._event("engine_totals", {**self._tracer.totals(), "left_out": self._tracer.left_out})


def _boot() -> str:
    """What tells whether two files share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
