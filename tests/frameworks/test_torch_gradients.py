"""Unusual backward passes: which gradients are reduced, when, and how often."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import engine
from engine.errors import EngineError, MismatchError

from ..on_ranks import on_ranks
from ..waiting import NotWithin, until
from . import toy
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES, toy.BY_METHOD)


def sgd(module: nn.Module) -> torch.optim.SGD:
    """Return an optimizer without state."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Pause(torch.autograd.Function):
    """Does nothing in forward, and calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, action: Callable[[], object]) -> torch.Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.action()
        return gradient, None


class Interrupted(nn.Module):
    """An MLP that calls a function halfway through backward, after the last layer's gradients."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.inner, self.action = toy.mlp(), action

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[4](Pause.apply(self.inner[:4](x), self.action))


@pytest.mark.sample(1)
def test_reduces_while_backward_runs(wrap: Wrap) -> None:
    """Halfway through backward the last layer's averaged gradient is there, and other operations have not begun."""
    seen: list[dict[str, torch.Tensor]] = []
    counts: list[int] = []
    before = 0

    def wait_for_the_last_layer() -> None:
        with contextlib.suppress(NotWithin):  # the comparison below shows it
            # To the engine this is computation: nothing here waits in it.
            until(lambda: toy.reduced() >= before + 2, "the last layer is reduced", 40)
        counts.append(toy.reduced() - before)
        seen.append(toy.gradients_of(model))

    model, alone = Interrupted(wait_for_the_last_layer), toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        engine.barrier()
        before = toy.reduced()
        toy.loss_of(model, toy.shard(toy.whole_batch(step))).backward()
    optimizer.zero_grad()
    toy.loss_of(alone, toy.whole_batch(1)).backward()
    expected = toy.gradients_of(alone)
    assert counts == [2, 2], counts
    names = "inner.4.weight", "inner.4.bias"
    toy.check_close(seen[1], {name: expected[name.removeprefix("inner.")] for name in names})


def test_two_backwards_before_a_step(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters())
    for to_none in (True, False):
        optimizer.zero_grad(to_none)
        alone.zero_grad(to_none)
        for step in range(3):
            toy.loss_of(model, toy.shard(toy.whole_batch(step))).backward()
            toy.loss_of(alone, toy.whole_batch(step)).backward()
        toy.check_close(toy.gradients_of(model), toy.gradients_of(alone))
    optimizer.step()
    toy.check_same_everywhere(toy.parameters_of(model))


def test_a_second_backward_with_factors_is_refused_unless_they_cancel(wrap: Wrap) -> None:
    """A result that is reduced again is multiplied again, which changes nothing only for a factor of 1."""
    for factors in (
        {"prescale_factor": 2.0},
        {"postscale_factor": 0.5},
        {"prescale_factor": 4.0, "postscale_factor": 0.5},
        {"prescale_factor": 2.0, "postscale_factor": 0.5},
        {"gradient_predivide_factor": 4.0},
    ):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = wrap(torch.optim.SGD([parameter], lr=0.0), **factors)
        scale = factors.get("prescale_factor", 1.0) * factors.get("postscale_factor", 1.0)

        def backward(parameter: nn.Parameter = parameter) -> None:
            (parameter * (engine.rank() + 1)).sum().backward()

        for _ in range(2):
            backward()
            average = scale * (engine.size() + 1) / 2
            toy.check_close({"": parameter.grad}, {"": torch.full((3,), average)})  # type: ignore[dict-item]
            if scale == 1.0:
                backward()
                toy.check_close({"": parameter.grad}, {"": torch.full((3,), 2 * average)})  # type: ignore[dict-item]
            else:
                said = toy.raises(EngineError, backward)
                assert "op=Average and factors a second backward would count it twice" in said, said
            optimizer.zero_grad()
        optimizer.unwrap()


def test_a_second_backward_of_a_part(wrap: Wrap) -> None:
    """The second pass touches other parameters than the first, different ones on each rank."""
    model = nn.ModuleList(toy.mlp() for _ in range(3))
    optimizer = wrap(sgd(model), model.named_parameters())
    rank, size = engine.rank(), engine.size()
    mine = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for step in range(2):
        part = model[(rank + step) % 3]
        loss = toy.loss_of(part, toy.shard(toy.whole_batch(step)))
        for name, each in toy.local_gradients(loss, model).items():
            mine[name] += each
        loss.backward()
    found = toy.gradients_of(model)
    expected = toy.averaged(mine)
    used = {(r + step) % 3 for r in range(size) for step in range(2)}
    toy.check_close(found, {name: each for name, each in expected.items() if int(name[0]) in used})
    optimizer.zero_grad()


def test_a_second_backward_of_a_sum_is_refused() -> None:
    for views in (False, True):
        model = toy.mlp()
        optimizer = engine.DistributedOptimizer(
            sgd(model), model.named_parameters(), op=engine.Sum, gradient_as_bucket_view=views
        )
        batch = toy.shard(toy.whole_batch(0))
        texts = []
        for to_none in (False, True):
            toy.loss_of(model, batch).backward()
            texts.append(toy.raises(EngineError, toy.loss_of(model, batch).backward))
            optimizer.zero_grad(to_none)
        toy.train(model, optimizer, toy.shards(2))
        with optimizer.no_sync():
            toy.loss_of(model, batch).backward()
        found = toy.local_gradients(toy.loss_of(model, batch), model)
        twice = {name: found[name] + each for name, each in toy.gradients_of(model).items()}
        toy.loss_of(model, batch).backward()
        total = {name: each * engine.size() for name, each in toy.averaged(twice).items()}
        toy.check_close(toy.gradients_of(model), total)
        assert all("no_sync()" in text and "reduced already" in text for text in texts), texts


def test_no_sync_accumulates_and_reduces_once(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters())
    other = sgd(alone)
    for turn in range(2):
        optimizer.zero_grad(set_to_none=turn == 0)
        other.zero_grad()
        before = toy.reduced()
        with optimizer.no_sync():
            for step in range(3):
                toy.loss_of(model, toy.shard(toy.whole_batch(step))).backward()
                toy.loss_of(alone, toy.whole_batch(step)).backward()
        local = toy.reduced() - before
        toy.loss_of(model, toy.shard(toy.whole_batch(3))).backward()
        toy.loss_of(alone, toy.whole_batch(3)).backward()
        toy.check_close(toy.gradients_of(model), toy.gradients_of(alone))
        assert (local, toy.reduced() - before) == (0, 6)
        optimizer.step()
        other.step()
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_what_no_sync_gathered_is_reduced_although_the_last_backward_leaves_it_alone(wrap: Wrap) -> None:
    model = nn.ModuleList([toy.mlp(), toy.mlp()])
    optimizer = wrap(sgd(model), model.named_parameters())
    first = toy.loss_of(model[0], toy.shard(toy.whole_batch(0)))
    second = toy.loss_of(model[1], toy.shard(toy.whole_batch(1)))
    mine = toy.local_gradients(first, model) | toy.local_gradients(second, model)
    with optimizer.no_sync():
        first.backward()
    second.backward()
    toy.check_close(toy.gradients_of(model), toy.averaged(mine))
    assert not toy.in_flight()


def test_no_sync_ends_when_its_block_raises(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters())
    for _ in range(2):
        try:
            with optimizer.no_sync(), optimizer.no_sync():
                raise KeyError
        except KeyError:
            pass
    toy.train(model, optimizer, toy.shards(2))
    toy.train(alone, sgd(alone), toy.wholes(2))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_no_gradient_on_some_ranks_counts_as_zero(wrap: Wrap) -> None:
    for to_none in (True, False):
        model = nn.ModuleList(toy.mlp() for _ in range(engine.size() + 1))
        optimizer = wrap(sgd(model), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad(to_none)
            loss = toy.loss_of(model[engine.rank()], toy.shard(toy.whole_batch(step)))
            zeros = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
            mine = zeros | toy.local_gradients(loss, model)
            loss.backward()
            last = f"{engine.size()}."
            expected = {name: each for name, each in toy.averaged(mine).items() if not name.startswith(last)}
            toy.check_close(toy.gradients_of(model), expected)
            assert all(each.grad is None for each in model[engine.size()].parameters())
            optimizer.step()
        toy.check_same_everywhere(toy.parameters_of(model))


def test_a_rank_without_any_gradient(wrap: Wrap) -> None:
    """The rank's backward pass touches only one of the parameters."""
    model = nn.ModuleDict({"big": toy.mlp(), "small": nn.Linear(8, 3).double()})
    engine.torch.broadcast_parameters(model.state_dict(), 0)
    optimizer = wrap(sgd(model), model.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        part = "small" if engine.rank() == 0 else "big"
        loss = toy.loss_of(model[part], toy.shard(toy.whole_batch(step)))
        zeros = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
        mine = zeros | toy.local_gradients(loss, model)
        loss.backward()
        used = ("small", "big") if engine.size() > 1 else ("small",)
        expected = {name: each for name, each in toy.averaged(mine).items() if name.startswith(used)}
        toy.check_close(toy.gradients_of(model), expected)
        optimizer.step()
    toy.check_same_everywhere(toy.parameters_of(model))


def test_autograd_grad_reduces_nothing(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters())
    before = toy.reduced()
    loss = toy.loss_of(model, toy.shard(toy.whole_batch(0)))
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert toy.reduced() == before and not toy.in_flight()
    assert len(found) == 6 and not toy.gradients_of(model)
    toy.train(model, optimizer, toy.shards(1))
    toy.check_same_everywhere(toy.parameters_of(model))


def test_a_penalty_on_gradients(wrap: Wrap) -> None:
    """The backward pass goes through another backward pass."""
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters())
    other = sgd(alone)

    def loss_and_penalty(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone().requires_grad_()
        output = module(batch).pow(2).sum(dim=1)
        (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
        return (output + slope.pow(2).sum(dim=1)).mean()

    for step in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        loss_and_penalty(model, toy.shard(toy.whole_batch(step))).backward()
        loss_and_penalty(alone, toy.whole_batch(step)).backward()
        optimizer.step()
        other.step()
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


class Checkpointed(nn.Module):
    """A model that recomputes its hidden layers in backward."""

    def __init__(self, reentrant: bool, first: bool) -> None:
        super().__init__()
        self.inner, self.reentrant, self.first = toy.mlp(), reentrant, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, options = self.inner, {"use_reentrant": self.reentrant}
        if self.first:
            # The outer pass reaches no parameter before the inner ones do.
            x = checkpoint(inner[:2], x.clone().requires_grad_(), **options)
            return checkpoint(inner[2:], x, **options)
        x = checkpoint(inner[2:4], inner[:2](x), **options)
        return inner[4](x)


def test_activation_checkpointing(wrap: Wrap) -> None:
    for reentrant in (False, True):
        for first in (False, True):
            model, alone = Checkpointed(reentrant, first), toy.mlp()
            optimizer = wrap(sgd(model), model.inner.named_parameters())
            other = sgd(alone)
            for step in range(4):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                other.zero_grad()
                toy.loss_of(model, toy.shard(toy.whole_batch(step))).backward()
                waiting, found = toy.in_flight(), toy.gradients_of(model.inner)
                toy.loss_of(alone, toy.whole_batch(step)).backward()
                assert not waiting
                toy.check_close(found, toy.gradients_of(alone))
                optimizer.step()
                other.step()
            toy.check_close(toy.parameters_of(model.inner), toy.parameters_of(alone))


def test_a_layer_in_two_checkpointed_segments(wrap: Wrap) -> None:
    """Reentrant passes would add to a gradient in reduction: all ranks refuse them, and can go on."""
    model, alone = toy.mlp(width=8), toy.mlp(width=8)
    optimizer = wrap(sgd(model), model.named_parameters())
    other = sgd(alone)

    def twice(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(model[:2], x.clone().requires_grad_(), use_reentrant=reentrant)
        return model[2:](x)

    for step in range(2):
        optimizer.zero_grad()
        batch = toy.shard(toy.whole_batch(step))
        text = toy.raises(EngineError, lambda batch=batch: toy.loss_of(lambda x: twice(x, True), batch).backward())
        assert "use_reentrant=False" in text, text
        optimizer.zero_grad()
        other.zero_grad()
        toy.loss_of(lambda x: twice(x, False), batch).backward()
        toy.loss_of(lambda x: alone[2:](alone[:2](alone[:2](x))), toy.whole_batch(step)).backward()
        toy.check_close(toy.gradients_of(model), toy.gradients_of(alone))
        optimizer.step()
        other.step()


def test_shared_weights(wrap: Wrap) -> None:
    model, alone = toy.mlp(width=8), toy.mlp(width=8)
    for module in (model, alone):
        module[2] = module[0]
    toy.train(model, wrap(sgd(model), model.named_parameters()), toy.shards(3))
    toy.train(alone, sgd(alone), toy.wholes(3))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


class Odd(nn.Module):
    """Parameters without dimensions, without elements, and one that gets an expanded gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.expanded = nn.Parameter(torch.ones(8, 1, dtype=torch.float64))
        self.complex_free = nn.Parameter(torch.arange(12, dtype=torch.float64).view(3, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        column = x @ self.expanded.expand(8, 3) * self.scalar + self.empty.sum()
        return column + self.complex_free.sum()


def test_odd_parameters(wrap: Wrap) -> None:
    model, alone = Odd(), Odd()
    toy.train(model, wrap(sgd(model), model.named_parameters()), toy.shards(3))
    toy.train(alone, sgd(alone), toy.wholes(3))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_two_optimizers_that_play_against_each_other(wrap: Wrap) -> None:
    def play(generator: nn.Module, judge: nn.Module, first: Any, second: Any, batch: torch.Tensor) -> None:
        first.zero_grad()
        toy.loss_of(lambda x: judge(generator(x)), batch).backward()  # gives the judge gradients, too
        first.step()
        second.zero_grad()
        toy.loss_of(lambda x: judge(generator(x).detach()), batch).mul(-1).backward()
        second.step()

    def players() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(5)
        return nn.Linear(8, 5).double(), nn.Sequential(nn.Tanh(), nn.Linear(5, 2)).double()

    mine, alone = players(), players()
    optimizers = [wrap(sgd(player), player.named_parameters()) for player in mine]
    others = [sgd(player) for player in alone]
    for step in range(4):
        play(*mine, *optimizers, toy.shard(toy.whole_batch(step)))
        play(*alone, *others, toy.whole_batch(step))
    for player, other in zip(mine, alone, strict=True):
        toy.check_close(toy.parameters_of(player), toy.parameters_of(other))


def test_two_models_of_one_kind(wrap: Wrap) -> None:
    """Names are equal, or absent; one backward fills both models, and each is zeroed and stepped separately."""
    for named in (True, False):
        mine, alone = [toy.mlp(), toy.mlp()], [toy.mlp(), toy.mlp()]
        optimizers = [wrap(sgd(model), model.named_parameters() if named else None) for model in mine]
        others = [sgd(model) for model in alone]
        for step in range(3):
            for models, pair, batch in (
                (mine, optimizers, toy.shard(toy.whole_batch(step))),
                (alone, others, toy.whole_batch(step)),
            ):
                pair[0].zero_grad()
                pair[1].zero_grad()
                (toy.loss_of(models[0], batch) + 2 * toy.loss_of(models[1], batch)).backward()
                pair[0].step()
                pair[0].zero_grad(set_to_none=step == 0)  # while the other's gradients still wait for their step
                toy.loss_of(lambda x, models=models: models[0](x) + models[1](x).detach(), batch).backward()
                pair[1].step()
                pair[0].step()
        for model, other in zip(mine, alone, strict=True):
            toy.check_close(toy.parameters_of(model), toy.parameters_of(other))
        for optimizer in optimizers:
            optimizer.unwrap()


def test_gradients_zeroed_between_backward_and_step(wrap: Wrap) -> None:
    """The other of two players zeroes them; they are not reduced again, and the next pass is complete."""
    model, alone = toy.mlp(), toy.mlp()
    optimizer, other = wrap(sgd(model), model.named_parameters()), sgd(alone)
    for step in range(3):
        for module, owner, batch in (
            (model, optimizer, toy.shard(toy.whole_batch(step))),
            (alone, other, toy.whole_batch(step)),
        ):
            owner.zero_grad()
            toy.loss_of(module, batch * 3).backward()
            owner.zero_grad(set_to_none=step != 1)
            owner.step()
            toy.loss_of(module, batch).backward()
            owner.step()
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_parameters_frozen_and_thawed(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    for module in (model, alone):
        module[0].requires_grad_(False)
    optimizer = wrap(sgd(model), model.named_parameters())
    other = sgd(alone)
    for thawed, refrozen in ((False, False), (True, False), (True, True)):
        for module in (model, alone):
            module[0].requires_grad_(thawed)
            module[2].requires_grad_(not refrozen)
        toy.train(model, optimizer, toy.shards(2))
        toy.train(alone, other, toy.wholes(2))
        toy.check_same_everywhere(toy.parameters_of(model))
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_parameters_added_later(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.SGD(model[:4].parameters(), lr=0.1))
    other = torch.optim.SGD(alone[:4].parameters(), lr=0.1)
    toy.train(model, optimizer, toy.shards(2))
    toy.train(alone, other, toy.wholes(2))
    if engine.size() > 1:
        odd = nn.Parameter(torch.zeros(1 + engine.rank()))
        toy.raises(MismatchError, lambda: optimizer.add_param_group({"params": [odd]}))
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.01})
    other.add_param_group({"params": list(alone[4].parameters()), "lr": 0.01})
    toy.train(model, optimizer, toy.shards(2))
    toy.train(alone, other, toy.wholes(2))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_an_exception_in_backward_on_one_rank(wrap: Wrap) -> None:
    """The rank goes on with `zero_grad`; the others wait in `backward` until then, and get the gradients it had."""

    def fail() -> None:
        if failing and engine.rank() == engine.size() - 1:
            raise ArithmeticError("a bad sample")

    failing = False
    model, alone = Interrupted(fail), toy.mlp()
    optimizer = wrap(sgd(model), model.inner.named_parameters())
    other = sgd(alone)
    for step in range(6):
        failing = step % 2 == 0
        optimizer.zero_grad(set_to_none=step < 3)
        try:
            toy.loss_of(model, toy.shard(toy.whole_batch(step))).backward()
        except ArithmeticError:
            assert failing
            optimizer.zero_grad()
        if failing:
            continue
        found = toy.gradients_of(model.inner)
        other.zero_grad()
        toy.loss_of(alone, toy.whole_batch(step)).backward()
        optimizer.step()
        other.step()
        toy.check_close(found, toy.gradients_of(alone))
    toy.check_same_everywhere(toy.parameters_of(model))


def test_an_exception_in_backward_on_all_ranks(wrap: Wrap) -> None:
    def fail() -> None:
        if failing:
            raise ArithmeticError

    failing = False
    model, alone = Interrupted(fail), toy.mlp()
    optimizer = wrap(sgd(model), model.inner.named_parameters())
    for failing in (True, True, False):
        optimizer.zero_grad()
        loss = toy.loss_of(model, toy.shard(toy.whole_batch(0)))
        if failing:
            toy.raises(ArithmeticError, loss.backward)
        else:
            loss.backward()
            optimizer.step()
    toy.train(alone, sgd(alone), toy.wholes(1))
    toy.check_close(toy.parameters_of(model.inner), toy.parameters_of(alone))


def test_many_passes_leave_nothing_behind(wrap: Wrap) -> None:
    """A model that was wrapped, trained and dropped keeps no name, hook or operation."""
    for turn in range(12):
        model = toy.mlp()
        optimizer = wrap(sgd(model), model.named_parameters())
        toy.train(model, optimizer, toy.shards(1))
        if turn % 2:
            optimizer.unwrap()
            assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
    del optimizer
    assert not toy.in_flight()


def test_a_collective_between_backward_and_step() -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = engine.DistributedOptimizer(sgd(model))
    seen = []
    handle = engine.allreduce_async(torch.ones(1000), engine.Sum, name="outstanding")
    toy.train(model, optimizer, toy.shards(2), lambda: seen.append(engine.allreduce(torch.ones(2), engine.Sum)))
    total = engine.synchronize(handle)
    toy.train(alone, sgd(alone), toy.wholes(2))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
    assert total[999] == engine.size() == seen[1][0]
