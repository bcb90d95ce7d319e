"""Fixtures of the unit tests: the kernels, compiled once for each state of their sources."""

from __future__ import annotations

import ctypes
import os

import pytest

from .kernel_library import LEVELS, LIBRARY, Kernels, build, build_once, load


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    cache = getattr(request.config, "cache", None)  # None without pytest's plugin for it, as in the sanitized run
    if cache is None or LIBRARY in os.environ:
        return load(build(tmp_path_factory.mktemp("kernels")))
    return load(build_once(cache.mkdir("kernels")))


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Kernels:
    table = library.engine_kernels_get(LEVELS.index(request.param))
    if not table:
        pytest.skip(f"this processor has no {request.param}")
    return table.contents
