"""Fixtures of the unit tests: the kernels, compiled once for a run."""

from __future__ import annotations

import ctypes

import pytest

from .kernel_library import LEVELS, Kernels, build, load


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load(build(tmp_path_factory.mktemp("kernels")))


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Kernels:
    table = library.engine_kernels_get(LEVELS.index(request.param))
    if not table:
        pytest.skip(f"this processor has no {request.param}")
    return table.contents
