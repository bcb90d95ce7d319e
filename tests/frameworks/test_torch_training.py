"""Training on N ranks equals training on the whole batch in one process."""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import engine
import engine.torch

from ..on_ranks import on_ranks
from . import toy
from .marked_model import Marked
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES, toy.BY_METHOD)

Make = Callable[[nn.Module], Any]
KINDS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "adamw, foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "fused": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
}


def test_equals_one_process_with_the_whole_batch(wrap: Wrap) -> None:
    for make in KINDS.values():
        model, alone = toy.mlp(), toy.mlp()
        toy.train(model, wrap(make(model), model.named_parameters()), toy.shards(6))
        toy.train(alone, make(alone), toy.wholes(6))
        toy.check_same_everywhere(toy.parameters_of(model))
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-8, atol=1e-9)


def test_gradients_are_averaged_when_backward_returns(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        toy.loss_of(model, toy.shard(toy.whole_batch(step))).backward()
        waiting, found = toy.in_flight(), toy.gradients_of(model)
        alone.zero_grad()
        toy.loss_of(alone, toy.whole_batch(step)).backward()
        assert not waiting
        toy.check_close(found, toy.gradients_of(alone))
    before = toy.parameters_of(model)
    optimizer.step()
    toy.check_close(toy.parameters_of(model), {name: each - 0.1 * found[name] for name, each in before.items()})


def test_every_dtype_is_averaged_to_the_last_bit(wrap: Wrap) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        model = toy.mlp(dtype)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        optimizer.zero_grad()
        loss = toy.loss_of(model, toy.shard(toy.whole_batch(0)).to(dtype))
        mine = toy.local_gradients(loss, model)
        loss.backward()
        found = toy.gradients_of(model)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        for name, each in mine.items():
            values = engine.allgather_object(each.to(torch.float64).tolist())
            total = torch.zeros(each.shape, dtype=wide)
            for value in values:
                total = total + torch.tensor(value, dtype=wide)
            expected = (total / engine.size()).to(dtype)
            assert torch.equal(found[name], expected), (dtype, name, (found[name] - expected).abs().max())


def test_half_precision_trains(wrap: Wrap) -> None:
    model = toy.mlp(torch.bfloat16)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
    losses = toy.train(model, optimizer, (toy.shard(toy.whole_batch(0)).bfloat16() for _ in range(15)))
    toy.check_same_everywhere(toy.parameters_of(model))
    assert losses[-1] < 0.9 * losses[0], losses


class Pictures(nn.Sequential):
    """A model with convolutions in two and three dimensions."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        flat = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2), nn.Unflatten(1, (2, 2))
        super().__init__(*flat, nn.Conv3d(2, 5, (1, 3, 3)), nn.Flatten(), nn.Linear(5 * 2 * 8, 3))
        self.double()


def test_channels_last_gradients(wrap: Wrap) -> None:
    def pictures(step: int) -> torch.Tensor:
        return toy.whole_batch(step, 3 * 10 * 8).view(-1, 3, 10, 8).contiguous(memory_format=torch.channels_last)

    model, alone = Pictures(), Pictures()
    for module in (model, alone):
        module[0].to(memory_format=torch.channels_last)
        module[2].to(memory_format=torch.channels_last)
        module[4].to(memory_format=torch.channels_last_3d)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model.named_parameters())
    toy.train(model, optimizer, (toy.shard(pictures(step)) for step in range(3)))
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9), (pictures(step) for step in range(3)))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-8, atol=1e-10)
    gradient = model[0].weight.grad
    assert gradient is not None and gradient.is_contiguous(memory_format=torch.channels_last)


def test_mixed_memory_formats(wrap: Wrap) -> None:
    """Gradients have another layout than their parameters."""
    model, alone = Pictures(), Pictures()
    for module in (model, alone):
        module[0].weight.data = module[0].weight.data.transpose(0, 1).contiguous().transpose(0, 1)
        module[6].weight.data = module[6].weight.data.t().contiguous().t()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
    data = [toy.whole_batch(step, 3 * 10 * 8).view(-1, 3, 10, 8) for step in range(3)]
    toy.train(model, optimizer, map(toy.shard, data))
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.05), data)
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-8, atol=1e-10)


def test_both_modes_of_zero_grad(wrap: Wrap) -> None:
    for to_none in (True, False):
        model, alone = toy.mlp(), toy.mlp()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        other = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad(set_to_none=to_none)
            assert all((each.grad is None) == (to_none or step == 0) for each in model.parameters())
            assert all(each.grad is None or not each.grad.any() for each in model.parameters())
            other.zero_grad(set_to_none=to_none)
            toy.loss_of(model, toy.shard(toy.whole_batch(step))).backward()
            toy.loss_of(alone, toy.whole_batch(step)).backward()
            optimizer.step()
            other.step()
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_views_stay_in_shared_memory() -> None:
    model = toy.mlp()
    optimizer = engine.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), gradient_as_bucket_view=True
    )
    places = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        toy.loss_of(model, toy.shard(toy.whole_batch(step))).backward()
        places.append([each.grad.data_ptr() for each in model.parameters() if each.grad is not None])
        optimizer.step()
    assert all(place == places[0] for place in places)
    assert len(places[0]) == 6
    ends = [each.grad.data_ptr() + each.grad.nbytes for each in model.parameters() if each.grad is not None]
    assert max(ends) - min(places[0]) < 64 * 1024  # side by side


def test_schedulers_made_before_and_after(wrap: Wrap) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, alone = toy.mlp(), toy.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        early = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        wrap(optimizer, model.named_parameters())
        late = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        other = torch.optim.SGD(alone.parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(other, 2, 0.5)]
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1 / (step + 1)))
        for step in range(5):
            toy.train(model, optimizer, [toy.shard(toy.whole_batch(step))])
            toy.train(alone, other, [toy.whole_batch(step)])
            for scheduler in (early, late, *schedulers):
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] != 0.1
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_clipping_sees_averaged_gradients(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    norms: list[float] = []

    def clip(module: nn.Module) -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1).item())

    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    toy.train(model, optimizer, toy.shards(3), lambda: clip(model))
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(3), lambda: clip(alone))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
    assert all(abs(a - b) < 1e-10 and a > 0.1 for a, b in zip(norms[:3], norms[3:], strict=True)), norms


def test_what_horovod_scripts_say_around_clipping(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    before = toy.reduced()
    for step in range(2):
        optimizer.zero_grad()
        other.zero_grad()
        toy.loss_of(model, toy.shard(toy.whole_batch(step))).backward()
        toy.loss_of(alone, toy.whole_batch(step)).backward()
        optimizer.synchronize()
        for module in (model, alone):
            torch.nn.utils.clip_grad_value_(module.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        other.step()
    assert toy.reduced() - before == 2 * len(list(model.parameters()))  # Each gradient once.
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_what_horovod_scripts_say_around_gradient_scaling(wrap: Wrap) -> None:
    """The script also clips, and has a window of two passes; an infinity skips the step on all ranks."""
    model, alone = toy.mlp(torch.float32), toy.mlp(torch.float32)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2)
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    scaler, reference = (torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(2))
    counts = []
    for step in range(3):
        before = toy.reduced()
        optimizer.zero_grad()
        other.zero_grad()
        for window in range(2):
            spoiled = float("inf") if step == 1 and window == 0 else 1.0
            batch = toy.whole_batch(2 * step + window).float()
            mine = spoiled if engine.rank() == 0 else 1.0
            scaler.scale(toy.loss_of(model, toy.shard(batch)) * mine).backward()
            reference.scale(toy.loss_of(alone, batch) * spoiled).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        reference.unscale_(other)
        for module in (model, alone):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        reference.step(other)
        scaler.update()
        reference.update()
        counts.append(toy.reduced() - before)
    assert counts == [6] * 3, counts
    assert scaler.get_scale() == reference.get_scale() == 128.0
    toy.check_same_everywhere(toy.parameters_of(model))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-4, atol=1e-5)


def test_gradient_scaler_skips_a_step_on_all_ranks(wrap: Wrap) -> None:
    model = toy.mlp(torch.float32)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    moved, scales = [], []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = toy.loss_of(model, toy.shard(toy.whole_batch(step)).float())
        if step == 1 and engine.rank() == engine.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = toy.parameters_of(model)
        scaler.step(optimizer)
        scaler.update()
        moved.append(any(not torch.equal(each, before[name]) for name, each in toy.parameters_of(model).items()))
        scales.append(scaler.get_scale())
    toy.check_same_everywhere(toy.parameters_of(model))
    assert moved == [True, False, True], moved
    assert scales == [1024.0, 512.0, 512.0], scales


def test_closures(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    losses = []

    def closure(module: nn.Module, batch: torch.Tensor, owner: Any) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            owner.zero_grad()
            loss = toy.loss_of(module, batch)
            loss.backward()
            return loss

        return run

    for step in range(3):
        losses.append(optimizer.step(closure(model, toy.shard(toy.whole_batch(step)), optimizer)).item())
        other.step(closure(alone, toy.whole_batch(step), other))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
    assert len(losses) == 3


def test_lbfgs(wrap: Wrap) -> None:
    """One step has several backwards; the closure returns the same loss on all ranks, by which they decide."""
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.LBFGS(model.parameters(), max_iter=5), model.named_parameters())
    other = torch.optim.LBFGS(alone.parameters(), max_iter=5)

    def mine() -> torch.Tensor:
        optimizer.zero_grad()
        loss = toy.loss_of(model, toy.shard(toy.whole_batch(0)))
        loss.backward()
        return engine.allreduce(loss.detach(), name="loss")

    def reference() -> torch.Tensor:
        other.zero_grad()
        loss = toy.loss_of(alone, toy.whole_batch(0))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(mine)
        other.step(reference)
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-6, atol=1e-7)


@pytest.mark.sample(1)
def test_compiled_models(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    toy.train(torch.compile(model, backend="aot_eager"), optimizer, toy.shards(3))
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(3))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


@pytest.mark.slow
def test_compiled_models_keep_the_overlap() -> None:
    """Halfway through backward the last layer's gradients are reduced; in one compiled graph they would not be."""
    alone = toy.mlp()
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(2))
    in_pieces = engine.torch.compile_backend("aot_eager", bucket_bytes=256)
    for backend, patience, expected in ((in_pieces, 40.0, 2), ("aot_eager", 0.2, 0)):
        model = Marked(toy.mlp(), wait_for=2, patience=patience)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        # The count of operations would include those of the check.
        optimizer = engine.DistributedOptimizer(sgd, model.named_parameters(), check_parameters=False)
        fast = torch.compile(model, backend=backend)
        for step in range(2):
            engine.barrier()
            model.begin()
            toy.train(fast, optimizer, [toy.shard(toy.whole_batch(step))])
        assert model.counts == [expected] * 2, (backend, model.counts)
        toy.check_close(toy.parameters_of(model.inner), toy.parameters_of(alone))


class Stored(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Samples that contain the process that read them."""

    def __init__(self, steps: int) -> None:
        self.samples = torch.cat(list(toy.shards(steps)))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.samples[index], os.getpid()


def test_data_loading_workers(wrap: Wrap) -> None:
    """Workers are forked while the engine runs and gradients are in shared memory."""
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loader = torch.utils.data.DataLoader(Stored(4), batch_size=4, num_workers=1, multiprocessing_context="fork")
    pids: set[int] = set()
    for epoch in range(2):
        for batch, readers in loader:
            pids |= set(readers.tolist())
            toy.train(model, optimizer, [batch])
        if epoch == 0:
            first = toy.parameters_of(model)
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(4))
    toy.check_same_everywhere(toy.parameters_of(model))
    toy.check_close(first, toy.parameters_of(alone))
    assert len(pids) == 2 and os.getpid() not in pids


def test_training_in_another_thread(wrap: Wrap) -> None:
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    failures: list[BaseException] = []

    def work() -> None:
        try:
            toy.train(model, optimizer, toy.shards(3))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(3))
    assert not failures, failures
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_sum_min_and_max_of_gradients() -> None:
    expected = {
        engine.Sum: lambda values: values.sum(dim=0),
        engine.Min: lambda values: values.amin(dim=0),
        engine.Max: lambda values: values.amax(dim=0),
    }
    for op, combine in expected.items():
        model = toy.mlp()
        optimizer = engine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=op)
        optimizer.zero_grad()
        loss = toy.loss_of(model, toy.shard(toy.whole_batch(0)))
        mine = toy.local_gradients(loss, model)
        loss.backward()
        found = toy.gradients_of(model)
        ranks = engine.allgather_object({name: each.tolist() for name, each in mine.items()})
        wanted = {
            name: combine(torch.stack([torch.tensor(rank[name], dtype=torch.float64) for rank in ranks]))
            for name in mine
        }
        toy.check_close(found, wanted)


def test_gradients_are_scaled_before_and_after() -> None:
    model, alone = toy.mlp(), toy.mlp()
    options = {"op": engine.Sum, "prescale_factor": 0.5, "postscale_factor": 2.0 / engine.size()}
    optimizer = engine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    toy.train(model, optimizer, toy.shards(3))
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(3))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_beside_torch_distributed() -> None:
    if engine.size() == 1:
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        model, alone = toy.mlp(), toy.mlp()
        optimizer = engine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        total = torch.ones(3) * engine.rank()
        toy.train(model, optimizer, toy.shards(2), lambda: dist.all_reduce(total))
        toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(2))
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
        assert dist.get_rank() == engine.rank()
    finally:
        dist.destroy_process_group()


def test_copies_are_plain_optimizers() -> None:
    model = toy.mlp()
    model[0].requires_grad_(False)
    optimizer = engine.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), check_parameters=False)
    assert isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"
    toy.train(model, optimizer, toy.shards(2))
    other = copy.deepcopy(optimizer)
    assert type(other) is torch.optim.Adam
    assert optimizer.unwrap() is optimizer and type(optimizer) is torch.optim.Adam
    model[0].requires_grad_(True)
    before = engine.counters()["tensors"]
    toy.train(model, optimizer, toy.shards(2))
    assert engine.counters()["tensors"] == before


def test_learning_rates_are_scaled_by_the_world_size_and_warmed_up() -> None:
    size = engine.size()
    lr = engine.torch.scale_learning_rate(0.1)
    assert lr == 0.1 * size
    model, alone = toy.mlp(), toy.mlp()
    optimizer = engine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    warmup = engine.torch.gradual_warmup(optimizer, 4)
    other = torch.optim.SGD(alone.parameters(), lr=lr, momentum=0.9)
    rates = []
    for step in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        other.param_groups[0]["lr"] = 0.1 + (lr - 0.1) * min(step, 4) / 4
        toy.train(model, optimizer, [toy.shard(toy.whole_batch(step))])
        toy.train(alone, other, [toy.whole_batch(step)])
        warmup.step()
    assert all(abs(rate - (0.1 + (lr - 0.1) * min(step, 4) / 4)) < 1e-12 for step, rate in enumerate(rates)), rates
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-8, atol=1e-9)
