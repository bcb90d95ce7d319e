"""Equal starting points: names, parameters, optimizer state, and the check that ranks hold the same."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn

import engine
import engine.torch
from engine.errors import ConfigError, MismatchError, UnsupportedTensorError

from ..on_ranks import on_ranks
from . import toy
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES, toy.BY_METHOD)


def own_model() -> nn.Module:
    """Return a model that differs by rank, with buffers, including an integer without dimensions."""
    torch.manual_seed(100 + engine.rank())
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    model(torch.randn(8 + engine.rank(), 1, 4, 4))
    model[1].num_batches_tracked += engine.rank()
    model[0].to(memory_format=torch.channels_last)
    return model


def test_parameters_and_buffers_come_from_the_root() -> None:
    for root in {0, engine.size() - 1}:
        model = own_model()
        roots = engine.broadcast_object(model.state_dict(), root)
        places = [each.data_ptr() for each in model.state_dict().values()]
        engine.torch.broadcast_parameters(model.state_dict(), root_rank=root)
        state = model.state_dict()
        assert state.keys() == roots.keys()
        assert all(torch.equal(each, roots[name]) for name, each in state.items())
        assert [each.data_ptr() for each in state.values()] == places
        assert state["1.num_batches_tracked"] == 1 + root


def test_state_of_dtypes_that_nothing_reduces() -> None:
    # torch 2.2 has no uint32, and does not export a float8 tensor's memory.
    unsigned, small = (torch.uint32, torch.float8_e5m2) if hasattr(torch, "uint32") else (torch.int64, torch.float16)

    def state(rank: int) -> dict[str, torch.Tensor]:
        return {
            "phase": torch.full((2, 3), complex(rank, -1)),
            "seed": torch.full((3,), 2**31 + rank).to(unsigned),
            "scale": torch.full((5,), rank + 1.0).to(small),
            "short": torch.full((7,), rank, dtype=torch.int16),
        }

    mine, root = state(engine.rank()), engine.size() - 1
    engine.torch.broadcast_parameters(mine, root_rank=root)
    engine.check_consistency(mine)
    for name, tensor in state(root).items():
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name
    if engine.size() > 1:
        changed = state(int(engine.rank() == 1))
        text = toy.raises(MismatchError, lambda: engine.check_consistency(changed))
        assert "'phase': rank 1 has other values than rank 0 (complex64[2, 3])" in text, text


def test_parameters_as_pairs_and_as_a_list() -> None:
    model = own_model()
    engine.torch.broadcast_parameters(model.named_parameters(), 0)
    toy.check_same_everywhere(toy.parameters_of(model))
    one = [torch.full((3,), float(engine.rank())), None, torch.arange(4.0).view(2, 2).t() + engine.rank()]
    engine.torch.broadcast_parameters(one, engine.size() - 1)
    last = engine.size() - 1
    assert one[0].tolist() == [last] * 3
    assert torch.equal(one[2], torch.arange(4.0).view(2, 2).t() + last) and one[2].stride() == (1, 2)


def test_different_models_are_refused_before_anything_is_changed() -> None:
    if engine.size() == 1:
        return
    last = engine.size() - 1
    mine = {"a": torch.full((2,), float(engine.rank())), "b": torch.zeros(3)}
    if engine.rank() == last:
        mine["b"], mine["extra"] = torch.zeros(4, dtype=torch.float64), torch.zeros(1)
    text = toy.raises(MismatchError, lambda: engine.torch.broadcast_parameters(mine, 0))
    everyone = engine.allgather_object(text)
    assert mine["a"][0] == engine.rank()
    assert len(set(everyone)) == 1
    for part in (
        f"'b': rank {last} has float64[4], rank 0 has float32[3]",
        f"'extra': rank {last} has",
        "no such entry",
    ):
        assert part in text, text


def test_what_is_no_tensor_or_no_rank() -> None:
    assert "broadcast_object" in toy.raises(
        UnsupportedTensorError, lambda: engine.torch.broadcast_parameters({"epoch": 3}, 0)
    )
    tensor = torch.ones(2)
    for root in (-1, engine.size()):
        text = toy.raises(ValueError, lambda root=root: engine.torch.broadcast_parameters({"a": tensor}, root))
        assert f"root rank {root} is not in this world of {engine.size()} ranks" in text, text
    toy.raises(TypeError, lambda: engine.torch.broadcast_parameters(3, 0))
    engine.torch.broadcast_parameters({"a": tensor}, 0)
    engine.torch.broadcast_parameters({}, 0)


def test_optimizer_state_that_only_the_root_has() -> None:
    for root in {0, engine.size() - 1}:
        for wrapped in (False, True):
            model = toy.mlp()
            optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9))
            if wrapped:
                optimizer = engine.DistributedOptimizer(optimizer)
            if engine.rank() == root:
                trained = toy.mlp()
                source = torch.optim.Adam(trained.parameters(), lr=0.03, betas=(0.7, 0.95), amsgrad=True)
                toy.train(trained, source, toy.wholes(3))
                model.load_state_dict(trained.state_dict())
                optimizer.load_state_dict(source.state_dict())
            engine.torch.broadcast_parameters(model.state_dict(), root)
            engine.torch.broadcast_optimizer_state(optimizer, root, model=model)
            group = optimizer.param_groups[0]
            assert (group["lr"], group["betas"], group["amsgrad"]) == (0.03, (0.7, 0.95), True)
            moments = {
                f"{i}.{k}": each for i, state in enumerate(optimizer.state.values()) for k, each in state.items()
            }
            assert len(moments) == 6 * 4
            toy.check_same_everywhere(moments)
            assert all(float(each) == 3 for name, each in moments.items() if name.endswith("step"))
            toy.train(model, optimizer, toy.wholes(1) if not wrapped else toy.shards(1))
            toy.check_close(toy.parameters_of(model), engine.broadcast_object(toy.parameters_of(model), root))


def test_optimizer_state_of_other_kinds() -> None:
    """Momentum that is None, missing state, a mutable learning rate, state left over from training."""
    for make in (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1 * (engine.rank() + 1)),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1 * (engine.rank() + 1), momentum=0.9),
        lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1 * (engine.rank() + 1))),
        lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1 * (engine.rank() + 1)),
    ):
        for steps in (0, engine.rank() + 1):
            model = toy.mlp()
            optimizer = make(model)
            for step in range(steps):
                optimizer.zero_grad()
                toy.loss_of(model, toy.whole_batch(step)).backward()
                optimizer.step(lambda m=model: toy.loss_of(m, toy.whole_batch(0)))
            engine.torch.broadcast_optimizer_state(optimizer, root_rank=0)
            states = engine.allgather_object(repr(optimizer.state_dict()))
            assert len(set(states)) == 1
            assert abs(float(optimizer.param_groups[0]["lr"]) - 0.1) < 1e-7


def test_optimizers_of_different_parameters() -> None:
    if engine.size() == 1:
        return
    model = toy.mlp(width=16 + (engine.rank() == 1))
    text = toy.raises(
        MismatchError, lambda: engine.torch.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), 0)
    )
    assert "float64[17, 8]" in text and "float64[16, 8]" in text, text


def test_a_checkpoint_goes_on_where_training_stopped(wrap: Wrap) -> None:
    """A file carries it from a wrapped to a plain optimizer, and back."""
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
    toy.train(model, optimizer, toy.shards(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    stored = torch.load(file)
    other = torch.optim.Adam(alone.parameters(), lr=0.5)
    alone.load_state_dict(stored["model"])
    other.load_state_dict(stored["optimizer"])
    again = toy.mlp()
    back = wrap(torch.optim.Adam(again.parameters(), lr=0.5), again.named_parameters())
    again.load_state_dict(stored["model"])
    back.load_state_dict(copy.deepcopy(other.state_dict()))
    toy.train(model, optimizer, toy.shards(3))
    toy.train(again, back, toy.shards(3))
    toy.train(alone, other, toy.wholes(3))
    assert back.param_groups[0]["lr"] == 0.01
    toy.check_close(toy.parameters_of(again), toy.parameters_of(model), rtol=0, atol=0)
    toy.check_close(toy.parameters_of(alone), toy.parameters_of(model), rtol=1e-8, atol=1e-10)
    assert optimizer.state_dict().keys() == other.state_dict().keys()


class Normalised(nn.Sequential):
    """A model with buffers, different on each rank."""

    def __init__(self) -> None:
        torch.manual_seed(40 + engine.rank())
        layers = nn.Linear(8, 6), engine.torch.SyncBatchNorm(6), nn.Tanh(), nn.Linear(6, 3)
        super().__init__(*layers)
        self.double()


def test_a_checkpoint_of_the_first_rank_goes_on_to_the_bit(wrap: Wrap) -> None:
    """The result equals uninterrupted training; only the first rank has the file."""

    def begin() -> tuple[nn.Module, Any, Any]:
        model = Normalised()
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def steps(model: nn.Module, optimizer: Any, scheduler: Any, which: range) -> None:
        for step in which:
            toy.train(model, optimizer, [toy.shard(toy.whole_batch(step))])
            scheduler.step()

    model, optimizer, scheduler = begin()
    engine.torch.broadcast_parameters(model.state_dict(), 0)
    steps(model, optimizer, scheduler, range(3))
    file = io.BytesIO()
    if engine.rank() == 0:
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    steps(model, optimizer, scheduler, range(3, 6))
    again, other, timetable = begin()
    stored = None
    if engine.rank() == 0:
        file.seek(0)
        stored = torch.load(file)
        again.load_state_dict(stored["model"])
        other.load_state_dict(stored["optimizer"])
    engine.torch.broadcast_parameters(again.state_dict(), 0)
    engine.torch.broadcast_optimizer_state(other, 0)
    timetable.load_state_dict(engine.broadcast_object(stored and stored["scheduler"], 0))
    steps(again, other, timetable, range(3, 6))
    toy.check_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert timetable.get_last_lr() == scheduler.get_last_lr() == [0.01 / 8]
    toy.check_same_everywhere(again.state_dict())


def test_what_differs_is_named() -> None:
    model = toy.mlp()
    engine.check_consistency(model.state_dict())
    engine.torch.check_consistency(model.named_parameters())
    if engine.size() == 1:
        return
    last = engine.size() - 1
    if engine.rank() == last:
        with torch.no_grad():
            model[2].bias[5] = torch.nextafter(model[2].bias[5], torch.tensor(9.0, dtype=torch.float64))
    text = toy.raises(MismatchError, lambda: engine.check_consistency(model.state_dict()))
    others = engine.allgather_object(text)
    assert len(set(others)) == 1
    assert f"'2.bias': rank {last} has other values than rank 0 (float64[16])" in text, text
    assert "2.weight" not in text
    engine.torch.broadcast_parameters(model.state_dict(), 0)
    engine.check_consistency(model.state_dict())


def test_names_that_differ_are_refused(wrap: Wrap) -> None:
    if engine.size() == 1:
        return
    model = toy.mlp()
    odd = engine.rank() == 1
    prefix = "other." if odd else ""
    named = [(prefix + name, each) for name, each in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = toy.raises(MismatchError, lambda: wrap(optimizer, named))
    assert "other.0.weight" in text and "no such entry" in text, text
    frozen = toy.mlp()
    frozen[2].requires_grad_(not odd)
    text = toy.raises(MismatchError, lambda: wrap(torch.optim.SGD(frozen.parameters(), lr=0.1)))
    assert "requires_grad=False" in text, text
    fewer = list(toy.mlp().parameters())[: 5 if odd else 6]
    toy.raises(MismatchError, lambda: wrap(torch.optim.SGD(fewer, lr=0.1)))
    # After all these errors the same optimizer can be wrapped, and trains.
    wrap(optimizer, model.named_parameters())
    alone = toy.mlp()
    toy.train(model, optimizer, toy.shards(2))
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(2))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_what_cannot_be_wrapped(wrap: Wrap) -> None:
    model = toy.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = list(model.named_parameters())
    toy.raises(TypeError, lambda: wrap(model))
    toy.raises(TypeError, lambda: engine.torch.DistributedOptimizer(model))
    assert "twice" in toy.raises(ValueError, lambda: wrap(optimizer, [("w", each) for _, each in first]))
    assert "no name for parameter 5" in toy.raises(ValueError, lambda: wrap(optimizer, first[:-1]))
    toy.raises(ValueError, lambda: wrap(optimizer, model.parameters()))
    assert "'fp16'" in toy.raises(TypeError, lambda: wrap(optimizer, first, compression="fp16"))
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
    wrap(optimizer, first)
    assert "unwrap()" in toy.raises(ValueError, lambda: wrap(optimizer, first))
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "parameter 'gradient" in toy.raises(ValueError, lambda: wrap(second, first))
    meta = nn.Linear(2, 2, device="meta")
    assert "meta" in toy.raises(UnsupportedTensorError, lambda: wrap(torch.optim.SGD(meta.parameters(), lr=0.1)))
    alone = toy.mlp()
    toy.train(model, optimizer, toy.shards(1))
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(1))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_a_new_optimizer_takes_the_place_of_one_that_was_dropped(wrap: Wrap) -> None:
    """The old one lives on in a cycle with its scheduler until it is garbage-collected."""
    model, alone = toy.mlp(), toy.mlp()
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    toy.train(model, optimizer, toy.shards(2))
    toy.train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), toy.wholes(2))
    del optimizer
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    toy.train(model, optimizer, toy.shards(2))
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(2))
    toy.check_same_everywhere(toy.parameters_of(model))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-8, atol=1e-10)


def test_objects_and_settings() -> None:
    thing = {"rank": engine.rank(), "tensor": torch.arange(3)}
    for root in range(engine.size()):
        found = engine.torch.broadcast_object(thing, root)
        assert found["rank"] == root and torch.equal(found["tensor"], thing["tensor"])
    assert [each["rank"] for each in engine.torch.allgather_object(thing)] == list(range(engine.size()))
    engine.torch.init()  # A second call does nothing,
    toy.raises(ConfigError, lambda: engine.torch.init(cycle_time_ms=1))  # unless its settings differ.
    assert engine.torch.size() == engine.size() and engine.torch.is_initialized()


def test_equal_shards_of_different_models_still_agree_after_a_broadcast() -> None:
    model = own_model().double()
    optimizer = engine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    engine.torch.broadcast_parameters(model.state_dict(), 0)
    for step in range(2):
        optimizer.zero_grad()
        batch = toy.shard(toy.whole_batch(step, features=16)).view(-1, 1, 4, 4)
        model(batch).square().mean().backward()
        optimizer.step()
    toy.check_same_everywhere(toy.parameters_of(model))


def test_tensors_of_the_host_stay_there_with_another_default_device() -> None:
    """The default device is set, as by `torch.set_default_device("cuda")`: the engine's own tensors are not on it."""
    model, size = toy.mlp(torch.float32), engine.size()
    rows = torch.arange(2.0 * size).view(size, 2)
    batches = list(toy.shards(2))
    torch.set_default_device("meta")
    try:
        own = torch.optim.Adam(model.parameters())
        scheme = engine.torch.PowerSGD(rank=1, start_iter=1, min_compression_rate=0)
        optimizer = engine.DistributedOptimizer(own, model.named_parameters(), compression=scheme)
        for batch in batches:
            optimizer.zero_grad()
            toy.loss_of(model, batch.float()).backward()
            optimizer.step()
        engine.torch.broadcast_optimizer_state(optimizer, 0)
        received, counts = engine.torch.alltoall(rows, splits=[1] * size, name="rows")
        nothing = engine.torch.allgather(rows[:0], name="no rows")
    finally:
        torch.set_default_device(None)
    optimizer.unwrap()
    state = [each for held in own.state.values() for each in held.values()]
    assert {each.device.type for each in (*state, *model.parameters(), received, counts, nothing)} == {"cpu"}
    assert received.tolist() == [rows[engine.rank()].tolist()] * size and counts.tolist() == [1] * size
    toy.check_same_everywhere({f"state {k}": each for k, each in enumerate(state)})
