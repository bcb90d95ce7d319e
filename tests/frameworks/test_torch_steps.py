"""Gradients that backward leaves to `step()`: closures, ranks without a backward, gradients set by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import engine
import engine.torch
from engine.errors import EngineError, MismatchError, UnsupportedTensorError

from ..on_ranks import on_ranks
from . import toy
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES)


def sgd(module: nn.Module) -> torch.optim.SGD:
    """Return an optimizer without state."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


def add_up(module: nn.Module, batches: list[torch.Tensor]) -> None:
    """Run a backward for each batch."""
    for batch in batches:
        toy.loss_of(module, batch).backward()


def closure_of(owner: Any, module: nn.Module, batches: list[torch.Tensor], zero: bool) -> Callable[[], torch.Tensor]:
    """Return a closure with a backward for each batch, on zeroed gradients or added to existing ones."""

    def closure() -> torch.Tensor:
        if zero:
            owner.zero_grad()
        losses = [toy.loss_of(module, batch) for batch in batches]
        for loss in losses:
            loss.backward()
        total = torch.stack(losses).sum().detach()
        return total if owner is not mine.get("optimizer") else engine.allreduce(total, name="loss")

    return closure


mine: dict[str, Any] = {}  # the optimizer of a case whose closures must return the same loss on all ranks


def test_a_closure_completes_a_window(wrap: Wrap) -> None:
    """Lightning runs passes before the step, and the last one in its closure."""
    for passes, before in ((2, 1), (3, 2), (3, 1), (3, 0), (2, 2)):  # complete, complete, incomplete, incomplete, more
        model, alone = toy.mlp(), toy.mlp()
        optimizer = wrap(sgd(model), model.named_parameters(), backward_passes_per_step=passes)
        other = sgd(alone)
        for step in range(3):
            batches = [toy.whole_batch(10 * step + number) for number in range(before + 1)]
            for module, owner, part in (
                (model, optimizer, [toy.shard(batch) for batch in batches]),
                (alone, other, batches),
            ):
                owner.zero_grad()
                add_up(module, part[:before])
                closure = closure_of(owner, module, part[before:], zero=False)
                if step == 1:
                    owner.step(closure=closure)
                else:
                    owner.step(closure)
        toy.check_same_everywhere(toy.parameters_of(model))
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_closures_in_no_sync_are_reduced_by_the_step(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer, other = wrap(sgd(model), model.named_parameters()), sgd(alone)
    for step in range(2):
        with optimizer.no_sync():
            optimizer.step(closure_of(optimizer, model, [toy.shard(toy.whole_batch(step))], zero=True))
        other.step(closure_of(other, alone, [toy.whole_batch(step)], zero=True))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_a_closure_that_is_called_several_times_in_windows(wrap: Wrap) -> None:
    """LBFGS: with one pass in each call every window is short; two passes complete it in each call."""
    for number in (1, 2, 3):
        model, alone = toy.mlp(), toy.mlp()
        optimizer = mine["optimizer"] = wrap(
            torch.optim.LBFGS(model.parameters(), max_iter=4),
            model.named_parameters(),
            backward_passes_per_step=2,
        )
        other = torch.optim.LBFGS(alone.parameters(), max_iter=4)
        batches = [toy.whole_batch(each) for each in range(number)]
        for _ in range(2):
            optimizer.step(closure_of(optimizer, model, [toy.shard(batch) for batch in batches], zero=True))
            other.step(closure_of(other, alone, batches, zero=True))
        mine.clear()
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-6, atol=1e-7)


class Deaf(torch.optim.SGD):
    """An optimizer that takes a closure and does not call it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def test_a_closure_that_is_never_called_is_an_error(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = wrap(Deaf(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2)
    add_up(model, [toy.shard(toy.whole_batch(0))])
    text = toy.raises(EngineError, lambda: optimizer.step(lambda: None))
    assert "Deaf.step() was given a closure and has not called it" in text, text
    optimizer.step()
    optimizer.zero_grad()
    add_up(model, [toy.shard(toy.whole_batch(step)) for step in range(2)])
    optimizer.step(lambda: None)  # The window is complete before it.


@pytest.mark.sample(1)
def test_a_rank_that_leaves_backward_out(wrap: Wrap) -> None:
    """The rank contributes zeros to that step only, however often it happens, in both modes of zero_grad."""
    for to_none in (True, False):
        for passes in (1, 2):
            model, alone = toy.mlp(), toy.mlp()
            optimizer = wrap(sgd(model), model.named_parameters(), backward_passes_per_step=passes)
            other = sgd(alone)
            for step in range(5):
                optimizer.zero_grad(to_none)
                other.zero_grad()
                idle = [(step + 1) % engine.size(), step] if step != 3 else list(range(engine.size()))
                batch = toy.whole_batch(step)
                if engine.rank() not in idle:
                    add_up(model, [toy.shard(batch)] * passes)
                for rank in range(engine.size()):
                    if rank not in idle:
                        part = toy.loss_of(alone, batch[rank :: engine.size()])
                        (part * passes / engine.size()).backward()
                optimizer.step()
                other.step()
            assert not toy.in_flight()
            toy.check_same_everywhere(toy.parameters_of(model))
            toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_an_optimizer_for_each_head(wrap: Wrap) -> None:
    """One backward fills some gradients of the heads that a rank's batch touches, in the rank's own order."""
    heads = [nn.ModuleList([toy.mlp(), toy.mlp()]) for _ in range(2)]
    optimizers = [wrap(sgd(head), head.named_parameters()) for head in heads]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        first = (engine.rank() + step) % 2
        batch = toy.shard(toy.whole_batch(step))
        loss = torch.zeros((), dtype=torch.float64)
        for number in (first, 1 - first):
            loss = toy.loss_of(lambda x, part=heads[number][first], sofar=loss: part(x) + 0 * sofar, batch) + loss
        everything = nn.ModuleList(heads)
        wanted = {name: torch.zeros_like(each) for name, each in everything.named_parameters()}
        wanted |= toy.local_gradients(loss, everything)
        loss.backward()
        wanted, found = toy.averaged(wanted), toy.gradients_of(everything)
        toy.check_close(found, {name: wanted[name] for name in found})
        for optimizer in optimizers:
            optimizer.step()
    for step in range(2):  # The last rank's batch touches one head only.
        for optimizer in optimizers:
            optimizer.zero_grad()
        touched = heads if engine.rank() < engine.size() - 1 or engine.size() == 1 else heads[:1]
        sum((toy.loss_of(head[0], toy.shard(toy.whole_batch(step))) for head in touched), torch.zeros(())).backward()
        for optimizer in optimizers:
            optimizer.step()
    toy.check_same_everywhere(toy.parameters_of(nn.ModuleList(heads)))


def test_a_rank_without_a_backward_among_gradients_that_python_compresses() -> None:
    class Halved(engine.Compression.none):  # type: ignore[name-defined,misc]
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
            return tensor / 2, None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
            return tensor * 2

    for compression in (Halved, engine.torch.PowerSGD(rank=2), engine.Compression.bf16):
        model = toy.mlp()
        optimizer = engine.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression)
        for step in range(3):
            optimizer.zero_grad()
            local = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
            if engine.rank() != step % engine.size():
                loss = toy.loss_of(model, toy.shard(toy.whole_batch(step)))
                local = toy.local_gradients(loss, model)
                loss.backward()
            optimizer.step()
            if compression is Halved and engine.size() > 1:
                toy.check_close(toy.gradients_of(model), toy.averaged(local))
        toy.check_same_everywhere(toy.parameters_of(model))


def test_a_rank_without_a_backward_in_a_process_set_and_with_adasum() -> None:
    if engine.size() < 3:
        return
    pair = engine.add_process_set([0, 1])
    try:
        if pair.included():
            model = toy.mlp()
            for op in (engine.Average, engine.Adasum):
                optimizer = engine.DistributedOptimizer(sgd(model), model.named_parameters(), op=op, process_set=pair)
                for step in range(3):
                    optimizer.zero_grad()
                    if engine.rank() == step % 2:
                        add_up(model, [toy.shard(toy.whole_batch(step))])
                    optimizer.step()
                optimizer.unwrap()
            engine.check_consistency(toy.parameters_of(model), process_set=pair)
    finally:
        engine.remove_process_set(pair)


def test_steps_without_a_backward_change_nothing_else(wrap: Wrap) -> None:
    """Two steps on the same gradients, and steps without any, equal those of one process."""
    for op in (engine.Average, engine.Sum):
        model, alone = toy.mlp(), toy.mlp()
        momentum = {"lr": 0.01, "momentum": 0.9}
        optimizer = wrap(torch.optim.SGD(model.parameters(), **momentum), model.named_parameters(), op=op)
        other = torch.optim.SGD(alone.parameters(), **momentum)
        for step in range(2):
            for module, owner, batch in (
                (model, optimizer, toy.shard(toy.whole_batch(step))),
                (alone, other, toy.whole_batch(step)),
            ):
                scale = engine.size() if module is alone and op == engine.Sum else 1
                owner.zero_grad(set_to_none=step == 0)
                owner.step()
                (toy.loss_of(module, batch) * scale).backward()
                owner.step()
                owner.step()
        toy.check_same_everywhere(toy.parameters_of(model))
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_a_scaler_on_a_rank_without_a_backward() -> None:
    """`synchronize` before `unscale_` gives the rank the others' gradients; their infinity skips its step, too."""
    model = toy.mlp(torch.float32)
    optimizer = engine.DistributedOptimizer(sgd(model), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    moved = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 0 or engine.rank() != step % engine.size() or engine.size() == 1:
            spoiled = float("inf") if step == 2 else 1.0
            scaler.scale(toy.loss_of(model, toy.shard(toy.whole_batch(step)).float()) * spoiled).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = toy.parameters_of(model)
        scaler.step(optimizer)
        scaler.update()
        moved.append(any(not torch.equal(each, before[name]) for name, each in toy.parameters_of(model).items()))
    toy.check_same_everywhere(toy.parameters_of(model))
    assert moved == [True, True, False, True], moved


def autograd_grad(model: nn.Module, batch: torch.Tensor) -> None:
    """Assign the tensors that autograd returns as gradients."""
    found = torch.autograd.grad(toy.loss_of(model, batch), list(model.parameters()), create_graph=True)
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient


def func_grad(model: nn.Module, batch: torch.Tensor) -> None:
    """Copy the gradients of `torch.func.grad` into existing ones."""
    values = dict(model.named_parameters())
    found = torch.func.grad(lambda p: toy.loss_of(lambda x: torch.func.functional_call(model, p, (x,)), batch))(values)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = found[name].detach().clone()
        else:
            parameter.grad.copy_(found[name])


def by_sample(model: nn.Module, batch: torch.Tensor) -> None:
    """Clip each sample's gradient, as in differential privacy; the sum consists of views of one vector."""
    total = [torch.zeros_like(each) for each in model.parameters()]
    for sample in batch:
        gradients = torch.autograd.grad(toy.loss_of(model, sample[None]), list(model.parameters()))
        norm = torch.stack([each.norm() for each in gradients]).norm()
        for each, gradient in zip(total, gradients, strict=True):
            each += gradient / norm.clamp(min=1.0) / len(batch)
    flat = torch.cat([each.flatten() for each in total])
    parts = flat.split([each.numel() for each in total])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)


def expanded(model: nn.Module, batch: torch.Tensor) -> None:
    """Set gradients whose elements all share one number in memory."""
    for parameter in model.parameters():
        parameter.grad = batch.mean().expand(parameter.shape)


def test_gradients_set_by_hand(wrap: Wrap) -> None:
    for fill in (autograd_grad, func_grad, by_sample, expanded):
        for op in (engine.Average, engine.Sum):
            model, alone = toy.mlp(), toy.mlp()
            optimizer, other = wrap(sgd(model), model.named_parameters(), op=op), sgd(alone)
            for step in range(4):
                if step < 2:
                    optimizer.zero_grad()
                fill(model, toy.shard(toy.whole_batch(step)))
                fill(alone, toy.whole_batch(step))
                if op == engine.Sum:
                    for parameter in alone.parameters():
                        assert parameter.grad is not None
                        parameter.grad = parameter.grad.detach() * engine.size()
                if step % 2 and fill is not expanded:  # to clip, like scripts for Horovod
                    optimizer.synchronize()
                    for module in (model, alone):
                        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    optimizer.step()
                other.step()
            toy.check_same_everywhere(toy.parameters_of(model))
            toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-9, atol=1e-10)


def test_what_was_reduced_belongs_to_the_program(wrap: Wrap) -> None:
    """Gradients that are changed or replaced after backward are not reduced again, even if a rank had none."""
    for op in (engine.Average, engine.Sum):
        model = nn.ModuleList([toy.mlp(), toy.mlp()])
        optimizer = wrap(sgd(model), model.named_parameters(), op=op)
        last = engine.rank() == engine.size() - 1 and engine.size() > 1
        loss = toy.loss_of(model[0], toy.shard(toy.whole_batch(0)))
        if not last:  # The last rank has no gradient of the second head.
            loss = loss + toy.loss_of(model[1], toy.shard(toy.whole_batch(1)))
        loss.backward()
        for number, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            if number % 2:
                parameter.grad = parameter.grad * 0.5
            else:
                parameter.grad.mul_(0.5)
        before, expected = toy.reduced(), toy.gradients_of(model)
        optimizer.synchronize()
        optimizer.step()
        found = toy.gradients_of(model)
        assert toy.reduced() == before
        toy.check_close(found, expected)


def test_gradients_set_by_hand_after_a_backward_that_leaves_them_alone(wrap: Wrap) -> None:
    for op in (engine.Average, engine.Sum):
        model = nn.ModuleDict(
            {"learned": toy.mlp(), "set": nn.Linear(3, 3).double(), "unused": nn.Linear(2, 2).double()}
        )
        optimizer = wrap(sgd(model), model.named_parameters(), op=op)
        for _ in range(2):
            optimizer.zero_grad()
            toy.loss_of(model["learned"], toy.shard(toy.whole_batch(0))).backward()
            expected = toy.gradients_of(model)
            for parameter in model["set"].parameters():
                parameter.grad = torch.full_like(parameter, engine.rank())
            optimizer.step()
            number = engine.size()
            value = number * (number - 1) / 2 / (number if op == engine.Average else 1)
            for name, parameter in model["set"].named_parameters():
                expected[f"set.{name}"] = torch.full_like(parameter, value)
            toy.check_close(toy.gradients_of(model), expected)


def test_what_no_sync_gathered_is_reduced_by_step(wrap: Wrap) -> None:
    """The test continues after a reduction; operations other than Average would count twice, and raise an error."""
    model, alone = toy.mlp(), toy.mlp()
    optimizer, other = wrap(sgd(model), model.named_parameters()), sgd(alone)
    for early in (False, True):
        for module, owner, batch in (
            (model, optimizer, toy.shard(toy.whole_batch(0))),
            (alone, other, toy.whole_batch(0)),
        ):
            owner.zero_grad()
            add_up(module, [batch] if early else [])
        with optimizer.no_sync():
            add_up(model, [toy.shard(toy.whole_batch(1))])
        add_up(alone, [toy.whole_batch(1)])
        optimizer.step()
        other.step()
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
    model = toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters(), op=engine.Sum)
    add_up(model, [toy.shard(toy.whole_batch(0))])
    with optimizer.no_sync():
        add_up(model, [toy.shard(toy.whole_batch(1))])
    text = toy.raises(EngineError, optimizer.step)
    assert "reduced already" in text and "no_sync()" in text, text
    optimizer.zero_grad()
    toy.train(model, optimizer, toy.shards(1))


def bring_late(parameter: nn.Parameter, how: str) -> None:
    """Give a parameter a gradient after the backward pass."""
    if how == "unfrozen":
        parameter.requires_grad_(True)
    parameter.grad = torch.full_like(parameter, engine.rank() + 1)


@pytest.mark.sample(6)
@pytest.mark.parametrize("compression", [None, "own"])
@pytest.mark.parametrize("how", ["set by hand", "unfrozen"])
def test_late_gradients_of_one_rank_do_not_meet_the_next_pass_of_others(
    how: str, compression: str | None, wrap: Wrap
) -> None:
    """One rank's late gradients are an error on all ranks, which go on with the next step; those of all are reduced."""
    size = engine.size()
    # Other ranks do not know what a single rank has unfrozen: that stalls, with the parameter's name.
    for lone in (False, True) if how == "set by hand" else (False,):
        early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=how != "unfrozen")
        options = {} if compression is None else {"compression": Halved}
        optimizer = wrap(torch.optim.SGD([early, late], lr=0.0), [("early", early), ("late", late)], **options)

        def backward(early: nn.Parameter = early) -> None:
            (early * (engine.rank() + 1)).sum().backward()

        backward()
        if not lone or engine.rank() == 0:
            bring_late(late, how)
        if lone and size > 1:

            def go_on(optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()
                backward()

            said = toy.raises(MismatchError, go_on)
            assert "early" in said, said
        else:
            optimizer.step()
            toy.check_close({"": late.grad}, {"": torch.full((3,), (size + 1) / 2)})  # type: ignore[dict-item]
        for _ in range(2):
            optimizer.zero_grad()
            backward()
            optimizer.step()
            toy.check_close({"": early.grad}, {"": torch.full((3,), (size + 1) / 2)})  # type: ignore[dict-item]
            assert late.grad is None
        optimizer.unwrap()


class Halved:
    """A compressor of the program, whose rounds run in Python."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Any:
        return tensor / 2, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor * 2


def test_skip_synchronize_leaves_gradients_local(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters())
    before = toy.reduced()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, engine.rank())
    with optimizer.skip_synchronize():
        optimizer.step()
    local = [parameter.grad for parameter in model.parameters()]
    assert toy.reduced() == before
    assert all(each is not None and bool((each == engine.rank()).all()) for each in local)


def test_skip_synchronize_leaves_a_window_local(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters(), backward_passes_per_step=2)
    before = toy.reduced()
    for batch in toy.shards(2):
        optimizer.zero_grad()
        add_up(model, [batch])
        with optimizer.skip_synchronize():
            optimizer.step()
    after = toy.reduced()
    toy.train(alone, sgd(alone), toy.shards(2))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
    assert before == after


def test_thawed_before_a_step_whose_closure_has_no_backward(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    model[0].requires_grad_(False)
    optimizer, other = wrap(sgd(model), model.named_parameters()), sgd(alone)
    model[0].requires_grad_(True)
    batch = toy.whole_batch(0)
    add_up(model, [toy.shard(batch)])
    add_up(alone, [batch])
    optimizer.step(lambda: torch.zeros(()))
    other.step()
    toy.check_same_everywhere(toy.parameters_of(model))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_a_wait_that_a_signal_ends_goes_on_in_the_step(wrap: Wrap) -> None:
    if engine.size() == 1:
        return
    weight = nn.Parameter(torch.zeros(5, 3).t())  # its gradient is reduced in a copy
    bias = nn.Parameter(torch.zeros(3))
    optimizer = wrap(torch.optim.SGD([weight, bias], lr=1.0))
    mine = engine.rank() + 1.0
    toy.leave_waiting(((weight * mine).sum() + (bias * mine).sum()).backward, operations=2)
    optimizer.step()
    mean = (engine.size() + 1) / 2
    for parameter in (weight, bias):
        assert bool((parameter == -mean).all()), parameter


@contextmanager
def warnings_of_the_engine() -> Iterator[list[str]]:
    """Collect the warnings of the engine's logger on this rank."""
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger, handler = logging.getLogger("engine"), Keep(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def test_parameters_that_differ_in_the_first_step_are_told_of() -> None:
    last = engine.size() - 1
    for op in (engine.Average, engine.Sum, engine.Adasum):
        if op == engine.Adasum and engine.size() == 3:
            continue
        for differs, checked in ((False, True), (True, True), (True, False)):
            model = toy.mlp()
            model[0].requires_grad_(False)
            if differs and engine.rank() == last:
                for parameter in model[:3].parameters():
                    parameter.data += 1
            optimizer = engine.DistributedOptimizer(
                sgd(model), model.named_parameters(), op=op, check_parameters=checked
            )
            with warnings_of_the_engine() as texts:
                toy.train(model, optimizer, toy.shards(2))
                engine.barrier("told")
                toy.train(model, optimizer, toy.shards(2))
            if differs and checked and engine.rank() == 0 and last:
                (text,) = texts
                assert f"'0.bias' and 3 more; rank {last} has not the values of rank 0" in text, text
                assert "engine.torch.broadcast_parameters(model.state_dict(), root_rank=0)" in text, text
            else:
                assert not texts, texts


def test_frozen_parameters_that_the_engine_cannot_read_are_left_out_of_that() -> None:
    weight = nn.Parameter(torch.zeros(3))
    frozen = torch.zeros(3, device="meta"), torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex64)
    others = [nn.Parameter(each, requires_grad=False) for each in frozen]
    optimizer = engine.DistributedOptimizer(torch.optim.SGD([weight, *others], lr=1.0))
    with warnings_of_the_engine() as texts:
        for _ in range(2):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
    assert not texts and weight.tolist() == [-2.0] * 3, (texts, weight)


def test_a_rank_whose_first_step_comes_after_a_join(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters())
    with warnings_of_the_engine() as texts:
        for epoch in range(2):
            toy.train(model, optimizer, toy.shards(2 if engine.rank() == 0 or epoch else 0))
            engine.join()
    assert not texts and not toy.in_flight(), (texts, toy.in_flight())


def test_a_model_in_another_library_is_refused() -> None:
    if engine.size() == 1:
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        texts = []
        model = toy.mlp()
        wrapped = nn.parallel.DistributedDataParallel(model)
        texts.append(toy.raises(EngineError, lambda: engine.DistributedOptimizer(sgd(model), model.named_parameters())))
        del wrapped
        optimizer = engine.DistributedOptimizer(sgd(model), model.named_parameters())
        toy.train(model, optimizer, toy.shards(1))  # the parameter is forgotten with the module that wrapped it
        optimizer.unwrap()
        optimizer = engine.DistributedOptimizer(sgd(model), model.named_parameters())
        wrapped = nn.parallel.DistributedDataParallel(model)
        texts.append(toy.raises(EngineError, optimizer.step))
        del wrapped
        for text in texts:
            assert "'0.weight' belongs to a model in DistributedDataParallel" in text, text
            assert "docs/how-to/libraries.md" in text, text
        group = dist.new_group([engine.rank()], use_local_synchronization=True)
        alone = nn.parallel.DistributedDataParallel(toy.mlp(), process_group=group)  # over this rank only
        toy.raises(EngineError, lambda: engine.DistributedOptimizer(sgd(alone), alone.named_parameters()))
    finally:
        dist.destroy_process_group()


@pytest.mark.sample(1)
def test_compiled_autograd_is_refused(wrap: Wrap) -> None:
    from torch._dynamo import compiled_autograd

    model = toy.mlp()
    optimizer = wrap(sgd(model), model.named_parameters())
    texts = []
    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable  # its name in torch 2.2
    for compiler in (lambda graph: graph, torch.compile(backend="eager")):
        loss = toy.loss_of(model, toy.shard(toy.whole_batch(0)))
        with enable(compiler):
            texts.append(toy.raises(EngineError, loss.backward))
        optimizer.zero_grad()
    getattr(compiled_autograd, "reset", lambda: None)()
    assert all("does not go with compiled autograd" in text for text in texts), texts
    toy.train(model, optimizer, toy.shards(1))


def test_adasum_goes_on_without_compression() -> None:
    if engine.size() & (engine.size() - 1):
        return
    model, same = toy.mlp(), toy.mlp()
    with warnings_of_the_engine() as texts:
        optimizer = engine.DistributedOptimizer(
            sgd(model), model.named_parameters(), engine.Compression.fp16, op=engine.Adasum
        )
    toy.train(model, optimizer, toy.shards(2))
    toy.train(same, engine.DistributedOptimizer(sgd(same), op=engine.Adasum), toy.shards(2))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(same), rtol=0, atol=0)
    assert len(texts) == (engine.rank() == 0), texts
    assert not texts or "compression=FP16Compressor has no effect" in texts[0], texts


def test_wrong_arguments_are_named(wrap: Wrap) -> None:
    model = toy.mlp()
    text = toy.raises(TypeError, lambda: wrap(sgd(model), model))
    assert "is a Sequential, not its parameters: give model.named_parameters()" in text, text
    phase = nn.Linear(2, 2, dtype=torch.complex64)
    text = toy.raises(UnsupportedTensorError, lambda: wrap(sgd(phase), phase.named_parameters()))
    assert "'gradient" in text and ".weight'" in text, text
