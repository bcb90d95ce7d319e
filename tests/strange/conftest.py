"""Machines for one test each, which end all that they have started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .strange_machines import Machine, install


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the engine below a directory whose name has blanks and is not ASCII."""
    path = tmp_path_factory.mktemp("strange") / "Größe 1, 空白"
    install(path)
    return path


@pytest.fixture
def machine(tmp_path: Path, site: Path) -> Iterator[Machine]:
    """Machine on which a test runs its commands."""
    made = Machine(tmp_path, site)
    try:
        yield made
    finally:
        made.kill()
