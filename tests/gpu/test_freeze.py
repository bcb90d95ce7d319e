"""Frozen passes on GPUs, which are stand-ins: repeated, captured into graphs, and ended."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .jobs import Job
from .mutants import changed
from .test_plane import EVERY_CALL

Start = Callable[..., Job]

OPTIMIZERS = "frozen_optimizer_programs"


@pytest.fixture
def ranks(libraries: Path, registered: Path, tmp_path: Path) -> Start:
    """Function that starts a program of freeze_programs.py, or of another module, on ranks."""

    def begin(size: int, program: str, *rest: str, **settings: Any) -> Job:
        told = (program, str(registered), *rest)
        return Job(libraries, tmp_path, size, *told, **{"one_thread": 1, "module": "freeze_programs", **settings})

    return begin


LONGER = 100  # seconds for several programs


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_frozen_passes_reduce_what_comes(size: int, ranks: Start) -> None:
    ranks(size, "eager+graphs").succeeds(LONGER)


@pytest.mark.slow
@pytest.mark.parametrize("programs", ["streams+differ+shuts_down+interrupted", "nothing+ended", "under_way+meanwhile"])
def test_frozen_passes_go_with_all_else(programs: str, ranks: Start) -> None:
    ranks(2, programs).succeeds(LONGER)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["outlived", "leaves"])
def test_graphs_and_worlds_end_in_any_order(program: str, ranks: Start) -> None:
    ranks(2, program).succeeds()


def test_rank_without_memory_is_named(ranks: Start) -> None:
    ranks(2, "lacks_memory").succeeds()


def test_timeline_goes_on(ranks: Start) -> None:
    ranks(1, "clocks").succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 2])
def test_frozen_optimizer_reduces_its_gradients(size: int, ranks: Start) -> None:
    pytest.importorskip("torch")
    ranks(size, "optimizer", module=OPTIMIZERS).succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("programs", ["no_sync+homeless", "replaced", "in_hand+apart", "new_gradients+two"])
def test_frozen_optimizer_leaves_nothing_out(programs: str, ranks: Start) -> None:
    pytest.importorskip("torch")
    ranks(2, programs, module=OPTIMIZERS).succeeds(LONGER)


def test_gradients_are_frozen_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only gradients whose memory has holes, or another order than the parameter's, are refused."""
    torch = pytest.importorskip("torch")
    from engine.errors import UnsupportedTensorError
    from engine.torch import freezing

    monkeypatch.setattr(freezing, "is_on_gpu", lambda _tensor: True)

    def expect(parameter: Any, gradient: Any) -> None:
        parameter.grad = gradient
        freezing._expect_freezable("x", parameter, gradient.device)

    kernel = torch.empty(64, 32, 1, 1).to(memory_format=torch.channels_last)
    expect(kernel, torch.empty(64, 32, 1, 1))
    expect(torch.empty(64, 32, 1, 1), torch.empty_strided(kernel.shape, (32, 1, 7, 9)))
    expect(torch.empty(4, 3).t(), torch.empty(4, 3).t())
    expect(torch.empty(()), torch.empty(()))
    expect(torch.empty(0, 3), torch.empty(0, 3))
    for parameter, gradient in (
        (torch.empty(4, 3), torch.empty(3, 4).t()),
        (torch.empty(2, 3, 4, 5), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        (torch.empty(8)[::2], torch.empty(8)[::2]),
        (torch.ones(3).expand(3, 3), torch.ones(3).expand(3, 3)),
    ):
        with pytest.raises(UnsupportedTensorError, match="has gaps, or is not in the order of the parameter"):
            expect(parameter, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_launches_of_graphs_end_when_a_rank_dies(size: int, ranks: Start) -> None:
    statuses, texts = ranks(size, "dies").end()
    assert statuses == [0] * (size - 1) + [-signal.SIGKILL], texts


# ---- mutants ---------------------------------------------------------------------------------------------------------

KILLERS: dict[str, tuple[str, ...]] = {
    "pass_not_ordered": ("streams",),
    "pass_not_recorded": ("streams",),
    "close_does_not_await_passes": ("shuts_down",),
    "close_does_not_await_graphs": ("shuts_down",),
    "graphs_are_revoked": ("dies",),
    "graphs_hold_up_the_end": ("outlived",),
    "kernels_of_graphs_are_unloaded": ("outlived",),
    "leaving_forgets_frozen_passes": ("leaves",),
    "captures_hide_graphs": ("leaves",),
    "lack_of_memory_is_told_late": ("lacks_memory",),
    "clocks_end_with_a_freeze": ("clocks",),
    "captures_without_blocking": ("graphs",),
    "capture_is_not_asked_for": ("graphs",),
    "nothing_of_0_bytes": ("nothing",),
}


@pytest.mark.skipif(not EVERY_CALL, reason="takes minutes: make gpu-faults")
@pytest.mark.parametrize("mutant", KILLERS)
def test_mutant_is_killed(mutant: str, ranks: Start, tmp_path: Path) -> None:
    ranks(2, *KILLERS[mutant], more=changed(mutant, tmp_path / "mutant"), linger=1).goes_wrong(60)
