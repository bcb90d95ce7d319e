"""Check that a test's jobs leave nothing: sockets and files here, processes and /dev/shm in `ranks`.

A test that is only too late is run up to three times: other programs use the machine, too.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from ..waiting import until
from .faults import LateError, abstract_sockets

TIMES = 3


def pytest_itemcollected(item: pytest.Item) -> None:
    """Have each test of this directory repeated if it is late."""
    if isinstance(item, pytest.Function):
        item.obj = repeated(item.obj)


def repeated(test: Callable[..., None]) -> Callable[..., None]:
    """Return the test, repeated after a `LateError`, at most `TIMES` runs in all."""

    @wraps(test)
    def run(*args: Any, **options: Any) -> None:
        for left in reversed(range(TIMES)):
            try:
                test(*args, **options)
                return
            except LateError:
                if not left:
                    raise

    return run


@pytest.fixture(autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a test and its jobs a directory for temporary files, and check at the end that it is empty."""
    tmp_path_factory.getbasetemp()  # pytest's own directory is elsewhere
    temporary = Path(tempfile.mkdtemp(prefix="fault-"))  # a short path: Python's forkserver binds a socket below it
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    others = abstract_sockets()
    yield
    caches = ("torch", "__pycache__")  # torch keeps one; TensorFlow compiles its generated code there
    assert not [path for path in temporary.iterdir() if not path.name.startswith(caches)]
    here = abstract_sockets() - others  # other jobs may run on
    until(lambda: not here & abstract_sockets(), "the sockets of rendezvous are gone")
    shutil.rmtree(temporary)
