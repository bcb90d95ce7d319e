"""Tests here run with an interpreter that has MXNet, in an environment that the first of them makes."""

from __future__ import annotations

import pytest

from . import environment


@pytest.fixture(scope="package", autouse=True)
def mxnet_python() -> str:
    """Interpreter that has MXNet."""
    try:
        return str(environment.make())
    except environment.NotToBeHadError as reason:
        pytest.skip(str(reason))
