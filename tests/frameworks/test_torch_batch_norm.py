"""`SyncBatchNorm` on N ranks equals `BatchNorm` on all ranks' batches in one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import engine
import engine.torch
from engine.errors import MismatchError, NotInitializedError
from engine.torch import SyncBatchNorm

from ..on_ranks import on_ranks
from . import toy

pytestmark = on_ranks(*toy.SIZES)

# By the dimensions of the input: the layer in one process, and the shape after N and C.
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
TAILS = {2: (), 3: (5,), 4: (4, 3), 5: (2, 3, 2)}
CHANNELS = 3


def batches(rows: list[int], dims: int, step: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return every rank's input with these rows, which all ranks can compute; means and variances differ by rank."""
    generator = torch.Generator().manual_seed(100 * step + dims)
    return [
        (torch.randn(n, CHANNELS, *TAILS[dims], generator=generator, dtype=torch.float64) * (rank + 1) - 2 * rank).to(
            dtype
        )
        for rank, n in enumerate(rows)
    ]


def uneven() -> Iterator[list[int]]:
    """Return rows by rank: equal ones, different ones, and none on the first or the last rank."""
    size = engine.size()
    yield [4] * size
    yield [2 + rank for rank in range(size)]
    if size > 1:
        yield [0] + [3] * (size - 1)
        yield [5] * (size - 1) + [0]
        yield [1] + [0] * (size - 2) + [1]


def same_as_alone(layer: SyncBatchNorm, alone: nn.Module, rows: list[int], dims: int, steps: int = 3) -> None:
    """Compare forward, backward and statistics of some steps with one process; `rows` are by rank of the set."""
    members = layer.process_set
    rank, found, expected = members.rank(), [], []
    assert rank is not None
    begin = sum(rows[:rank])
    for step in range(steps):
        inputs = batches(rows, dims, step)
        mine, whole = inputs[rank].requires_grad_(), torch.cat(inputs).detach().requires_grad_()
        layer.zero_grad()
        alone.zero_grad()
        weights = torch.randn(whole.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        output, wanted = layer(mine), alone(whole)
        part = slice(begin, begin + rows[rank])
        (output**3 * weights[part]).sum().backward()
        (wanted**3 * weights).sum().backward()
        assert mine.grad is not None and whole.grad is not None
        found.append({"output": output.detach(), "gradient": mine.grad})
        expected.append({"output": wanted.detach()[part], "gradient": whole.grad[part]})
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            found[-1][name] = engine.allreduce(parameter.grad, engine.Sum, process_set=members)
        expected[-1].update({name: each.grad for name, each in alone.named_parameters() if each.grad is not None})
    for got, want in zip(found, expected, strict=True):
        toy.check_close(got, want, rtol=1e-9, atol=1e-10)
    toy.check_close(dict(layer.named_buffers()), dict(alone.named_buffers()))
    engine.check_consistency(dict(layer.named_buffers()), process_set=members)


def test_the_ranks_of_a_set() -> None:
    """Disjoint and overlapping sets, and all ranks, in one model; a rank also has layers of sets without it."""
    size, rank = engine.size(), engine.rank()
    if size == 1:
        return
    chosen = [range(0, size, 2), range(1, size, 2), *([range(size - 1)] if size > 2 else [])]
    sets = [engine.add_process_set(each) for each in chosen]
    for affine in (True, False):
        layers = [SyncBatchNorm(CHANNELS, affine=affine, process_set=each).double() for each in sets]
        everywhere = SyncBatchNorm(CHANNELS, affine=affine).double()
        for dims in (4, 2):
            for layer in layers:
                if layer.process_set.included():
                    rows = [3 + each for each in layer.process_set.ranks]
                    alone = PLAIN[dims](CHANNELS, affine=affine).double()
                    alone.load_state_dict(layer.state_dict())
                    same_as_alone(layer, alone, rows, dims)
            alone = PLAIN[dims](CHANNELS, affine=affine).double()
            alone.load_state_dict(everywhere.state_dict())
            same_as_alone(everywhere, alone, [2 + each for each in range(size)], dims)
    part = sets[0]
    layer = SyncBatchNorm(CHANNELS, process_set=part)
    again = [copy.deepcopy(layer), SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(CHANNELS), part)]
    stored = pickle.loads(pickle.dumps(layer))
    x = batches([4] * size, 4, 0, torch.float32)[rank]
    for each in (layer, *again):
        assert isinstance(each, SyncBatchNorm) and each.process_set is part
        each(x)
    if part.included():
        engine.check_consistency(dict(again[1].named_buffers()), process_set=part)
    for each in sets:
        engine.remove_process_set(each)
    assert stored.process_set.ranks == part.ranks
    for each in (stored, layer):
        text = toy.raises(NotInitializedError, lambda each=each: each(x))
        assert f"ProcessSet({list(part.ranks)}) is not there" in text, text
    stored.eval()(x)


def test_who_is_not_in_the_set_normalises_alone() -> None:
    size, rank = engine.size(), engine.rank()
    if size == 1:
        return
    first = engine.add_process_set([0])
    layer, alone = SyncBatchNorm(CHANNELS, process_set=first).double(), nn.BatchNorm2d(CHANNELS).double()
    before = toy.reduced()
    for step in range(rank + 1):  # a different number of batches on each rank
        x = batches([4] * size, 4, step)[rank]
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        output, wanted = layer(mine), alone(other)
        (output**3).sum().backward()
        (wanted**3).sum().backward()
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(output, wanted) and torch.equal(mine.grad, other.grad)
    assert toy.reduced() == before
    engine.remove_process_set(first)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, alone.get_buffer(name))


def test_equals_one_process_with_the_joint_batch() -> None:
    for dims in PLAIN:
        for rows in uneven():
            if sum(rows) > 1:
                same_as_alone(SyncBatchNorm(CHANNELS).double(), PLAIN[dims](CHANNELS).double(), rows, dims)


def test_every_option() -> None:
    rows = [2 + rank for rank in range(engine.size())]
    for options in (
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.5},
        {"momentum": 0.0},
        {"affine": False},
        {"track_running_stats": False},
        {"track_running_stats": False, "affine": False},
    ):
        layer, alone = SyncBatchNorm(CHANNELS, **options).double(), nn.BatchNorm2d(CHANNELS, **options).double()
        for affine in (layer, alone):
            torch.manual_seed(4)
            for parameter in affine.parameters():
                nn.init.uniform_(parameter)
        same_as_alone(layer, alone, rows, 4)


def test_evaluation_is_that_of_torch_and_calls_nobody() -> None:
    for options in ({}, {"track_running_stats": False}):
        layer, alone = SyncBatchNorm(CHANNELS, **options).double(), nn.BatchNorm2d(CHANNELS, **options).double()
        same_as_alone(layer, alone, [3] * engine.size(), 4, steps=1)
        alone.load_state_dict(layer.state_dict())
        layer.eval()
        alone.eval()
        before = toy.reduced()
        if engine.rank() == 0:  # a collective here would wait for the others
            x = batches([3], 4, 7)[0]
            assert torch.equal(layer(x), alone(x))
            assert toy.reduced() == before


def test_an_mlp_trains_as_in_one_process() -> None:
    def model() -> nn.Module:
        torch.manual_seed(2)
        norm = nn.BatchNorm1d(8)  # used twice in a pass
        layers = nn.Linear(8, 8), norm, nn.Tanh(), nn.Linear(8, 8), norm, nn.Tanh(), nn.Linear(8, 3), nn.BatchNorm1d(3)
        return nn.Sequential(*layers).double()

    for views in (False, True):
        mine, alone = SyncBatchNorm.convert_sync_batchnorm(model()), model()
        optimizer = engine.DistributedOptimizer(
            torch.optim.SGD(mine.parameters(), lr=0.1), mine.named_parameters(), gradient_as_bucket_view=views
        )
        losses = toy.train(mine, optimizer, toy.shards(4))
        toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(4))
        toy.check_close(toy.parameters_of(mine), toy.parameters_of(alone), rtol=1e-8, atol=1e-9)
        toy.check_close(dict(mine.named_buffers()), dict(alone.named_buffers()), rtol=1e-8, atol=1e-9)
        toy.check_same_everywhere(mine.state_dict())
        assert losses[-1] < losses[0]


def test_halves_are_normalised_in_float32() -> None:
    rows = [3 + rank for rank in range(engine.size())]
    for dtype, module_dtype in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ):
        layer, alone = SyncBatchNorm(CHANNELS).to(module_dtype), nn.BatchNorm2d(CHANNELS).double()
        inputs = batches(rows, 4, 0, dtype)
        mine = inputs[engine.rank()].requires_grad_()
        whole = torch.cat(inputs).detach().double().requires_grad_()
        output, wanted = layer(mine), alone(whole)
        begin = sum(rows[: engine.rank()])
        part = slice(begin, begin + rows[engine.rank()])
        output.backward(output.detach() ** 2)
        wanted.backward((wanted.detach() ** 2).to(dtype).double())
        assert output.dtype is dtype and mine.grad is not None and mine.grad.dtype is dtype and whole.grad is not None
        near = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(output.double(), wanted[part], rtol=near, atol=near)
        torch.testing.assert_close(mine.grad.double(), whole.grad[part], rtol=16 * near, atol=16 * near)
        toy.check_same_everywhere(dict(layer.named_buffers()))
        for name, each in layer.named_buffers():
            kind = 4 * torch.finfo(each.dtype if each.is_floating_point() else dtype).eps
            torch.testing.assert_close(each.double(), alone.get_buffer(name).double(), rtol=kind, atol=kind)
            assert name == "num_batches_tracked" or each.dtype is module_dtype


def test_channels_last_is_kept() -> None:
    for shape, form in (((4, 3, 5, 6), torch.channels_last), ((2, 3, 4, 5, 6), torch.channels_last_3d)):
        for affine in (True, False):
            for dtype in (torch.float32, torch.bfloat16):
                layer = SyncBatchNorm(3, affine=affine)
                x = torch.randn(shape).to(dtype).contiguous(memory_format=form).requires_grad_()
                output = layer(x)
                output.backward(torch.randn(shape).to(dtype))
                assert x.grad is not None
                assert output.is_contiguous(memory_format=form)
                assert x.grad.is_contiguous(memory_format=form)


def test_large_means_leave_the_variance_right() -> None:
    """E[x^2] - E[x]^2 in float32 would have an error larger than the variance."""
    rank, size = engine.rank(), engine.size()
    generator = torch.Generator().manual_seed(8)
    inputs = [torch.randn(64, CHANNELS, generator=generator) + 10_000 + rank for rank in range(size)]
    layer = SyncBatchNorm(CHANNELS, momentum=1.0)
    output = layer(inputs[rank])
    expected = torch.cat(inputs).double().var(0)
    assert layer.running_var is not None
    torch.testing.assert_close(layer.running_var.double(), expected, rtol=1e-5, atol=0)
    rows = engine.allgather(output.detach())
    torch.testing.assert_close(rows.var(0), torch.ones(CHANNELS), rtol=0.02, atol=0)
    torch.testing.assert_close(rows.mean(0), torch.zeros(CHANNELS), rtol=0, atol=1e-2)


def test_threads_change_no_bit_of_the_statistics() -> None:
    torch.set_num_threads(1 + engine.rank() % 2)
    try:
        layer = SyncBatchNorm(33)
        for step in range(3):
            layer(torch.randn(16 + engine.rank(), 33, 20, generator=torch.Generator().manual_seed(step)))
    finally:
        torch.set_num_threads(1)
    toy.check_same_everywhere(dict(layer.named_buffers()))


class Net(nn.Module):
    """Layers to convert: nested, shared, frozen in evaluation mode, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps=1e-3, momentum=None))
        self.again = self.first[1]
        self.frozen = nn.BatchNorm1d(4, affine=False).eval()
        self.bare = nn.SyncBatchNorm(4, track_running_stats=False)
        self.other = nn.GroupNorm(2, 4)


def test_converting_a_model() -> None:
    plain = Net()
    parameters, state = dict(plain.named_parameters()), copy.deepcopy(plain.state_dict())
    net: Any = SyncBatchNorm.convert_sync_batchnorm(plain)
    assert net is plain
    for layer in (net.first[1], net.frozen, net.bare):
        assert type(layer) is SyncBatchNorm
    assert type(net.other) is nn.GroupNorm
    assert net.again is net.first[1] and net.first[1].label == "first.1"
    assert net.first[1].eps == 1e-3 and net.first[1].momentum is None
    assert net.first.training and not net.frozen.training and net.frozen.weight is None and net.bare.running_var is None
    assert all(each is parameters[name] for name, each in net.named_parameters())
    assert net.state_dict().keys() == state.keys()
    assert SyncBatchNorm.convert_sync_batchnorm(net).first[1] is net.again
    for one, other in ((net, Net()), (Net(), net)):
        one.load_state_dict(other.state_dict())
    alone = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2))
    assert isinstance(alone, SyncBatchNorm)
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())
    text = toy.raises(ValueError, lambda: SyncBatchNorm.convert_sync_batchnorm(lazy))
    assert "1 is a LazyBatchNorm1d" in text, text


def test_a_copy_is_a_layer_of_its_own() -> None:
    layer = SyncBatchNorm(CHANNELS)
    x = batches([4] * engine.size(), 2, 0, torch.float32)[engine.rank()]
    layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        toy.check_close(dict(other.named_buffers()), dict(layer.named_buffers()))
        assert engine.size() == 1 or other._name() != layer._name()
        other(x)
    toy.check_same_everywhere(dict(layer.named_buffers()))


def test_what_cannot_be_normalised() -> None:
    size = engine.size()
    layer = SyncBatchNorm(CHANNELS)
    before = copy.deepcopy(layer.state_dict())
    toy.raises(ValueError, lambda: layer(torch.ones(4)))
    if size > 1:
        assert "[N, 3, ...]" in toy.raises(ValueError, lambda: layer(torch.ones(4, CHANNELS + 1)))
    # All ranks know that there is only one value, even the rank that has it.
    text = toy.raises(ValueError, lambda: layer(torch.ones(int(engine.rank() == 0), CHANNELS)))
    assert size == 1 or "there are 1" in text, text
    if size > 1:
        toy.check_close(layer.state_dict(), before)
        other = SyncBatchNorm(CHANNELS + engine.rank() % 2)
        toy.raises(MismatchError, lambda: other(torch.ones(4, other.num_features)))
    layer(torch.ones(4, CHANNELS))


@pytest.mark.slow
def test_with_checkpointing_and_compiled() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, 3)).double()

    alone = model()
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(3))
    for way in ("checkpoint", "compile"):
        mine = SyncBatchNorm.convert_sync_batchnorm(model())
        optimizer = engine.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1))
        run: Any = torch.compile(mine, backend="aot_eager")
        if way == "checkpoint":
            run = lambda x, mine=mine: checkpoint(mine, x, use_reentrant=False)  # noqa: E731
        toy.train(run, optimizer, toy.shards(3))
        toy.check_close(toy.parameters_of(mine), toy.parameters_of(alone), rtol=1e-8, atol=1e-9)
