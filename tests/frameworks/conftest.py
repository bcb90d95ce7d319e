"""Fixture `wrap`: a test that asks for it runs with gradients where the framework puts them, and in shared memory."""

from __future__ import annotations

import pytest

from .wrapping import Wrap


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "wrap" in metafunc.fixturenames:
        metafunc.parametrize("wrap", [Wrap(False), Wrap(True)], ids=["plain", "in_views"])
