"""Adasum in torch: `DistributedOptimizer`, gradients through it, and ranks without a gradient."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import engine
import engine.torch as hvd
from engine.frameworks.options import ReductionOptions
from engine.torch.hooks import TorchReducer

from ..adasum_reference import adasum
from ..on_ranks import on_ranks
from . import toy

pytestmark = on_ranks(*toy.SIZES)

Make = Callable[[Any], torch.optim.Optimizer]
Test = Callable[[], None]


def pairs(function: Test) -> Test:
    """Run a test on ranks in pairs of pairs; with three ranks, check that wrapping is refused."""

    @functools.wraps(function)
    def run() -> None:
        if engine.size() & (engine.size() - 1) == 0:
            function()
            return
        optimizer = torch.optim.SGD(toy.mlp().parameters(), lr=0.1)
        assert "these are 3" in toy.raises(ValueError, lambda: wrap(optimizer))
        assert type(optimizer) is torch.optim.SGD

    return run


def wrap(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return engine.DistributedOptimizer(optimizer, op=engine.Adasum, **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def combined(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Combine each tensor over the ranks by the paper's formula."""
    return {name: torch.from_numpy(adasum([rank[name].numpy() for rank in ranks])) for name in ranks[0]}


def batch(step: int, rank: int) -> torch.Tensor:
    return toy.whole_batch(step)[rank :: engine.size()]


def expected(
    make: Make,
    steps: int,
    passes: int = 1,
    factor: float = 1.0,
    ranks: Sequence[int] | None = None,
    joins: Callable[[int], int] | None = None,
) -> dict[str, torch.Tensor]:
    """Compute all ranks' optimizers in one process: own state, own step, changes combined.

    `joins` is the function from a rank to its number of steps.
    """
    ranks = range(engine.size()) if ranks is None else ranks
    models = [toy.mlp() for _ in ranks]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(steps):
        before = toy.parameters_of(models[0])
        for rank, model, optimizer in zip(ranks, models, optimizers, strict=True):
            optimizer.zero_grad()
            if joins is not None and step >= joins(rank):
                continue
            for number in range(passes):
                toy.loss_of(model, batch(step * passes + number, rank)).backward()
            optimizer.step()
        changes = [{name: each - before[name] for name, each in toy.parameters_of(model).items()} for model in models]
        result = combined(changes)
        for model in models:
            model.load_state_dict({name: before[name] + factor * each for name, each in result.items()})
    return toy.parameters_of(models[0])


@pairs
def test_steps_are_those_of_the_formula() -> None:
    makers: tuple[Make, ...] = (sgd, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    for make in makers:
        model = toy.mlp()
        optimizer = wrap(make(model.parameters()), named_parameters=model.named_parameters())
        toy.train(model, optimizer, (batch(step, engine.rank()) for step in range(4)))
        toy.check_same_everywhere(toy.parameters_of(model))
        toy.check_close(toy.parameters_of(model), expected(make, 4), rtol=1e-9, atol=1e-10)


@pairs
def test_ranks_with_fewer_batches_join() -> None:
    """Joined ranks change nothing; the last to join has the parameters with which all go on."""
    size = engine.size()
    for turn in range(2):  # Rank 0 is the first to join, then the last.
        steps = [2 + (rank + turn) % size for rank in range(size)]
        model = toy.mlp()
        optimizer = wrap(sgd(model.parameters()), named_parameters=model.named_parameters())
        toy.train(model, optimizer, (batch(step, engine.rank()) for step in range(steps[engine.rank()])))
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        assert steps[last] == size + 1
        want = expected(sgd, size + 1, joins=lambda rank, steps=steps: steps[rank])  # type: ignore[misc]
        toy.check_close(toy.parameters_of(model), want, rtol=1e-9, atol=1e-10)
        toy.train(model, optimizer, [batch(9, engine.rank())])
        toy.check_same_everywhere(toy.parameters_of(model))
        optimizer.unwrap()


@pairs
def test_a_step_is_one_operation() -> None:
    model = toy.mlp()
    optimizer = wrap(sgd(model.parameters()), check_parameters=False)
    counts = []
    for step in range(3):
        before = toy.reduced()
        toy.train(model, optimizer, [batch(step, engine.rank())])
        counts.append(toy.reduced() - before)
    assert counts == [0 if engine.size() == 1 else 1] * 3, counts


@pairs
def test_any_number_of_passes_before_a_step() -> None:
    model = toy.mlp()
    optimizer = wrap(sgd(model.parameters()), backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            toy.loss_of(model, batch(2 * step, engine.rank())).backward()
        toy.loss_of(model, batch(2 * step + 1, engine.rank())).backward()
        optimizer.synchronize()
        optimizer.step()
    optimizer.set_backward_passes_per_step(3)
    toy.check_close(toy.parameters_of(model), expected(sgd, 3, passes=2), rtol=1e-9, atol=1e-10)


@pairs
def test_a_closure_is_run_by_every_rank_for_itself() -> None:
    model = toy.mlp()
    optimizer = wrap(torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=1 + engine.rank()))
    first = toy.loss_of(model, batch(0, engine.rank())).item()
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = toy.loss_of(model, batch(0, engine.rank()))
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    toy.check_same_everywhere(toy.parameters_of(model))
    assert losses[0] == first != losses[1], losses  # the first is that of the parameters before the step
    assert len(calls) == 3 * (1 + engine.rank())


@pairs
def test_training_converges() -> None:
    model = toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
    losses = toy.train(model, optimizer, (batch(step % 2, engine.rank()) for step in range(60)))
    assert losses[-1] < 0.2 * losses[0], losses


@pairs
def test_schedulers_and_state() -> None:
    model = toy.mlp()
    plain = sgd(model.parameters())
    optimizer = wrap(plain, named_parameters=model.named_parameters())
    assert optimizer is plain and isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(2):
        toy.train(model, optimizer, [batch(step, engine.rank())])
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.25
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    toy.train(model, optimizer, [batch(2, engine.rank())])
    after = toy.parameters_of(model)
    other = toy.mlp()
    restored = wrap(sgd(other.parameters()), check_parameters=False)  # the check would be counted late
    other.load_state_dict(saved[0])
    restored.load_state_dict(saved[1])
    toy.train(other, restored, [batch(2, engine.rank())])
    toy.check_close(toy.parameters_of(other), after, rtol=0, atol=0)
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
    assert type(restored.unwrap()) is torch.optim.SGD
    before = toy.reduced()
    toy.train(other, restored, [batch(3, engine.rank())])
    assert toy.reduced() == before


@pairs
def test_frozen_parameters_and_new_groups() -> None:
    model = toy.mlp()
    layers = list(model.children())
    for parameter in layers[0].parameters():
        parameter.requires_grad_(False)
    optimizer = wrap(sgd([*layers[0].parameters(), *layers[2].parameters()]))
    first = toy.parameters_of(layers[0])
    toy.train(model, optimizer, [batch(0, engine.rank())])
    toy.check_close(toy.parameters_of(layers[0]), first, rtol=0, atol=0)
    optimizer.add_param_group({"params": list(layers[4].parameters())})
    for parameter in layers[0].parameters():
        parameter.requires_grad_(True)
    toy.train(model, optimizer, [batch(1, engine.rank())])
    toy.check_same_everywhere(toy.parameters_of(model))
    assert all((each != first[name]).any() for name, each in toy.parameters_of(layers[0]).items())


@pairs
def test_a_parameter_without_gradient_here_gets_the_others_change() -> None:
    parts = nn.ModuleList([nn.Linear(8, 2).double() for _ in range(2)])
    for each in parts.parameters():
        nn.init.constant_(each, 0.25)
    optimizer = wrap(torch.optim.SGD(parts.parameters(), lr=0.1))
    mine = parts[0] if engine.rank() == 0 else parts[1]
    mine(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
    optimizer.step()
    toy.check_same_everywhere(toy.parameters_of(parts))
    changed = [bool((each != 0.25).all()) for each in parts.parameters()]
    assert changed == [True, True, engine.size() > 1, engine.size() > 1], changed
    assert parts[0].weight[0, 0] == 0.25 - 0.1


@pairs
def test_parameters_of_several_kinds() -> None:
    parameters = [
        nn.Parameter(torch.ones(3, dtype=torch.float32)),
        nn.Parameter(torch.ones(4, 2, dtype=torch.float64).t()),
        nn.Parameter(torch.ones(5, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.ones(0)),
    ]
    optimizer = wrap(torch.optim.SGD(parameters, lr=0.5), prescale_factor=2.0, postscale_factor=0.5)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all((parameter == 0.5).all() for parameter in parameters)


@pairs
def test_a_factor_multiplies_the_change() -> None:
    model = toy.mlp()
    optimizer = wrap(sgd(model.parameters()), postscale_factor=0.5)
    toy.train(model, optimizer, (batch(step, engine.rank()) for step in range(2)))
    toy.check_close(toy.parameters_of(model), expected(sgd, 2, factor=0.5), rtol=1e-9, atol=1e-10)


@pairs
def test_what_makes_no_sense_is_refused() -> None:
    model = toy.mlp()
    assert "reduces parameter changes, not gradients" in toy.raises(
        ValueError, lambda: wrap(sgd(model.parameters()), gradient_as_bucket_view=True)
    )
    assert "needs op=Average" in toy.raises(
        ValueError, lambda: wrap(sgd(model.parameters()), gradient_predivide_factor=2.0)
    )
    optimizer = wrap(sgd(model.parameters()))
    assert "wrapped in DistributedOptimizer already" in toy.raises(ValueError, lambda: wrap(optimizer))

    def skipped() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    assert "cannot skip that" in toy.raises(engine.errors.EngineError, skipped)


@pairs
def test_ranks_that_freeze_different_parameters() -> None:
    model = toy.mlp()
    optimizer = wrap(sgd(model.parameters()))
    toy.train(model, optimizer, [batch(0, engine.rank())])
    first = toy.parameters_of(model)
    if engine.size() > 1:
        model[0].weight.requires_grad_(engine.rank() == 0)
        said = toy.raises(engine.errors.MismatchError, lambda: toy.train(model, optimizer, [batch(1, engine.rank())]))
        left_out = r"no parameter" if engine.rank() == 0 else r"'change\d*.group0.param0', frozen"
        assert "disagree" in said and re.search(rf"Rank {engine.rank()} leaves out {left_out}", said), said
        toy.check_close(toy.parameters_of(model), first, rtol=0, atol=0)
        model[0].weight.requires_grad_(True)
    toy.train(model, optimizer, [batch(1, engine.rank())])
    toy.check_same_everywhere(toy.parameters_of(model))


@pairs
def test_a_rank_that_has_frozen_everything() -> None:
    """The others are told; if all ranks have frozen everything, a step changes nothing."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = wrap(torch.optim.SGD([weight], lr=0.5))
    for frozen in (range(0), range(1, engine.size()), range(engine.size()), range(0)):
        before = weight.detach().clone()
        weight.grad = None if engine.rank() in frozen else torch.ones(3)
        weight.requires_grad_(engine.rank() not in frozen)
        if engine.size() > 1 and 0 < len(frozen) < engine.size():
            said = toy.raises(engine.errors.MismatchError, optimizer.step)
            assert "all ranks must leave out the same" in said, said
        else:
            optimizer.step()
        assert (weight == before - (0.0 if frozen else 0.5)).all(), (frozen, weight)


@pairs
def test_a_frozen_parameter_that_still_has_a_gradient_is_combined() -> None:
    """A step changes it, as in one process."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = wrap(torch.optim.SGD([weight], lr=0.5))
    weight.grad = torch.full_like(weight, engine.rank() + 1)
    weight.requires_grad_(False)
    optimizer.step()
    changes = [np.full(3, -0.5 * (rank + 1)) for rank in range(engine.size())]
    torch.testing.assert_close(weight.detach(), 1 + torch.from_numpy(adasum(changes)), rtol=1e-12, atol=1e-12)


@pairs
def test_parameters_over_one_memory_are_combined_once() -> None:
    whole = lambda memory: (memory, memory)  # noqa: E731
    first_rows = lambda memory: (memory[:2], memory)  # noqa: E731
    column = lambda memory: (memory, memory[:, 1])  # noqa: E731
    for cut in (whole, first_rows, column):
        memory = torch.arange(12.0, dtype=torch.float64).view(4, 3)
        start = memory.clone()
        parameters = [nn.Parameter(part) for part in cut(memory)]
        optimizer = wrap(torch.optim.SGD(parameters, lr=0.5))
        for _ in range(2):
            changes = []
            for rank in range(engine.size()):
                change = torch.zeros(4, 3, dtype=torch.float64)
                for number, part in enumerate(cut(change)):
                    part -= 0.5 * (1 + rank + number)
                changes.append(change.numpy())
            for number, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, 1 + engine.rank() + number)
            optimizer.step()
            start += torch.from_numpy(adasum(changes))
            torch.testing.assert_close(memory, start, rtol=1e-12, atol=1e-12)
        optimizer.unwrap()


@pairs
def test_parameters_with_a_part_of_their_memory_in_common_are_refused() -> None:
    memory = torch.zeros(6)
    parameters = [nn.Parameter(memory[:4]), nn.Parameter(memory[2:])]
    optimizer = wrap(torch.optim.SGD(parameters, lr=0.5))
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    said = toy.raises(engine.errors.EngineError, optimizer.step)
    assert ".group0.param1' has a part of its memory in common" in said and not memory.any(), said
    parameters[1].data = parameters[1].data.clone()
    optimizer.step()
    assert [(each == -0.5).all().item() for each in parameters] == [True, True]


@pairs
def test_two_optimizers_take_turns() -> None:
    models = [toy.mlp(), toy.mlp()]
    optimizers = [wrap(sgd(model.parameters())) for model in models]
    for step, (model, optimizer) in itertools.product(range(2), list(zip(models, optimizers, strict=True))):
        toy.train(model, optimizer, [batch(step, engine.rank())])
    for model in models:
        toy.check_close(toy.parameters_of(model), expected(sgd, 2), rtol=1e-9, atol=1e-10)


def test_some_of_the_ranks() -> None:
    ranks = sorted({0, engine.size() - 1})
    some = engine.add_process_set(ranks) if len(ranks) < engine.size() else hvd.global_process_set
    model = toy.mlp()
    optimizer = wrap(sgd(model.parameters()), process_set=some)
    toy.train(model, optimizer, (batch(step, engine.rank()) for step in range(2)))
    inside = some.included()
    if some is not hvd.global_process_set:
        engine.remove_process_set(some)
    toy.check_close(
        toy.parameters_of(model),
        expected(sgd, 2, ranks=ranks if inside else [engine.rank()]),
        rtol=1e-9,
        atol=1e-10,
    )


@pairs
def test_gradients_flow_as_adasum() -> None:
    def tensors(of: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(of)
        return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((3, 4), (5,))]

    size, mine = engine.size(), [each.requires_grad_() for each in tensors(engine.rank())]
    weights = [tensors(100 + rank) for rank in range(size)]
    alone = hvd.allreduce(mine[0], op=hvd.Adasum)
    group = hvd.grouped_allreduce(mine, op=hvd.Adasum, name="group")
    found = [
        *torch.autograd.grad((alone * weights[engine.rank()][0]).sum(), mine[:1]),
        *torch.autograd.grad(sum((a * b).sum() for a, b in zip(group, weights[engine.rank()], strict=True)), mine),
    ]
    for output, each in ((alone, 0), (group[0], 0), (group[1], 1)):
        want = adasum([tensors(rank)[each].numpy() for rank in range(size)])
        torch.testing.assert_close(output.detach(), torch.from_numpy(want), rtol=1e-12, atol=1e-12)
    for gradient, each in zip(found, (0, 0, 1), strict=True):
        want = adasum([weights[rank][each].numpy() for rank in range(size)])
        torch.testing.assert_close(gradient, torch.from_numpy(want), rtol=1e-12, atol=1e-12)


@pairs
def test_the_four_forms() -> None:
    mine = torch.full((1000,), 2.0)
    want = torch.full((1000,), 2.0)
    results = [
        hvd.allreduce(mine, op=hvd.Adasum),
        hvd.allreduce_(mine.clone(), op=hvd.Adasum),
        hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Adasum)),
        hvd.synchronize(hvd.allreduce_async_(mine.clone(), op=hvd.Adasum)),
        *hvd.grouped_allreduce([mine, mine], op=hvd.Adasum),
        *hvd.grouped_allreduce_([mine.clone()], op=hvd.Adasum),
        *hvd.synchronize(hvd.grouped_allreduce_async([mine], op=hvd.Adasum)),
        *hvd.synchronize(hvd.grouped_allreduce_async_([mine.clone()], op=hvd.Adasum)),
    ]
    assert all(torch.equal(each, want) for each in results)


@pairs
def test_a_rank_that_brings_nothing() -> None:
    """A gradient hook passes no tensor at all, rather than zeros; in private and in shared memory."""
    for views in (False, True):
        parts = nn.ModuleList([nn.Linear(300, 200), nn.Linear(300, 200), nn.Linear(3, 2)]).double()
        reducer = TorchReducer(ReductionOptions(engine.Adasum, prescale=2.0, views=views))
        reducer.add({f"nothing{views}.{name}": each for name, each in parts.named_parameters()})
        used = parts[0] if engine.rank() == 0 else parts[1]
        used(torch.full((1, 300), 1.0 + engine.rank(), dtype=torch.float64)).sum().backward()
        reducer.remove()
        found = [each.weight.grad for each in parts]
        brought = [
            [np.full((200, 300), 2.0 * (1 + rank) * ((rank == 0) is first)) for rank in range(engine.size())]
            for first in (True, False)
        ]
        for gradient, ranks in zip(found, brought, strict=False):
            if gradient is None:
                assert engine.size() == 1
            else:
                torch.testing.assert_close(gradient, torch.from_numpy(adasum(ranks)), rtol=1e-12, atol=1e-12)
        assert found[2] is None
        toy.check_same_everywhere({str(k): each for k, each in enumerate(found) if each is not None})


@pairs
def test_a_step_that_a_signal_ends_puts_the_parameters_back() -> None:
    """This rank has contributed its change, and nothing writes to its parameters afterwards."""
    if engine.size() == 1:
        return
    weight = torch.nn.Parameter(torch.full((5,), 10.0, dtype=torch.float64))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), check_parameters=False)
    (weight * (engine.rank() + 1)).sum().backward()
    toy.leave_waiting(optimizer.step)
    engine.barrier("the others have stepped")
    changes = [np.full(5, -(rank + 1.0)) for rank in range(engine.size())]
    wanted = 10.0 + (0.0 if engine.rank() == 0 else adasum(changes)[0])
    assert np.allclose(weight.detach().numpy(), wanted), (weight, wanted)
