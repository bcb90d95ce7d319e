"""Jobs of real processes. After each test no process of its jobs may be left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..waiting import marked
from .launch_jobs import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Give a launcher whose jobs must leave nothing behind."""
    made = Launcher(tmp_path)
    try:
        yield made
        assert all(process.poll() is not None for process in made.started)
        made.nothing_left()
    finally:
        for pid in marked(made.mark):
            os.kill(pid, signal.SIGKILL)
        for process in made.started:
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
