"""Textfile for node_exporter's collector, for hosts where Prometheus reaches nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ...host import linux
from ..errors import MetricsError
from . import atomic_file

PERIOD = 15.0  # seconds between two writes
STOP_LIMIT = 2.0


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
        if problem := atomic_file.check_directory(path):
            raise MetricsError(f"the textfile {str(path)!r} cannot be written: {problem}")
        self.path = path
        self._text = text
        self._say = say
        self._troubled = False
        self._over = threading.Event()
        # Started by `start`, woken and joined by `stop`, which waits for it for 2 s.
        self._thread = threading.Thread(target=self._write_on, name="engine-metrics-textfile", daemon=True)

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def stop(self) -> None:
        """Write the last state; wait at most 2 s for a slow disk."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(STOP_LIMIT)

    def _write_on(self) -> None:
        while not self._over.is_set():
            self._write()
            self._over.wait(PERIOD)
        self._write()

    def _write(self) -> None:
        try:
            atomic_file.replace(self.path, self._text())
        except OSError as error:
            if not self._troubled:
                self._say(f"metrics: cannot write {str(self.path)!r}: {linux.explain_briefly(error)}; goes on trying")
            self._troubled = True
        else:
            self._troubled = False
