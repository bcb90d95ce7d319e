"""What the tests of metrics share: the sources of the dashboards, and a Prometheus."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # `grafana` is not installed; what is installed comes first

from prometheus_server import Programs, Unavailable, find


@pytest.fixture(scope="session")
def prometheus() -> Programs:
    """The programs of a real Prometheus."""
    try:
        return find()
    except Unavailable as error:
        pytest.skip(f"needs Prometheus: {error}")
