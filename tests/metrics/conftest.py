"""Fixtures of the metrics tests: jobs that hold pages of counters, and a Prometheus."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from .prometheus_server import Programs, Unavailable, find
from .watched_jobs import FakeJob


@pytest.fixture
def fake_job() -> Iterator[Callable[..., FakeJob]]:
    """Start jobs that end with the test."""
    started: list[FakeJob] = []

    def start(size: int = 3, name: str = "") -> FakeJob:
        started.append(FakeJob(size, name or f"fake-{os.getpid()}-{len(started)}"))
        return started[-1]

    yield start
    for job in started:
        job.process.communicate(timeout=60)


@pytest.fixture(scope="session")
def prometheus() -> Programs:
    """Executables of a real Prometheus."""
    try:
        return find()
    except Unavailable as error:
        pytest.skip(f"needs Prometheus: {error}")
