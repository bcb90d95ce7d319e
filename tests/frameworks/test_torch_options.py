"""Options of `DistributedOptimizer`, compared with one process that sees all ranks' batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import engine
import engine.torch as hvd
from engine.errors import EngineError
from engine.torch import PowerSGD

from ..on_ranks import on_ranks
from . import toy
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES)


def batch(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(4, 8, dtype=torch.float64, generator=generator)


def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    total: torch.Tensor = model(batch(rank, number)).square().sum()
    return total


def expected(numbers: list[int], average: bool = True) -> list[torch.Tensor]:
    """Return the gradients of the sum over passes, averaged or added over ranks."""
    model = toy.mlp()
    for rank in range(engine.size()):
        for number in numbers:
            loss(model, rank, number).backward()
    divisor = engine.size() if average else 1
    return [parameter.grad / divisor for parameter in model.parameters() if parameter.grad is not None]


def equal(model: nn.Module, want: list[torch.Tensor]) -> bool:
    grads = [parameter.grad for parameter in model.parameters()]
    return all(grad is not None and torch.allclose(grad, each) for grad, each in zip(grads, want, strict=True))


def test_options_that_differ_between_ranks_are_named() -> None:
    if engine.size() == 1:
        return
    rank = engine.rank()
    for name, options in {
        "op": {"op": engine.Sum if rank else engine.Average},
        "compression": {"compression": hvd.Compression.fp16 if rank else None},
        "PowerSGD(rank=": {"compression": PowerSGD(rank=1 + min(rank, 1))},
        "gradient_as_bucket_view": {"gradient_as_bucket_view": bool(rank)},
    }.items():
        model = toy.mlp()
        text = toy.raises(
            engine.errors.MismatchError,
            lambda model=model, options=options: hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
            ),
        )
        assert "the ranks give different options" in text and name in text and "rank 0" in text


def test_passes_are_added_up_before_a_reduction(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), backward_passes_per_step=3)
    found, counts = [], []
    for step in range(3):
        optimizer.zero_grad()
        before = toy.reduced()
        for number in range(3):
            loss(model, engine.rank(), 3 * step + number).backward()
            counts.append(toy.reduced() - before)
        found.append(equal(model, expected([3 * step, 3 * step + 1, 3 * step + 2])))
        optimizer.step()
    assert all(found)
    assert counts == [0, 0, 6] * 3, counts


def test_an_incomplete_window_is_reduced_by_step(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), backward_passes_per_step=4)
    found = []
    for numbers in ([0, 1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11]):
        optimizer.zero_grad()
        for number in numbers:
            loss(model, engine.rank(), number).backward()
        optimizer.step()
        found.append(equal(model, expected(numbers)))
    assert all(found), found


def test_more_passes_than_a_window(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), backward_passes_per_step=2)
    optimizer.zero_grad()
    for number in range(5):
        loss(model, engine.rank(), number).backward()
    optimizer.step()
    assert equal(model, expected([0, 1, 2, 3, 4]))


def test_a_window_that_is_dropped_leaves_nothing(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), backward_passes_per_step=2)
    loss(model, engine.rank(), 0).backward()
    optimizer.zero_grad()
    before = toy.reduced()
    loss(model, engine.rank(), 1).backward()
    early = toy.reduced() - before
    loss(model, engine.rank(), 2).backward()
    assert early == 0
    assert equal(model, expected([1, 2]))


def test_windows_with_sum(wrap: Wrap) -> None:
    model = toy.mlp()
    options = {"backward_passes_per_step": 2, "op": engine.Sum}
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), **options)
    found = []
    for numbers in ([0, 1], [2], [3, 4]):
        optimizer.zero_grad()
        for number in numbers:
            loss(model, engine.rank(), number).backward()
        optimizer.step()
        found.append(equal(model, expected(numbers, average=False)))
    assert all(found), found


def test_parameters_that_take_part_in_some_passes_only(wrap: Wrap) -> None:
    torch.manual_seed(3)
    parts = nn.ModuleList([nn.Linear(8, 2).double() for _ in range(3)])
    optimizer = wrap(torch.optim.SGD(parts.parameters(), lr=0.0), parts.named_parameters(), backward_passes_per_step=2)
    used = [(0, 1), (1,)] if engine.rank() % 2 else [(1,), (1,)]
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        for number, parts_used in enumerate(used):
            torch.stack([loss(parts[k], engine.rank(), number) for k in parts_used]).sum().backward()
        optimizer.step()
        found.append([parameter.grad is None for parameter in parts.parameters()])
    lonely = engine.size() == 1
    assert found == [[lonely, lonely, False, False, True, True]] * 2, found


def test_the_number_of_passes_changes(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    found = []
    for passes in (1, 3, 2):
        optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        before = toy.reduced()
        for number in range(passes):
            loss(model, engine.rank(), number).backward()
        found.append((equal(model, expected(list(range(passes)))), toy.reduced() - before))
        optimizer.step()
    assert found == [(True, 6)] * 3, found


def test_gradients_are_divided_before_and_after(wrap: Wrap) -> None:
    model = toy.mlp()
    options = {"gradient_predivide_factor": 4.0, "num_groups": 2}
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), **options)
    loss(model, engine.rank(), 0).backward()
    optimizer.step()
    assert equal(model, expected([0]))


def test_sparse_gradients_become_dense(wrap: Wrap) -> None:
    torch.manual_seed(5)
    tables = [nn.Embedding(10, 4, sparse=sparse).double() for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    for number, table in enumerate(tables):
        named = [(f"{number}.{name}", each) for name, each in table.named_parameters()]
        optimizer = wrap(torch.optim.SGD(table.parameters(), lr=0.1), named, sparse_as_dense=True)
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([engine.rank(), 9, step, 9])).square().sum().backward()
            optimizer.step()
    assert torch.equal(tables[0].weight, tables[1].weight)
    assert tables[0].weight.grad is not None and not tables[0].weight.grad.is_sparse


def test_numbers_that_make_no_sense_are_refused(wrap: Wrap) -> None:
    model = toy.mlp()
    for options, text in (
        ({"backward_passes_per_step": 0}, "1 or more"),
        ({"gradient_predivide_factor": 0.0}, "positive"),
        ({"gradient_predivide_factor": 2.0, "op": engine.Sum}, "needs op=Average"),
        ({"num_groups": 1, "groups": [[]]}, "not both"),
    ):
        with pytest.raises(ValueError, match=text):
            wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


class Unhooked(torch.optim.SGD):
    """Optimizer from whose `step` torch has removed the hooks, as torch 2.2 does when something is compiled."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])

    step.hooked = True  # type: ignore[attr-defined]


def test_step_hooks_that_torch_has_removed_are_put_back(wrap: Wrap) -> None:
    model = toy.mlp()
    plain = Unhooked(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(plain, 1)
    said = toy.raises(EngineError, lambda: wrap(plain, model.named_parameters()))
    assert "make the scheduler after DistributedOptimizer" in said
    optimizer = wrap(Unhooked(model.parameters(), lr=0.1), model.named_parameters(), op=engine.Sum)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for number in range(3):  # Reduced gradients may be added to only after a step.
        loss(model, engine.rank(), number).backward()
        optimizer.step()
    engine.check_consistency(model.state_dict())
    assert type(optimizer.unwrap()) is Unhooked
