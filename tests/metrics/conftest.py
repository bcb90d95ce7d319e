"""Jobs that hold pages of counters, for tests of who reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from watched_jobs import FakeJob


@pytest.fixture
def fake_job() -> Iterator[Callable[..., FakeJob]]:
    """Start jobs that end with the test."""
    started: list[FakeJob] = []

    def start(size: int = 3, name: str = "") -> FakeJob:
        started.append(FakeJob(size, name or f"fake-{os.getpid()}-{len(started)}"))
        return started[-1]

    yield start
    for job in started:
        job.process.communicate(timeout=20)
