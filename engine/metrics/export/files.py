"""Files of a job's metrics that others read at any moment: the target for Prometheus's file_sd, and the textfile."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from ...host import linux
from ...host.background import BackgroundThread
from ..errors import MetricsError

PERIOD = 15.0  # seconds between two writes
STOP_LIMIT = 2.0
MODE = 0o644  # Prometheus and node_exporter are other users


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees either the old content or the new.

    Raises OSError if the file cannot be written; the old content stays.
    """
    # The draft matches neither `*.json` nor `*.prom`, and two writers have different drafts.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, MODE)  # whatever the umask
            file.write(content)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def remove(path: Path, mark: bytes) -> None:
    """Remove a file if it contains `mark`, bytes of our file alone: another job may have replaced it. Never raises."""
    with contextlib.suppress(OSError):
        if mark in path.read_bytes():
            path.unlink()


def check_directory(path: Path) -> str | None:
    """Explain why the file `path` cannot be written to its directory; return None if it can."""
    if not path.parent.is_dir():
        return f"there is no directory {str(path.parent)!r}: make it"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"the directory {str(path.parent)!r} may not be written to: choose another, or change its mode"
    return None


def describe_endpoint(target: str, run: str, pid: int) -> bytes:
    """Describe the endpoint at `target` (`HOST:PORT`) in JSON for file_sd and http_sd of Prometheus.

    The run's name is a `__meta_` label, for relabelling, not a label of the target. Each series already has the label
    `run`, which Prometheus would rename `exported_run` if the target had one too. `pid` is the process that serves the
    endpoint; it distinguishes two jobs with the same name.
    """
    labels = {"__meta_engine_run": run, "__meta_engine_pid": str(pid)}
    return json.dumps([{"targets": [target], "labels": labels}]).encode() + b"\n"


def choose_file(path: Path, run: str) -> Path:
    """Choose the file to write: `path` itself if it is `*.json`, else a file named after the run in this directory.

    The directory is created if it does not exist. Raises MetricsError if the file cannot be written.
    """
    if path.suffix == ".json" and not path.is_dir():
        found = path
    else:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = linux.explain_briefly(error)
            raise MetricsError(
                f"no file for Prometheus's file_sd in {str(path)!r}: {why}; name a directory or a *.json"
            ) from error
        found = path / f"{run}.json"
    if problem := check_directory(found):
        raise MetricsError(f"no file for Prometheus's file_sd at {str(found)!r}: {problem}")
    return found


class Textfile:
    """Writer of a textfile, every 15 s and once more at the end. The last state of the run stays in the file.

    The path must be `*.prom`, as node_exporter reads no other files. `text` returns the whole content. `say` logs a
    line: the reason for the first of consecutive failed writes. Raises MetricsError if the file cannot be written.
    """

    def __init__(self, path: Path, text: Callable[[], bytes], say: Callable[[str], None]) -> None:
        if path.suffix != ".prom":
            raise MetricsError(f"the textfile {str(path)!r} is for node_exporter, which reads *.prom: name it so")
        if path.is_dir():
            raise MetricsError(f"the textfile {str(path)!r} is a directory: name a file in it")
        if problem := check_directory(path):
            raise MetricsError(f"the textfile {str(path)!r} cannot be written: {problem}")
        self.path = path
        self._text = text
        self._say = say
        self._troubled = False
        self._thread = BackgroundThread("engine-metrics-textfile", self._write_on)

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write the last state; wait at most 2 s for a slow disk."""
        self._thread.stop(STOP_LIMIT)

    def _write_on(self, over: threading.Event) -> None:
        while not over.is_set():
            self._write()
            over.wait(PERIOD)
        self._write()

    def _write(self) -> None:
        try:
            replace(self.path, self._text())
        except OSError as error:
            if not self._troubled:
                self._say(f"metrics: cannot write {str(self.path)!r}: {linux.explain_briefly(error)}; goes on trying")
            self._troubled = True
        else:
            self._troubled = False
