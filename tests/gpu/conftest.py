"""Fixtures: the stand-ins, and programs that run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ..standins import ROOT, build, build_program, kernels, start
from .jobs import Job, Start

LITMUS = ROOT / "benchmarks/gpu/litmus"
SECONDS = 60


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with both stand-ins."""
    return build(tmp_path_factory.mktemp("standins"))


@pytest.fixture(scope="session")
def registered(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Library with the shipped kernels, for the stand-in."""
    return kernels.build(tmp_path_factory.mktemp("registered"), libraries)


@pytest.fixture(scope="session")
def litmus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Executable with the litmus programs."""
    return build_program(tmp_path_factory.mktemp("litmus") / "litmus", *sorted(LITMUS.glob("*.c")))


@pytest.fixture(scope="session")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Executable with the programs of checks.c."""
    return build_program(
        tmp_path_factory.mktemp("checks") / "checks", Path(__file__).parent / "checks.c", LITMUS / "main.c"
    )


@pytest.fixture
def start_ranks(request: pytest.FixtureRequest, libraries: Path, registered: Path, tmp_path: Path) -> Start:
    """Function that starts a program on ranks: one of the module `PROGRAMS` of a test's module, by its `SETTINGS`.

    `found` is the directory of the stand-ins; further settings are those of `Job`.
    """
    settings = {"one_thread": 1, "module": request.module.PROGRAMS, **getattr(request.module, "SETTINGS", {})}

    def begin(size: int, program: str, *rest: str, found: Path = libraries, **more: Any) -> Job:
        return Job(found, tmp_path, size, program, str(registered), *rest, **{**settings, **more})

    return begin


@pytest.fixture
def program(libraries: Path) -> Callable[..., tuple[int, str]]:
    """Function that runs a program to its end, and returns its status and stderr."""

    def run(
        binary: Path, name: str, patience: int = 5000, more: Mapping[str, str] | None = None, **settings: object
    ) -> tuple[int, str]:
        settings = {"devices": 2, "quiet": 1, **settings}
        variables = {"LITMUS_PATIENCE": str(patience), **(more or {})}
        process = start([binary, name], libraries, variables, **settings)
        _, text = process.communicate(timeout=SECONDS)
        return process.returncode, text

    return run
