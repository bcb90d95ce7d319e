"""Fixtures: the stand-ins, and programs that run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ..standins import ROOT, build, build_program, kernels, start

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
