"""Which tests may run beside which when pytest-xdist runs two at a time, as `make test` does (`--dist loadgroup`).

Tests of a group run one after the other in one process: those that share a job, or the fixtures of a directory or of a
module. What judges times closely, or looks for what others leave on this machine, runs last and alone: the process that
runs it holds a lock that the other one would need.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .on_ranks import Ranks
from .shared_jobs import key_of

ALONE = ("fault", "hosts", "strange")
"""Directories whose tests run alone."""
TOGETHER = ("gpu", "metrics", "mxnet", "packaging")
"""Directories whose tests share what takes long to make."""


def alone(item: pytest.Item | None) -> bool | None:
    """Whether a test runs alone; None of no test."""
    return None if item is None else item.path.parent.name in ALONE


def group_of(item: pytest.Item) -> str:
    """The name of the group that a test belongs to."""
    directory = item.path.parent.name
    if directory in ALONE:
        return "alone"
    if (key := key_of(item)) is not None and isinstance(key[1], Ranks):  # with `--only-ranks` there may be none
        place, ranks = key
        variables = hashlib.sha256(repr((place, ranks.env, ranks.python)).encode()).hexdigest()[:6]
        return f"{Path(place).name}-{ranks}-{variables}".replace(" ", "-")
    return directory if directory in TOGETHER else f"{directory}/{item.path.stem}"


class SideBySide:
    """Of one of the processes that run tests: a plugin.

    Parameters
    ----------
    run : str
        Names the run: alike in all its processes, and in no other run.
    """

    def __init__(self, run: str) -> None:
        self.path = Path(tempfile.gettempdir()) / f"tests-side-by-side-{run}"
        self._lock = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Group the tests, and put those last that run alone: before pytest-xdist looks at the marks."""
        items.sort(key=lambda item: bool(alone(item)))
        for item in items:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Hold the lock from the first of several tests of a kind to the last. No test's time has begun yet."""
        if not self._held:
            fcntl.flock(self._lock, fcntl.LOCK_EX if alone(item) else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            self._held = alone(nextitem) == alone(item)
            if not self._held:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def pytest_unconfigure(self) -> None:
        os.close(self._lock)
        self.path.unlink(missing_ok=True)
