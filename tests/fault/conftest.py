"""After each test nothing of its jobs may be left: sockets and files here, processes and /dev/shm in `ranks`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..waiting import until
from .faults import abstract_sockets


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test, and its jobs, a directory for temporary files, and look into it at the end."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    caches = ("torch", "__pycache__")  # torch keeps one; TensorFlow compiles there what it has written anew
    assert not [path for path in temporary.iterdir() if not path.name.startswith(caches)]
    here = abstract_sockets()
    until(lambda: not here & abstract_sockets(), "the sockets of rendezvous are gone")
