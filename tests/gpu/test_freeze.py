"""Frozen passes on GPUs, which are the stand-ins: repeated, captured into graphs, and ended."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .jobs import Job
from .mutants import changed
from .test_plane import EVERY_CALL

Start = Callable[..., Job]


@pytest.fixture
def ranks(libraries: Path, registered: Path, tmp_path: Path) -> Start:
    """Starts a program of freeze_programs.py on ranks."""

    def begin(size: int, program: str, *rest: str, **settings: object) -> Job:
        told = (program, str(registered), *rest)
        return Job(libraries, tmp_path, size, *told, module="freeze_programs", **{"one_thread": 1, **settings})

    return begin


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("program", ["eager", "graphs"])
def test_frozen_passes_reduce_what_comes(program: str, size: int, ranks: Start) -> None:
    ranks(size, program).succeeds()


@pytest.mark.parametrize("program", ["streams", "differ", "shuts_down"])
def test_frozen_passes_go_with_all_else(program: str, ranks: Start) -> None:
    ranks(2, program).succeeds()


@pytest.mark.parametrize("size", [1, 2])
def test_frozen_optimizer_reduces_its_gradients(size: int, ranks: Start) -> None:
    pytest.importorskip("torch")
    ranks(size, "optimizer").succeeds()


@pytest.mark.parametrize("size", [2, 3])
def test_launches_of_graphs_end_when_a_rank_dies(size: int, ranks: Start) -> None:
    statuses, texts = ranks(size, "dies").end()
    assert statuses == [0] * (size - 1) + [-signal.SIGKILL], texts


# ---- what would happen otherwise -------------------------------------------------------------------------------------

KILLERS: dict[str, tuple[str, ...]] = {
    "pass_not_ordered": ("streams",),
    "pass_not_recorded": ("streams",),
    "close_does_not_await_passes": ("shuts_down",),
    "close_does_not_await_graphs": ("shuts_down",),
    "captures_without_blocking": ("graphs",),
    "capture_is_not_asked_for": ("graphs",),
}


@pytest.mark.skipif(not EVERY_CALL, reason="takes minutes: make gpu-faults")
@pytest.mark.parametrize("mutant", KILLERS)
def test_mutant_is_killed(mutant: str, ranks: Start, tmp_path: Path) -> None:
    """With one thing left out a program fails that succeeds with it."""
    ranks(2, *KILLERS[mutant], more=changed(mutant, tmp_path / "mutant"), linger=1).goes_wrong(60)
