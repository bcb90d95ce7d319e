"""Parts of engine.torch.libraries that need none of the libraries; `make recipes` tests the rest."""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import engine
import engine.torch
from engine.config.launchers import TORCHRUN_PLACE
from engine.errors import EngineError
from engine.text import logs
from engine.torch import libraries
from engine.torch.libraries.world import expect_same_place

from ..on_ranks import on_ranks
from . import toy

pytestmark = on_ranks(*toy.SIZES)


def tokens_of(rank: int) -> torch.Tensor:
    """Return a rank's items: different numbers by rank, and none on rank 2."""
    count = 0 if rank == 2 else 3 * rank + 1
    return torch.arange(count, dtype=torch.float32) + 10 * rank


def test_global_mean_has_gradient_of_mean_over_all_items() -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    optimizer = engine.torch.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])
    own = tokens_of(engine.rank())
    loss = libraries.global_mean((weight * own).sum(), len(own))
    loss.backward()
    right = torch.cat([tokens_of(rank) for rank in range(engine.size())]).mean()
    torch.testing.assert_close(weight.grad, right)
    torch.testing.assert_close(engine.torch.allreduce(loss.detach()), 2 * right)
    optimizer.step()


def test_global_mean_without_any_item_is_zero() -> None:
    assert float(libraries.global_mean(torch.zeros(()), torch.tensor(0))) == 0


def test_synchronize_reduces_window_cut_short_before_clipping() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = engine.torch.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], backward_passes_per_step=3
    )
    gradient = torch.tensor([1.0, 2.0, 3.0])
    (weight * gradient * (engine.rank() + 1)).sum().backward()
    (weight * gradient).sum().backward()
    optimizer.synchronize()
    average = gradient * ((engine.size() + 1) / 2 + 1)
    torch.testing.assert_close(weight.grad, average)
    torch.nn.utils.clip_grad_norm_([weight], 0.5)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -0.5 * average / average.norm(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("stale", [False, True], ids=["without", "of-another-rank"])
def test_export_place_sets_what_libraries_read(stale: bool) -> None:
    with mock.patch.dict(os.environ, dict.fromkeys(TORCHRUN_PLACE, "7")):
        if not stale:
            for name in TORCHRUN_PLACE:
                del os.environ[name]
        expect_exported_place()


def expect_exported_place() -> None:
    """Export this rank's place twice, and check the variables."""
    libraries.export_place()
    own = (engine.rank(), engine.local_rank(), engine.size(), engine.local_size())
    assert tuple(int(os.environ[name]) for name in TORCHRUN_PLACE[:4]) == own
    assert len(set(engine.allgather_object(tuple(os.environ[name] for name in TORCHRUN_PLACE[2:])))) == 1
    told = {name: os.environ[name] for name in TORCHRUN_PLACE}
    libraries.export_place()
    assert {name: os.environ[name] for name in TORCHRUN_PLACE} == told


def test_library_with_another_place_is_refused() -> None:
    expect_same_place("Accelerate", engine.rank(), engine.size())
    with pytest.raises(EngineError, match=rf"rank 0 of {engine.size() + 1}, and the engine for rank {engine.rank()}"):
        expect_same_place("Accelerate", 0, engine.size() + 1)


@pytest.mark.parametrize("library", ["Accelerate", "Lightning", "none"])
def test_step_warns_once_of_library_that_takes_itself_for_alone(library: str) -> None:
    processes = 1 if library == "Accelerate" else engine.size()
    module: Any = ModuleType("accelerate.state")
    module.PartialState = SimpleNamespace(_shared_state={"num_processes": processes})
    weight = nn.Parameter(torch.ones(1))
    optimizer = engine.torch.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])
    closure = functools.partial(
        loss_of,
        SimpleNamespace(_trainer=SimpleNamespace(world_size=1 if library == "Lightning" else engine.size())),
        weight,
    )
    with (
        mock.patch.dict(sys.modules, {"accelerate.state": module}),
        mock.patch.object(logs.logger, "warning") as warning,
    ):
        optimizer.step(closure)
        optimizer.step(closure)
    warned = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    assert len(warned) == (library != "none" and engine.size() > 1)
    assert all(each.startswith(library) and "for the only one" in each for each in warned)


def loss_of(module: Any, weight: nn.Parameter) -> torch.Tensor:
    """Run a backward; Lightning's closures refer to their module in this way."""
    loss = weight.sum()
    loss.backward()
    return loss
