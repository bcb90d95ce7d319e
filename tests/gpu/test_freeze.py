"""Frozen passes on GPUs, which are stand-ins: repeated, captured into graphs, and ended."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from .jobs import Start

PROGRAMS = "freeze_programs"

OPTIMIZERS = "frozen_optimizer_programs"


LONGER = 100  # seconds for several programs


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_frozen_passes_reduce_what_comes(size: int, start_ranks: Start) -> None:
    start_ranks(size, "eager+graphs").succeeds(LONGER)


@pytest.mark.slow
@pytest.mark.parametrize("programs", ["streams+differ+shuts_down+interrupted", "nothing+ended", "under_way+meanwhile"])
def test_frozen_passes_go_with_all_else(programs: str, start_ranks: Start) -> None:
    start_ranks(2, programs).succeeds(LONGER)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["outlived", "leaves"])
def test_graphs_and_worlds_end_in_any_order(program: str, start_ranks: Start) -> None:
    start_ranks(2, program).succeeds()


def test_rank_without_memory_is_named(start_ranks: Start) -> None:
    start_ranks(2, "lacks_memory").succeeds()


def test_timeline_goes_on(start_ranks: Start) -> None:
    start_ranks(1, "clocks").succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 2])
def test_frozen_optimizer_reduces_its_gradients(size: int, start_ranks: Start) -> None:
    pytest.importorskip("torch")
    start_ranks(size, "optimizer", module=OPTIMIZERS).succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("programs", ["no_sync+homeless", "replaced", "in_hand+apart", "new_gradients+two"])
def test_frozen_optimizer_leaves_nothing_out(programs: str, start_ranks: Start) -> None:
    pytest.importorskip("torch")
    start_ranks(2, programs, module=OPTIMIZERS).succeeds(LONGER)


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
def test_launches_of_graphs_end_when_a_rank_dies(size: int, start_ranks: Start) -> None:
    statuses, texts = start_ranks(size, "dies").end()
    assert statuses == [0] * (size - 1) + [-signal.SIGKILL], texts
