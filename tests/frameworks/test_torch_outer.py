"""`OuterOptimizer`: local steps and outer averaging, against simulations of all ranks in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import engine
import engine.torch as hvd
from engine.errors import EngineError, MismatchError
from engine.frameworks.fragments import split_parameters
from engine.torch.elastic import TorchState

from ..on_ranks import Parts, on_ranks, spare
from . import toy

pytestmark = on_ranks(2, 3)

RATE = 0.05


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.5)


def outer(module: nn.Module, **options: Any) -> hvd.OuterOptimizer:
    """Return an optimizer with local steps over plain SGD with momentum."""
    return hvd.OuterOptimizer(sgd(module), module.named_parameters(), **options)


def batch(step: int, rank: int) -> torch.Tensor:
    return toy.whole_batch(step)[rank :: engine.size()]


def train(module: nn.Module, optimizer: Any, steps: Iterable[int], each: Callable[[], object] = lambda: None) -> None:
    """Train on this rank's batches, and call a function after each step."""
    for step in steps:
        optimizer.zero_grad()
        toy.loss_of(module, batch(step, engine.rank())).backward()
        optimizer.step()
        each()


def nesterov(rate: float, momentum: float) -> Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return DiLoCo's outer step by its formulas: v = m v + g, and the step is rate (g + m v)."""
    velocity: dict[str, torch.Tensor] = {}

    def step(name: str, shared: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        velocity[name] = momentum * velocity.get(name, torch.zeros_like(gradient)) + gradient
        return shared - rate * (gradient + momentum * velocity[name])

    return step


def simulate(
    steps: list[int],
    every: int = 3,
    fragments: int = 1,
    delay: int = 0,
    mix: float | None = None,
    outer_step: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Train all ranks in this process, the rank r for `steps[r]` steps; return shared parameters and those of ranks."""
    outer_step = outer_step or nesterov(0.7, 0.9)
    models = [toy.mlp() for _ in steps]
    optimizers = [sgd(model) for model in models]
    named = [dict(model.named_parameters()) for model in models]
    shared = toy.parameters_of(models[0])
    parts = split_parameters({name: each.numel() for name, each in shared.items()}, fragments, every)
    flying: list[tuple[int, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]] = []
    for step in range(1, max(steps) + 1):
        working = [rank for rank, count in enumerate(steps) if step <= count]
        for rank in working:
            optimizers[rank].zero_grad()
            toy.loss_of(models[rank], batch(step - 1, rank)).backward()
            optimizers[rank].step()
        for part in parts:
            if step % every == part.offset:
                changes = {n: sum(shared[n] - named[r][n].detach() for r in working) / len(steps) for n in part.names}
                sent = [{name: own[name].detach().clone() for name in part.names} for own in named]
                flying.append((step + delay, changes, sent))
        while flying and flying[0][0] <= step:
            _, changes, sent = flying.pop(0)
            for name, change in changes.items():
                shared[name] = outer_step(name, shared[name], change)
                for rank in working:
                    own = named[rank][name]
                    if mix is None:  # The steps made since then are kept.
                        own.data = shared[name] + (own.data - sent[rank][name])
                    else:
                        own.data = mix * own.data + (1 - mix) * shared[name]
    return shared, [{name: each.detach() for name, each in own.items()} for own in named]


def expect_simulated(optimizer: Any, model: nn.Module, simulated: Any) -> None:
    shared, own = simulated
    toy.check_same_everywhere(optimizer.shared_parameters())
    toy.check_close(optimizer.shared_parameters(), shared)
    toy.check_close(toy.parameters_of(model), own[engine.rank()])


@on_ranks(spare(1), 2, 3)
def test_plain_averaging_in_each_step_is_the_average_of_parameters_exactly() -> None:
    """Whole numbers, of which no sum is rounded: post-local SGD with one local step."""
    size, rank = engine.size(), engine.rank()
    model = nn.Linear(4, 3).double()
    alone = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for each in model.parameters():
        each.data.zero_()
    optimizer = hvd.OuterOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), every=1, lr=1.0, momentum=0.0)
    for step in range(5):
        optimizer.zero_grad()
        for place, each in enumerate(model.parameters()):
            each.grad = torch.full_like(each, float(size * (rank + 1) * (step - 2) + size * place))
        own = {name: alone[name] - each.grad for name, each in model.named_parameters()}
        alone = {name: engine.allreduce(each, op=engine.Average, name=f"mean {name}") for name, each in own.items()}
        optimizer.step()
        assert all(torch.equal(each.detach(), alone[name]) for name, each in model.named_parameters())
    assert optimizer.steps == 5 and float(alone["bias"].abs().sum()) > 0


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "mix"),
    [
        (1, 1, 0, None),
        (3, 1, 0, None),
        (4, 3, 0, None),
        (4, 1, 2, None),
        (4, 2, 1, None),
        (5, 4, 4, None),
        (4, 1, 2, 0.25),
        (5, 4, 4, 0.5),
    ],
)
def test_formulas_of_diloco(every: int, fragments: int, delay: int, mix: float | None) -> None:
    model = toy.mlp()
    optimizer = outer(model, every=every, fragments=fragments, delay=delay, mix=mix)
    train(model, optimizer, range(13))
    expect_simulated(optimizer, model, simulate([13] * engine.size(), every, fragments, delay, mix))
    assert not toy.in_flight() or delay


def test_another_outer_optimizer_and_its_scheduler() -> None:
    model = toy.mlp()
    optimizer = outer(model, every=2, outer=lambda shared: torch.optim.SGD(shared, lr=0.5, weight_decay=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.outer, 2, 0.5)
    train(model, optimizer, range(8), scheduler.step)
    calls = 0

    def decayed(name: str, shared: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1  # once for each parameter in every second step
        rate = 0.5 * 0.5 ** (((calls - 1) // 6 * 2 + 1) // 2)
        return shared - rate * (gradient + 0.1 * shared)

    expect_simulated(optimizer, model, simulate([8] * engine.size(), 2, outer_step=decayed))


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "fp8", "tuned", "tuned8", "own"])
def test_shared_parameters_have_equal_bits_after_every_step(compression: str) -> None:
    class Halved(engine.Compressor):  # type: ignore[name-defined,misc]
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
            return tensor / 2, None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
            return tensor * 2

    chosen = Halved if compression == "own" else getattr(engine.Compression, compression)
    model = toy.mlp(torch.bfloat16 if compression == "none" else torch.float32)
    optimizer = outer(model, every=4, fragments=3, delay=1, compression=chosen)
    before = optimizer.shared_parameters()
    for step in range(9):
        optimizer.zero_grad()
        inputs = batch(step, engine.rank()).to(next(model.parameters()).dtype)
        toy.loss_of(model, inputs).backward()
        optimizer.step()
        toy.check_same_everywhere(optimizer.shared_parameters())
    optimizer.synchronize_all()
    shared = optimizer.shared_parameters()
    toy.check_same_everywhere(toy.parameters_of(model))
    assert all(each.dtype == torch.float32 and not torch.equal(each, before[name]) for name, each in shared.items())


def test_all_parameters_are_the_shared_ones_at_the_end() -> None:
    model = toy.mlp()
    optimizer = outer(model, every=4, fragments=2, delay=3)
    train(model, optimizer, range(7))
    optimizer.synchronize_all()
    shared = optimizer.shared_parameters()
    optimizer.synchronize_all()  # has nothing left to do
    assert not toy.in_flight()
    toy.check_same_everywhere(toy.parameters_of(model))
    assert all(torch.equal(each, shared[name]) for name, each in toy.parameters_of(model).items())
    assert all(torch.equal(each, shared[name]) for name, each in optimizer.shared_parameters().items())


@pytest.mark.parametrize(("every", "delay"), [(3, 2), (4, 0)])
def test_the_last_synchronisation_makes_no_step_of_what_has_not_changed(every: int, delay: int) -> None:
    """After a step in which the only fragment is due, the end makes no second outer step, which would be momentum."""
    model = toy.mlp()
    optimizer = outer(model, every=every, delay=delay)
    train(model, optimizer, range(2 * every))
    optimizer.synchronize_all()
    # What ranks do during the delay is not in the second synchronisation, so it ends as it would after the delay.
    shared, _ = simulate([2 * every + delay] * engine.size(), every, delay=delay)
    toy.check_close(optimizer.shared_parameters(), shared)
    toy.check_same_everywhere(toy.parameters_of(model))


def test_a_training_goes_on_from_a_state_with_synchronisations_in_flight() -> None:
    made = []
    for broken in (False, True):
        model = toy.mlp()
        optimizer = outer(model, every=4, fragments=2, delay=3, compression=engine.Compression.bf16)
        train(model, optimizer, range(5))
        if broken:
            state, values = copy.deepcopy(optimizer.state_dict()), toy.parameters_of(model)
            assert len(state["outer"]["pending"]) == 1
            train(model, optimizer, range(90, 93))  # what a failure undoes
            model = toy.mlp()
            optimizer = outer(model, every=4, fragments=2, delay=3, compression=engine.Compression.bf16)
            model.load_state_dict(values)
            optimizer.load_state_dict(state)
        train(model, optimizer, range(5, 12))
        made.append((toy.parameters_of(model), optimizer.shared_parameters()))
    for whole, again in zip(*made, strict=True):
        assert all(torch.equal(each, again[name]) for name, each in whole.items())


def test_the_state_of_an_elastic_job_has_all_of_it() -> None:
    """Each rank goes on from its own commit, in place; a rank that takes another's has the same shared parameters."""
    model = toy.mlp()
    optimizer = outer(model, every=4, fragments=2, delay=3)
    state: Any = TorchState(model, optimizer)
    train(model, optimizer, range(5))
    state.save()
    kept, own, steps = optimizer.shared_parameters(), toy.parameters_of(model), optimizer.steps
    train(model, optimizer, range(5, 9))
    first = optimizer.shared_parameters()
    state.restore()
    assert all(torch.equal(each, kept[name]) for name, each in optimizer.shared_parameters().items())
    assert all(torch.equal(each, own[name]) for name, each in toy.parameters_of(model).items())
    assert optimizer.steps == steps
    train(model, optimizer, range(5, 9))
    assert all(torch.equal(each, first[name]) for name, each in optimizer.shared_parameters().items())
    fresh = toy.mlp()
    other = outer(fresh, every=4, fragments=2, delay=3)
    assert optimizer.state_dict()["outer"]["pending"]
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((fresh, other), (model, optimizer)):
        train(each, its, range(9, 14))
        toy.check_same_everywhere(its.shared_parameters())
    assert all(torch.equal(each, own) for each, own in zip(fresh.parameters(), model.parameters(), strict=True))


def test_the_state_of_an_inner_optimizer_alone_starts_from_the_model() -> None:
    model = toy.mlp()
    optimizer = outer(model, every=2)
    train(model, optimizer, range(2))
    plain = sgd(toy.mlp()).state_dict()
    for each in model.parameters():
        each.data.fill_(0.5)
    optimizer.load_state_dict(plain)
    assert optimizer.steps == 0
    train(model, optimizer, [0])
    assert all(bool((each == 0.5).all()) for each in optimizer.shared_parameters().values())
    text = toy.raises(ValueError, lambda: optimizer.load_state_dict(outer(nn.Linear(2, 2)).state_dict()))
    assert "parameter" in text, text


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 2)])
def test_ranks_with_fewer_batches_join(fragments: int, delay: int) -> None:
    steps = [4 + 3 * rank for rank in range(engine.size())]
    model = toy.mlp()
    optimizer = outer(model, every=3, fragments=fragments, delay=delay)
    train(model, optimizer, range(steps[engine.rank()]))
    last = optimizer.join()
    assert last == engine.size() - 1 and optimizer.steps == steps[-1]
    toy.check_same_everywhere(optimizer.shared_parameters())
    if not delay:
        toy.check_close(optimizer.shared_parameters(), simulate(steps)[0])
    train(model, optimizer, range(20, 25))
    optimizer.synchronize_all()
    toy.check_same_everywhere(toy.parameters_of(model))


def test_a_rank_that_joins_keeps_what_it_has_not_sent() -> None:
    model = toy.mlp()
    optimizer = outer(model, every=3)
    train(model, optimizer, range(4 if engine.rank() == 0 else 6))
    before, own = optimizer.shared_parameters(), toy.parameters_of(model)
    optimizer.join()
    after = optimizer.shared_parameters()
    expected = {name: each + after[name] - before[name] for name, each in own.items()}
    toy.check_close(toy.parameters_of(model), expected)
    if engine.rank() == 0:
        assert any(not torch.equal(each, after[name]) for name, each in toy.parameters_of(model).items())
    optimizer.synchronize_all()
    toy.check_same_everywhere(toy.parameters_of(model))
    sent = {name: engine.allreduce(after[name] - each, name=f"sent {name}") for name, each in expected.items()}
    moved = {name: bool((each - after[name]).abs().sum()) for name, each in toy.parameters_of(model).items()}
    assert all(moved.values()) and any(bool(each.abs().sum()) for each in sent.values())


def test_an_interrupted_synchronisation_goes_on_in_the_next_step() -> None:
    """A signal handler raises in the wait of rank 0; what it waited for is applied after its next step."""
    model = toy.mlp()
    optimizer = outer(model, every=2, check_parameters=False)
    train(model, optimizer, [0])
    toy.leave_waiting(lambda: train(model, optimizer, [1]), operations=6)
    train(model, optimizer, [2])
    toy.check_same_everywhere(optimizer.shared_parameters())
    assert optimizer.steps == 3


def test_a_scaler_clipping_and_a_scheduler() -> None:
    """A step that one rank's scaler skips counts there, too; so ranks synchronise in the same loop."""
    found = []
    for scaled in (False, True):
        model = toy.mlp(torch.float32)
        optimizer = outer(model, every=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100, enabled=scaled)
        for step in range(6):
            optimizer.zero_grad()
            skipped = step == 3 and engine.rank() == 1
            loss = toy.loss_of(model, batch(step, engine.rank()).float())
            if not skipped or scaled:
                scaler.scale(loss * (float("inf") if skipped else 1.0)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        assert optimizer.steps == 6 and optimizer.param_groups[0]["lr"] == pytest.approx(RATE / 8)
        assert scaler.get_scale() == (32.0 if scaled and engine.rank() == 1 else 64.0 if scaled else 1.0)
        found.append(optimizer.shared_parameters())
    toy.check_same_everywhere(found[1])
    toy.check_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_a_closure_and_a_copy() -> None:
    model = toy.mlp()
    optimizer = outer(model, every=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = toy.loss_of(model, batch(0, engine.rank()))
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(4)]
    assert losses[-1] < losses[0]
    plain = copy.deepcopy(optimizer)
    assert type(plain) is torch.optim.SGD and "OuterOptimizer(every=2" in repr(optimizer)


def test_models_that_differ_before_the_first_step_are_an_error() -> None:
    model = toy.mlp()
    optimizer = outer(model, every=2)
    if engine.rank() == 1:
        model[2].bias.data += 1e-9
    text = toy.raises(MismatchError, lambda: train(model, optimizer, [0]))
    assert "'2.bias'" in text and "rank 1 has not" in text and "broadcast_parameters" in text, text


def test_shared_parameters_that_change_on_one_rank_are_an_error() -> None:
    model = toy.mlp()
    optimizer = outer(model, every=2)
    train(model, optimizer, range(2))
    if engine.rank() == 1:
        optimizer.outer.param_groups[0]["lr"] = 0.5
    train(model, optimizer, range(2))
    text = toy.raises(MismatchError, lambda: train(model, optimizer, range(2)))
    assert "differ at step 4: '0.bias' and 5 more; rank 1 has not the bits of rank 0" in text, text
    unchecked = outer(toy.mlp(), every=2, check_parameters=False)
    train(model, unchecked, [0])


def test_ranks_with_other_options_or_parameters_are_an_error() -> None:
    text = toy.raises(MismatchError, lambda: outer(toy.mlp(), every=3 + engine.rank()))
    assert "different options" in text and "rank 1" in text and "every=4" in text, text
    text = toy.raises(MismatchError, lambda: outer(toy.mlp(width=16 + engine.rank())))
    assert "different parameters" in text and "0.weight" in text, text
    model = toy.mlp()
    optimizer = outer(model, every=2)
    if engine.rank() == 1:
        state = optimizer.state_dict()
        state["outer"]["steps"] = 7
        optimizer.load_state_dict(state)
    text = toy.raises(MismatchError, lambda: train(model, optimizer, [0]))
    assert "rank 0 has made 0 inner steps, rank 1 has made 7" in text, text


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"every": 0}, ValueError, "every is 1 or more, not 0"),
    ({"every": 2.5}, ValueError, "every is a whole number"),
    ({"every": 4, "delay": 4}, ValueError, "delay is at most every - 1, which is 3"),
    ({"every": 4, "fragments": 5}, ValueError, "fragments is at most every, which is 4"),
    ({"fragments": 7}, ValueError, "fragments is at most the number of parameters, which is 6"),
    ({"mix": 1.0}, ValueError, "mix is 1.0"),
    ({"lr": 0.0}, ValueError, "lr is 0.0"),
    ({"momentum": 1.0}, ValueError, "momentum is 1.0"),
    ({"outer": torch.optim.SGD, "lr": 1.0}, ValueError, "not both"),
    ({"outer": 0.7}, TypeError, "outer is a function"),
    ({"outer": lambda shared: None}, TypeError, "it has returned NoneType"),
    ({"outer": lambda shared: torch.optim.SGD(shared[:1], 1.0)}, ValueError, "an optimizer of 1 tensors"),
    ({"compression": hvd.PowerSGD()}, TypeError, "PowerSGD is a scheme for gradients"),
    ({"compression": "fp16"}, TypeError, "compression is Compression.none"),
]


@on_ranks(2)
def test_bad_arguments(parts: Parts) -> None:
    for options, kind, told in BAD:
        with parts.part(options):
            text = toy.raises(kind, lambda given=options: outer(toy.mlp(), **given))  # type: ignore[misc]
            assert told in text, text


def test_what_is_refused() -> None:
    model = toy.mlp()
    optimizer = outer(model, every=2)
    named = list(toy.mlp().named_parameters())
    for call, kind, told in (
        (lambda: hvd.OuterOptimizer(model), TypeError, "expected a torch.optim.Optimizer"),
        (lambda: hvd.OuterOptimizer(optimizer), ValueError, "already"),
        (lambda: hvd.DistributedOptimizer(optimizer), ValueError, "inner optimizer"),
        (lambda: engine.OuterOptimizer(object()), TypeError, "torch.optim.Optimizer"),
        (lambda: hvd.OuterOptimizer(sgd(model), named), ValueError, "no name for parameter 0 of group 0"),
        (lambda: optimizer.add_param_group({"params": [torch.zeros(2)]}), EngineError, "add_param_group"),
        (
            lambda: hvd.OuterOptimizer(torch.optim.SGD([torch.zeros(2, dtype=torch.complex64)], 0.1)),
            engine.errors.UnsupportedTensorError,
            "parameter 'param_groups[0].params[0]' is torch.complex64",
        ),
    ):
        text = toy.raises(kind, call)  # type: ignore[arg-type]
        assert told in text, text
    optimizer.inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert "other parameters" in toy.raises(EngineError, optimizer.step)
    assert isinstance(engine.OuterOptimizer(sgd(model), every=3), hvd.OuterOptimizer)


@on_ranks(3)
def test_a_rank_outside_of_the_set_trains_alone() -> None:
    pair = engine.add_process_set([0, 2])
    model, alone = toy.mlp(), toy.mlp()
    optimizer = outer(model, every=2, process_set=pair)
    train(model, optimizer, range(4))
    train(alone, sgd(alone), range(4))
    optimizer.synchronize_all()
    if pair.included():
        engine.check_consistency(toy.parameters_of(model), process_set=pair)
    else:
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
        assert "is not in" in toy.raises(EngineError, optimizer.join)
    engine.remove_process_set(pair)


@on_ranks(2)
def test_one_host_is_the_global_set() -> None:
    if engine.local_size() == engine.size():
        assert hvd.host_process_set() is hvd.global_process_set


@pytest.mark.parametrize(("count", "every"), [(1, 1), (2, 5), (3, 7), (4, 4)])
@on_ranks(spare(1), 2)
def test_fragments_are_even_in_size_and_time(count: int, every: int) -> None:
    sizes = {"d": 5, "c": 40, "b": 40, "a": 10, "empty": 0, "f": 35, "e": 30}
    parts = split_parameters(sizes, count, every)
    assert sorted(name for part in parts for name in part.names) == sorted(sizes)
    assert parts == split_parameters(dict(reversed(sizes.items())), count, every)
    filled = [sum(sizes[name] for name in part.names) for part in parts]
    assert max(filled) - min(filled) <= 40 and all(part.names for part in parts)
    due = [step for step in range(every) for part in parts if part.is_due(step, every)]
    assert len(due) == count and max(b - a for a, b in zip(due, [*due[1:], due[0] + every], strict=True)) <= -(
        -every // count
    )
