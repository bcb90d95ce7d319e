"""Timeline of one rank in Chrome's trace format, for Perfetto; the file stays valid however the process ends.

A daemon thread, from `Timeline.start` to `stop`, writes the records of this rank's engines ten times a second: those of
the world and of its process sets. The file is one JSON array with an event per line. The closing bracket comes last;
the format allows it to be missing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..host import private_files
from ..host.linux import explain_briefly
from ..host.machine import absolute_path, read_boot_id
from ..text import readable
from ..text.logs import logger
from .flight import WORLD

if TYPE_CHECKING:
    from ..collectives.process_sets import ProcessSetEngines
    from ..native import core, tracer

_P = TypeVar("_P")

VERSION = 2
RATE = 8000  # maximum lines per second that a rank writes on average: about 0.5 % of a processor
BURST = 5.0  # seconds' worth of lines that may be written at once at the beginning
PERIOD = 0.1  # seconds between two drains
RESERVE = 1 << 16  # bytes of the limit that are reserved for totals and the end
TOTALS_EVERY = 1.0  # seconds between two lines of totals, at first
PATIENCE = 10.0  # seconds that `stop` waits for a slow disk
PAGE = 4096
LINE = 150  # typical bytes of a line
HEAD, SET, TOTALS = "engine_timeline", "engine_process_set", "engine_totals"  # keys in a `process_name` event
KNOBS = "engine_knobs"  # key that accompanies HEAD, SET and TOTALS
SETS = 1000  # rank 2 is process 2 of the trace, and in process set 3 it is process 3002
GROUPS = 10**6  # and in the group that it has formed as its third, process 1000003002
ROWS = {1: "steps", 2: "callers waiting", 3: "entries", 4: "fuse", 5: "reduce", 6: "unpack", 7: "cycles"}  # tracer.pyx
DEVICE_ROW = 8  # row of GPU samples; tracer.pyx names it at its first event
LATE_ROW = 9  # row of late steps; likewise


def path_of(target: str | os.PathLike[str], rank: int, number: int | None = None) -> Path:
    """Return the file of one rank: `DIR/rank.N.trace.json`, or `NAME.rankN.json` if the target is `NAME.json`.

    In an elastic job, whose worlds have numbers: `DIR/world.K/rank.N.trace.json` or `NAME.worldK.rankN.json`.

    Raises TypeError if the target is not a path, and ValueError if it is empty or contains a NUL.
    """
    if not isinstance(target, str | os.PathLike):
        raise TypeError(f"a timeline goes to a path, as a str or a pathlib.Path, not {target!r}")
    text = os.fsdecode(target)
    if not text.strip():
        raise ValueError("a timeline goes to NAME.json, or to a directory; the path is empty ('.' is this directory)")
    if "\0" in text:
        raise ValueError(f"a timeline cannot go to {text!r}: a path has no NUL")
    path = absolute_path(text)
    if path.suffix == ".json" and not path.is_dir():
        return path.with_name(f"{path.stem}{'' if number is None else f'.world{number}'}.rank{rank}.json")
    return (path if number is None else path / f"{WORLD}{number}") / f"rank.{rank}.trace.json"


def describe_set(ranks: Sequence[int], number: int, group: str = "") -> str:
    """Describe a process set: `among ranks 0-2, 5 (set 1)`; with a name `among ranks 0-2, 5 (group 'tp')`."""
    return f"among {readable.format_ranks(ranks, most=8)} ({f'group {group!r}' if group else f'set {number}'})"


class _Track:
    """Track of one engine in the file.

    `number` is that of the process set. 0: the world; groups that their members alone have formed are counted down from
    -1 by each rank.
    """

    def __init__(self, number: int, engine: core.Engine) -> None:
        from ..native import tracer  # Here: the command that reads timelines needs no extension.

        self.number = number
        self.rank = engine.number
        self.ranks = engine.numbers
        self.process = engine.number + SETS * (number if number >= 0 else GROUPS - number)
        self.engine = engine
        self.group = engine.group_name  # as the file has it
        self.tracer: tracer.Tracer = tracer.Tracer(engine, self.process)
        self.named = False

    @property
    def title(self) -> str:
        """Name that the viewer shows."""
        return f"rank {self.rank}" + (f" {describe_set(self.ranks, self.number, self.group)}" if self.number else "")

    @property
    def place(self) -> int:
        """Place of the track below that of the rank's world: groups come after process sets."""
        return min(self.number if self.number >= 0 else SETS // 2 - self.number, SETS - 1)


class Timeline:
    """Recording of one rank's timeline, from `start` to `stop`.

    An existing file at the path, see `path_of`, is overwritten. `number` is that of the world in an elastic job. Raises
    the errors of `path_of`, and OSError if the file cannot be created or another running job writes to it.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        rank: int,
        size: int,
        limit: int,
        mark_cycles: bool,
        number: int | None = None,
        elastic: Mapping[str, int | str] | None = None,
    ) -> None:
        self.path = path_of(target, rank, number)
        self._rank = rank
        self._size = size
        self._limit = max(limit, 2 * RESERVE)  # maximum bytes of the file
        self._mark_cycles = mark_cycles  # whether to mark the closing of each batch
        self._world = ""
        self._elastic = dict(elastic or {})  # fields of `World.elastic`, for the header
        self._tracks: list[_Track] = []
        self._burst = BURST  # seconds' worth of lines at once that are left for sets added later
        self._offset = 0
        self._failed = False
        self._full = False
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._file = self._open()

    def _open(self) -> int:
        try:
            private_files.make_missing(self.path.parent)
            descriptor = private_files.open_file(self.path)
            try:
                _lock_file(descriptor)
                os.ftruncate(descriptor, 0)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor
        except OSError as error:
            why = explain_briefly(error)
            if isinstance(error, BlockingIOError):
                why = "another running job writes to this file; choose another path"
            elif isinstance(error, NotADirectoryError):
                why = f"{self.path.parent} is no directory"
            raise type(error)(
                error.errno, f"rank {self._rank} cannot write its timeline: {why}", str(self.path)
            ) from None

    def start(self, engine: core.Engine, sets: ProcessSetEngines, hosts: int, world: str = "") -> None:
        """Start to record and to write.

        Call `add` for process sets that are added later. `world` is unique to this world; empty on one host. On several
        hosts, times are by the clock of rank 0's host, once this host's clock has been compared with it. Raises
        EngineError if the engine is recording for another timeline.
        """
        self._sets, self._hosts, self._world = sets, hosts, world
        self._started = self._reported = time.monotonic()
        for number, each in ((0, engine), *sets.engines.items()):
            if number >= 0 or each.group_name:  # by which a reader finds out which belong together
                self._record(number, each, BURST)
        for track in self._tracks:
            self._write(self._drain, track)
        thread = threading.Thread(target=self._run, name="engine-timeline", daemon=True)
        thread.start()
        self._thread = thread

    def add(self, number: int, engine: core.Engine) -> None:
        """Record a process set, too, until its removal. Writes nothing, so it does not block on the disk."""
        if all(track.number != number for track in list(self._tracks)):
            share = min(self._burst, BURST / self._sets.largest_membership)
            self._burst -= share
            try:
                self._record(number, engine, share * self._sets.largest_membership)
            except MemoryError as error:
                name = engine.group_name or str(number)
                logger.warning("process set %s is not in the timeline %s: %s", name, self.path, error)

    def _record(self, number: int, engine: core.Engine, saved: float) -> None:
        track = _Track(number, engine)
        track.tracer.start(self._compute_rate(), saved)
        self._tracks.append(track)

    def stop(self) -> None:
        """Write the remaining records and close the file. The engine may be closed already."""
        if self._thread is not None:
            for track in list(self._tracks):
                track.tracer.stop()
            self._ending.set()
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                logger.warning("the timeline %s is not complete: a write has not ended in %g s", self.path, PATIENCE)
                return  # The thread still uses the file, which is valid as it is.
            for track in self._tracks:
                self._write(self._finish, track)
            self._write(self._put, "]\n")
        try:
            if self._thread is None and self._offset == 0:  # Nothing was ever written.
                self.path.unlink(missing_ok=True)
        finally:
            os.close(self._file)

    def _run(self) -> None:
        while not self._ending.wait(PERIOD):
            now, elapsed = time.monotonic(), time.monotonic() - self._started
            report = now - self._reported >= max(TOTALS_EVERY, elapsed / 50)
            if report:
                self._reported = now
            for track in list(self._tracks):
                if track.tracer.closed:  # Nothing more will be recorded.
                    track.tracer.stop()
                    self._write(self._finish, track)
                    self._tracks.remove(track)
                    continue
                track.tracer.set_rate(self._compute_rate())
                self._write(self._drain, track)
                if report:
                    self._write(self._write_totals, track)

    def _compute_rate(self) -> int:
        """Return the lines per second of one engine.

        The rate falls with time, so that a file within its limit covers a run of any length. The coordinator of each
        engine decides by itself what its ranks record. Therefore all engines of a rank share the rate, sized for the
        rank that is in most process sets.
        """
        elapsed = time.monotonic() - self._started
        return int(min(RATE, self._limit / (20 * LINE) / max(elapsed, 1.0)) / self._sets.largest_membership)

    def _drain(self, track: _Track) -> None:
        if not track.tracer.clocked and not self._ending.is_set() and not track.tracer.closed:
            return  # Records wait until times can be converted to the clock of rank 0's host.
        if not track.named:
            track.named = True
            self._name(track)
        elif track.group != track.engine.group_name:  # torch names a group after it is formed
            self._tell_set(track)
        limit = self._limit - RESERVE
        self._offset = track.tracer.drain(self._file, self._offset, limit, self._mark_cycles)
        if track.tracer.left_out and not self._full:
            self._full = True
            logger.warning(
                "the timeline %s has reached its limit of %d bytes and shows no more", self.path, self._limit
            )

    def _finish(self, track: _Track) -> None:
        """Write the remaining records and totals of an engine that has ended."""
        self._drain(track)
        self._write_totals(track)

    def _write(self, action: Callable[[_P], None], what: _P) -> None:
        """Run an action that writes to the file; an error ends the timeline, not the program."""
        if self._failed:
            return
        try:
            action(what)
        except OSError as error:
            self._failed = True
            logger.warning("the timeline %s ends here: %s", self.path, error)

    def _put(self, line: str) -> None:
        """Append one line in one call, within one page if it is not longer than a page."""
        data = line.encode()
        left = PAGE - self._offset % PAGE
        if left < len(data) <= PAGE:
            self._offset += os.write(self._file, b" " * left)
        self._offset += os.write(self._file, data)

    def _write_event(self, track: _Track, name: str, args: dict[str, Any], **fields: Any) -> None:
        if self._offset > self._limit - 2 * PAGE:  # A line may be moved to the next page; the end takes one, too.
            return
        event = {"ph": "M", "pid": track.process, **fields, "name": name, "args": args}
        self._put(("," if self._offset else "[") + json.dumps(event, separators=(",", ":")) + "\n")

    def _tell(self, track: _Track, key: str, told: dict[str, Any]) -> None:
        """Write the `process_name` event of a track, with the knobs and further data for `engine.trace`.

        The data have no event of their own, because viewers complain about unknown events.
        """
        self._write_event(track, "process_name", {"name": track.title, key: told, KNOBS: track.engine.knobs()})

    def _name(self, track: _Track) -> None:
        if track.number:
            self._tell_set(track)
        else:
            about = {"version": VERSION, "rank": self._rank, "size": self._size, "pid": os.getpid(), **self._elastic}
            host: dict[str, Any] = {"host": platform.node(), "hosts": self._hosts, "boot": self._get_clock_id(track)}
            if (clock := track.engine.clock()) is not None and self._world:
                host |= {"ahead_ns": clock[0], "ahead_error_ns": clock[1], "own_boot": read_boot_id()}
            self._tell(track, HEAD, {**about, "time": time.time(), **host})
        self._write_event(track, "process_sort_index", {"sort_index": SETS * self._rank + track.place})
        for row, name in ROWS.items():
            if name != "cycles" or self._mark_cycles:
                self._write_event(track, "thread_name", {"name": name}, tid=row)

    def _tell_set(self, track: _Track) -> None:
        track.group = track.engine.group_name
        group = {"group": track.group} if track.group else {}
        self._tell(track, SET, {"rank": self._rank, "id": track.number, "ranks": list(track.ranks), **group})

    def _get_clock_id(self, track: _Track) -> str:
        """Return a text that is equal for files that share a clock."""
        return self._world if self._world and track.tracer.clocked else read_boot_id()

    def _write_totals(self, track: _Track) -> None:
        if not track.named:
            return
        self._tell(track, TOTALS, {**track.tracer.totals(), "left_out": track.tracer.left_out})


def _lock_file(descriptor: int) -> None:
    """Lock the file until it is closed, so that no other process writes a timeline into it.

    The lock belongs to the process: a later world of the same process gets it, even if an earlier one left the file
    open, and a forked child does not inherit it. On a file system without locks, the file is written without one.
    Raises BlockingIOError if another process holds the lock.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(error.errno, error.strerror) from None
