"""Everything that torch pairs over ranks is paired by name, in any order of the ranks, and with the root's dtypes.

Each test draws an order, a dtype or a missing part on one rank, and accepts only the right value or an error that names
it. All tensors have equal shapes, so that no shape reveals a wrong partner.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import engine
import engine.torch as hvd
from engine.errors import EngineError, MismatchError
from engine.frameworks.optimizer import ParameterNames
from engine.torch.elastic import TorchState

from ..on_ranks import on_ranks
from . import toy

pytestmark = on_ranks(2)

NAMES = "abcde"
TRIALS = range(6)


def own_order(number: int) -> list[str]:
    """Return names in a different order on each rank, like those of a `set` with other hash seeds."""
    names = list(NAMES)
    random.Random(10 * number + engine.rank()).shuffle(names)
    return names


def value_of(name: str, rank: int) -> float:
    return 10.0 * NAMES.index(name) + rank


def model_of(names: list[str], dtype: torch.dtype = torch.float32) -> Any:
    model: Any = nn.ModuleDict({name: nn.Linear(4, 4, bias=False, dtype=dtype) for name in names})
    with torch.no_grad():
        for name in names:
            model[name].weight.fill_(value_of(name, engine.rank()))
    return model


def adam(model: Any, state_dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    """Return an optimizer with state, in which each parameter's moments identify its name and rank."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for name, parameter in model.named_parameters():
        moment = torch.full((4, 4), value_of(name[0], engine.rank()), dtype=state_dtype)
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment.clone()}
    return optimizer


def expect_moments(model: nn.Module, optimizer: Any, root: int, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        assert moment.dtype is dtype, (name, moment.dtype)
        assert (moment == value_of(name[0], root)).all(), (name, moment)


@pytest.mark.parametrize("number", TRIALS)
def test_parameters_are_the_roots_of_their_names(number: int) -> None:
    root = number % 2
    model = model_of(own_order(number))
    hvd.broadcast_parameters(model.state_dict(), root)
    for name in NAMES:
        assert (model[name].weight == value_of(name, root)).all(), name


@pytest.mark.parametrize("number", TRIALS)
def test_optimizer_state_is_the_roots_of_its_names_and_dtypes(number: int) -> None:
    root, dtype = number % 2, (torch.float32, torch.bfloat16, torch.float64)[number % 3]
    model = model_of(own_order(number))
    optimizer: Any = adam(model, dtype if engine.rank() == root else torch.float32)
    if number % 2:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), check_parameters=False)
    hvd.broadcast_optimizer_state(optimizer, root, model)
    expect_moments(model, optimizer, root, dtype)


def test_optimizer_state_of_other_parameters_is_named() -> None:
    names = list(NAMES[: 4 + engine.rank()])
    model = model_of(names)
    text = toy.raises(MismatchError, lambda: hvd.broadcast_optimizer_state(adam(model), 0, model))
    assert "'e.weight'" in text, text


@pytest.mark.parametrize("number", TRIALS)
def test_elastic_state_is_the_roots_of_its_names_and_dtypes(number: int) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
    model = model_of(own_order(number))
    optimizer = adam(model, dtype if engine.rank() == 0 else torch.float32)
    state = TorchState(model, optimizer)
    state.sync()
    expect_moments(model, optimizer, 0, dtype)
    for name in NAMES:
        assert (model[name].weight == value_of(name, 0)).all(), name
    for each in optimizer.state.values():
        each["exp_avg"] = torch.zeros(4, 4, dtype=torch.float16)
    model.to((torch.float64, torch.bfloat16)[number % 2])
    state.restore()
    expect_moments(model, optimizer, 0, dtype)
    for name in NAMES:
        weight = model[name].weight
        assert weight.dtype is torch.float32 and (weight == value_of(name, 0)).all(), (name, weight)


@pytest.mark.parametrize("kind", ["plain", "PowerSGD", "Adasum", "bucket views", "own compression"])
@pytest.mark.parametrize("number", TRIALS)
def test_gradients_are_reduced_with_those_of_their_names(number: int, kind: str) -> None:
    class Own:
        @staticmethod
        def compress(tensor: torch.Tensor) -> Any:
            return tensor.clone(), None

        @staticmethod
        def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
            return tensor

    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "PowerSGD": {"compression": hvd.PowerSGD(rank=4, start_iter=1, min_compression_rate=0.0)},
        "Adasum": {"op": hvd.Adasum},
        "bucket views": {"gradient_as_bucket_view": True},
        "own compression": {"compression": Own},
    }
    names = own_order(number)
    model = model_of(names)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **options[kind]
    )
    before = toy.parameters_of(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss: Any = torch.stack([(1 + NAMES.index(name)) * model[name].weight.sum() for name in names]).sum()
        loss.backward()
        optimizer.step()
    optimizer.unwrap()
    for name in NAMES:
        moved = before[f"{name}.weight"] - model[name].weight
        torch.testing.assert_close(moved, torch.full((4, 4), 2.0 * (1 + NAMES.index(name))), msg=f"{name}: {moved}")


def test_a_scheme_whose_state_one_rank_alone_has_loaded_is_named() -> None:
    """The factors of these gradients have equal shapes, so shapes do not reveal that rounds are mismatched."""
    model = model_of(own_order(1))
    scheme = hvd.PowerSGD(rank=4, start_iter=1, min_compression_rate=0.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compression=scheme
    )
    if engine.rank() == 1:
        name = next(name for name in optimizer._engine.reducer.names if "c.weight" in name)
        scheme.load_state_dict({"calls": {name: 1}, "factors": {}})
    loss: Any = torch.stack([each.weight.sum() for each in model.values()]).sum()
    text = toy.raises(MismatchError, loss.backward)
    optimizer.unwrap()
    assert "PowerSGD remembers differs" in text and "c.weight': rank 1 has 1 reductions" in text, text


def tied(model: Any) -> Any:
    model["b"].weight = model["a"].weight
    return model


@pytest.mark.parametrize("odd", [0, 1])
def test_parameters_that_are_tied_on_one_rank_are_named(odd: int) -> None:
    model = model_of(list(NAMES))
    state = TorchState(model)
    if engine.rank() == odd:
        tied(model)
    text = toy.raises(MismatchError, lambda: hvd.broadcast_parameters(model.state_dict(), 0))
    assert "'b.weight'" in text and "tied to 'a.weight'" in text, text
    if engine.rank() == odd:
        text = toy.raises(ValueError, state.restore)
        assert "'b.weight' of 'model' is tied to 'a.weight' here" in text, text


def test_parameters_that_are_tied_on_all_ranks_are_the_roots() -> None:
    model = tied(model_of(own_order(1)))
    hvd.broadcast_parameters(model.state_dict(), 0)
    assert (model["a"].weight == value_of("a", 0)).all() and model["b"].weight is model["a"].weight
    state = TorchState(model)
    model["a"].weight.data.zero_()
    state.restore()
    assert (model["b"].weight == value_of("a", 0)).all()


def test_entries_that_cannot_be_given_are_named() -> None:
    lazy = nn.Sequential(nn.LazyLinear(2)).state_dict()
    shared = {"mask": torch.ones(1).expand(4)}
    for entries, name in ((lazy, "'0.weight'"), (shared, "'mask'")):
        text = toy.raises(EngineError, lambda entries=entries: hvd.broadcast_parameters(entries, 0))
        assert name in text, text


@pytest.mark.parametrize("number", TRIALS)
def test_state_of_parameters_without_names_leaves_the_others_theirs(number: int) -> None:
    model, other = model_of(own_order(number)), nn.Parameter(torch.zeros(3))
    given = [*model.parameters()]
    given.insert(number % 6, other)
    optimizer: Any = torch.optim.SGD(given, lr=0.1, momentum=0.9)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.full((4, 4), value_of(name[0], engine.rank()))}
    optimizer.state[other] = {"momentum_buffer": torch.full((3,), 1.0 + engine.rank())}
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    for name, parameter in model.named_parameters():
        assert (optimizer.state[parameter]["momentum_buffer"] == value_of(name[0], 0)).all(), name
    assert optimizer.state[other]["momentum_buffer"].tolist() == [1.0] * 3


def test_state_of_other_kinds_is_the_roots() -> None:
    """torch's `load_state_dict` makes a text of a string, and casts the content of a deque."""
    model = model_of(own_order(1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    right = {
        "text": "adaptive",
        "none": None,
        "number": 3,
        "history": deque([torch.ones(2, dtype=torch.bfloat16), 2]),
        "deep": [{"int": torch.arange(3, dtype=torch.int8)}, (torch.ones(2, dtype=torch.complex64), True)],
        "empty": torch.zeros(0, 3, dtype=torch.float16),
    }
    if engine.rank() == 0:
        optimizer.state[model["b"].weight] = right
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    found = optimizer.state[model["b"].weight]
    assert list(optimizer.state) == [model["b"].weight]
    assert repr(found) == repr(right)  # also compares dtypes


def test_state_that_goes_by_the_order_of_parameters_is_refused_in_another_order() -> None:
    names = list(NAMES) if engine.rank() == 0 else list(NAMES)[::-1]
    model = model_of(names)
    optimizer = torch.optim.LBFGS(model.parameters())
    text = toy.raises(MismatchError, lambda: hvd.broadcast_optimizer_state(optimizer, 0, model))
    assert "'a.weight': rank 1 has float32[4, 4] in group 0 at place 4" in text, text
    state = TorchState(model, optimizer)
    if engine.rank() == 0:
        state.save()
        state.sync()
    else:
        text = toy.raises(ValueError, state.sync)
        assert "'e.weight' is where 'a.weight' was" in text, text


def test_gradients_of_other_layouts_are_named() -> None:
    layer = nn.Conv2d(3, 4, 2, bias=False)
    layer.weight.data = layer.weight.data.to(
        memory_format=torch.channels_last if engine.rank() else torch.contiguous_format
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    text = toy.raises(MismatchError, lambda: hvd.DistributedOptimizer(optimizer, layer.named_parameters()))
    assert "weight': rank 1 has float32[4, 3, 2, 2] with strides [12, 1, 6, 3]" in text, text


def test_adasum_of_other_frozen_parameters_is_refused() -> None:
    model = model_of(list(NAMES))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Adasum
    )
    model[NAMES[engine.rank()]].weight.requires_grad_(False)
    loss: Any = torch.stack([each.weight.sum() for each in model.values()]).sum()
    loss.backward()
    toy.raises(EngineError, optimizer.step)
    optimizer.unwrap()


@pytest.mark.parametrize("number", TRIALS)
def test_gradients_are_paired_by_the_names_that_the_optimizer_was_given(number: int) -> None:
    model = model_of(own_order(number))
    hvd.broadcast_parameters(model.state_dict(), 0)
    try:
        plain: Any = torch.optim.SGD(model.named_parameters(), lr=1.0)
    except TypeError:  # before torch 2.6
        return
    if "param_names" not in plain.param_groups[0]:
        return
    optimizer: Any = hvd.DistributedOptimizer(plain)
    new = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [("new", new)]})
    before = toy.parameters_of(model)
    loss: Any = torch.stack([(1 + NAMES.index(name)) * model[name].weight.sum() for name in NAMES]).sum() + new.sum()
    loss.backward()
    optimizer.step()
    for name in NAMES:
        moved = before[f"{name}.weight"] - model[name].weight
        assert (moved == 1 + NAMES.index(name)).all(), (name, moved)
    assert optimizer._parameter_names[new] == "new" and optimizer._parameter_names[model["a"].weight] == "a.weight"
    optimizer.unwrap()


def test_another_order_of_parameters_without_names_is_refused() -> None:
    """The first steps detect it, and the broadcast of an optimizer's state does: the parameters are in other places."""
    names = list(NAMES) if engine.rank() == 0 else list(reversed(NAMES))
    model = model_of(names)
    hvd.broadcast_parameters(model.state_dict(), 0)
    said = toy.raises(MismatchError, lambda: hvd.broadcast_optimizer_state(adam(model), 0))
    assert "in another order" in said and "param_groups[0].params[0]" in said, said
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    def step() -> None:
        loss: Any = torch.stack([each.weight.sum() for each in model.values()]).sum()
        loss.backward()
        optimizer.step()
        optimizer._engine._first.finish()  # later steps do this when the checksums have arrived

    said = toy.raises(MismatchError, step)
    assert "in another order" in said and "group0.param0" in said, said
    optimizer.unwrap()


def test_lbfgs_in_another_order_is_refused() -> None:
    """LBFGS keeps all parameters in one vector, whose sums are rounded in that order."""
    names = list(NAMES) if engine.rank() == 0 else list(reversed(NAMES))
    model = model_of(names)
    plain = torch.optim.LBFGS(model.parameters())
    said = toy.raises(MismatchError, lambda: hvd.DistributedOptimizer(plain, model.named_parameters()))
    assert "a.weight" in said and "at place" in said, said


def append(groups: list[dict[str, Any]], new: nn.Parameter) -> None:
    groups[0]["params"].append(new)


def exchange(groups: list[dict[str, Any]], new: nn.Parameter) -> None:
    groups[0]["params"][1] = new


def exchange_list(groups: list[dict[str, Any]], new: nn.Parameter) -> None:
    groups[0]["params"] = [groups[0]["params"][0], new]


def exchange_by_tuple(groups: list[dict[str, Any]], new: nn.Parameter) -> None:
    groups[0]["params"] = (new,)


def append_group(groups: list[dict[str, Any]], new: nn.Parameter) -> None:
    groups.append(groups[0] | {"params": [new]})


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("put", [append, exchange, exchange_list, exchange_by_tuple, append_group])
def test_parameters_put_into_groups_by_hand_are_refused(put: Any, op: Any) -> None:
    first, second, new = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=1.0), op=op)

    def step(use: Any = None) -> None:
        loss: Any = ((first + second + new) * (1 + engine.rank())).sum()
        loss.backward()
        optimizer.step(use)

    step()
    put(optimizer.param_groups, new)
    for use in (None, lambda: torch.zeros(())):
        said = toy.raises(EngineError, lambda use=use: step(use))  # type: ignore[misc]
        assert "add_param_group()" in said and "of shape [1]" in said, said
    assert new.item() == 0.0
    optimizer.unwrap()


def test_parameters_taken_out_of_groups_are_no_error() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    optimizer.param_groups[0]["params"].pop(1)
    optimizer.param_groups[0]["params"].reverse()
    for number in range(2):
        loss: Any = (torch.stack(parameters) * (1 + engine.rank())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert [each.item() for each in parameters] == [-1.5 * (number + 1), 0.0, -1.5 * (number + 1)]
    optimizer.unwrap()


def test_names_are_those_of_their_parameters_when_others_are_gone() -> None:
    """A new parameter may have the id of a named one that was deleted."""
    kept = nn.Parameter(torch.zeros(1))
    names = ParameterNames(
        [(f"gone{number}", nn.Parameter(torch.zeros(1))) for number in range(100)] + [("kept", kept)]
    )
    new = [nn.Parameter(torch.zeros(1)) for _ in range(1000)]
    assert names.get(kept) == "kept"
    assert [names.get(each) for each in new] == [None] * 1000


def test_groups_that_take_the_place_of_removed_ones_have_names_of_their_own() -> None:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0))
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": [second]})
    loss: Any = ((first + second) * (1 + engine.rank())).sum()
    loss.backward()
    optimizer.step()
    optimizer.unwrap()
    assert second.tolist() == [-1.5] * 3
