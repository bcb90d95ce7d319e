"""The Spark application of the tests of this directory."""

from collections.abc import Iterator
from typing import Any

import pytest

from .sessions import Spark


@pytest.fixture(scope="session")
def application() -> Iterator[Spark]:
    """Holder of the Spark application, which gives the session that a module asks for."""
    found = Spark()
    yield found
    found.end()


@pytest.fixture(scope="module")
def spark(application: Spark) -> Any:
    """Session with two slots in one process, unless a module overrides it."""
    return application.session("local[2]")
