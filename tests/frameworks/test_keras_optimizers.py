"""Every optimizer of Keras makes, on each backend, the step of one process with the mean of all gradients."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import engine

from ..on_ranks import Parts
from .backends import Lazy, on_backends

keras, toy, hvd = Lazy("keras"), Lazy("tests.frameworks.keras_toy"), Lazy("engine.keras")

pytestmark = on_backends(2)


def optimizers() -> dict[str, Any]:
    """Return a factory for each optimizer of Keras, and for some settings."""
    given = keras.optimizers
    found = {
        name: kind
        for name, kind in vars(given).items()
        if isinstance(kind, type)
        and issubclass(kind, given.Optimizer)
        and kind not in (given.Optimizer, given.LossScaleOptimizer, given.MultiOptimizer)
    }
    assert len(found) >= 14, sorted(found)
    return {
        **found,
        "LossScale(SGD)": lambda: given.LossScaleOptimizer(given.SGD(0.1), initial_scale=4.0),
        "LossScale(Adam, growing)": lambda: given.LossScaleOptimizer(given.Adam(0.1), 4.0, dynamic_growth_steps=2),
        "Multi": lambda: given.MultiOptimizer(given.OptimizerMap(given.SGD(0.1), {"v1": given.Adam(0.1)})),
        "momentum": lambda: given.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "global clip": lambda: given.SGD(0.1, global_clipnorm=0.5),
        "clip": lambda: given.Adam(0.1, clipnorm=0.2),
        "clip value": lambda: given.RMSprop(0.1, clipvalue=0.1, momentum=0.5),
        "moving average": lambda: given.AdamW(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        "schedule": lambda: given.SGD(given.schedules.ExponentialDecay(0.1, 2, 0.5)),
        "scaled": lambda: given.SGD(0.1, loss_scale_factor=8.0),
        "accumulating": lambda: given.Adam(0.1, gradient_accumulation_steps=2),
    }


@pytest.mark.sample(1)
def test_every_optimizer_takes_the_step_of_one_process(parts: Parts) -> None:
    for name, make in optimizers().items():
        if toy.BACKEND == "jax" and "LossScale" in name:
            continue  # there Keras' own optimizer has only stateless_apply: see the next test
        with parts.part(name):
            trained, alone = toy.Steps(hvd.DistributedOptimizer(make())), toy.Steps(make())
            for step in range(4):
                trained.apply(toy.gradients_of(engine.rank(), step))
                alone.apply(toy.mean_gradients(step))
            found, expected, begin = trained.values(), alone.values(), toy.Steps(make()).values()
            engine.allgather_object(None)
            toy.check_same_everywhere(found)
            toy.check_close(found, expected)
            assert any(np.abs(a - b).max() > 1e-6 for a, b in zip(found, begin, strict=True))


@pytest.mark.slow
def test_and_the_step_of_a_compiled_program(parts: Parts) -> None:
    if toy.BACKEND != "jax":
        pytest.skip("stateless_apply is JAX's")
    for name, make in optimizers().items():
        with parts.part(name):
            trained, alone = toy.Steps(hvd.DistributedOptimizer(make())), toy.Steps(make())
            for step in range(3):
                trained.stateless(toy.gradients_of(engine.rank(), step))
                alone.stateless(toy.mean_gradients(step))
            found, expected = trained.values(), alone.values()
            toy.check_same_everywhere(found)
            toy.check_close(found, expected)


def test_an_overflow_on_one_rank_is_one_on_all() -> None:
    make = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)  # noqa: E731
    steps = toy.Steps(hvd.DistributedOptimizer(make()))
    take = steps.stateless if toy.BACKEND == "jax" else steps.apply
    before = steps.values()
    gradients = toy.gradients_of(engine.rank(), 0)
    if engine.rank() == 1:
        gradients[0][0, 0] = np.inf
    take(gradients)
    after, scale = steps.values(), float(keras.ops.convert_to_numpy(steps.optimizer.dynamic_scale))
    take(toy.gradients_of(engine.rank(), 1))
    moved = steps.values()
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert scale == 512.0
    assert not np.array_equal(after[0], moved[0])
    toy.check_same_everywhere([*moved, *toy.state(steps.optimizer)])


@pytest.mark.parametrize("average", [False, True])
def test_several_passes_are_added_up_before_a_reduction(average: bool) -> None:
    make = lambda: keras.optimizers.Adam(0.1)  # noqa: E731
    options = {"backward_passes_per_step": 3, "average_aggregated_gradients": average}
    trained, alone = toy.Steps(hvd.DistributedOptimizer(make(), **options)), toy.Steps(make())
    take = trained.stateless if toy.BACKEND == "jax" else trained.apply
    entries, unchanged = [engine.counters()["tensors"]], []
    for step in range(6):
        before = trained.values()
        take(toy.gradients_of(engine.rank(), step))
        entries.append(engine.counters()["tensors"])
        unchanged.append(all(np.array_equal(a, b) for a, b in zip(before, trained.values(), strict=True)))
    for begin in (0, 3):
        sums = [sum(each) for each in zip(*(toy.mean_gradients(begin + step) for step in range(3)), strict=True)]
        alone.apply([each / 3 for each in sums] if average else sums)
    assert unchanged == [True, True, False] * 2
    assert entries[1] == entries[2] and entries[4] == entries[5], entries
    assert int(keras.ops.convert_to_numpy(trained.optimizer.iterations)) == 2
    toy.check_close(trained.values(), alone.values())
    toy.check_same_everywhere(trained.values())


def test_options_say_how_gradients_are_reduced(parts: Parts) -> None:
    rank, size = engine.rank(), engine.size()
    by_rank = [toy.gradients_of(each, 0) for each in range(size)]
    total = [sum(each) for each in zip(*by_rank, strict=True)]
    largest = [np.max(each, axis=0) for each in zip(*by_rank, strict=True)]
    mean = [each / size for each in total]
    cases = {
        "sum": ({"op": engine.Sum}, total, 1e-5),
        "max": ({"op": engine.Max}, largest, 1e-5),
        "predivide": ({"gradient_predivide_factor": 2.0}, mean, 1e-5),
        "factors": ({"prescale_factor": 2.0, "postscale_factor": 3.0}, [6 * each for each in mean], 1e-4),
        "half": ({"compression": hvd.Compression.fp16}, mean, 2e-3),
        "groups": ({"num_groups": 2}, mean, 1e-5),
        "alone": ({"process_set": engine.add_process_set([0])}, by_rank[rank], 1e-5),
    }
    for name, (options, expected, tolerance) in cases.items():
        steps = toy.Steps(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), check_parameters=False, **options))
        before = steps.values()
        steps.apply(toy.gradients_of(rank, 0))
        with parts.part(name):
            moved = [a - b for a, b in zip(before, steps.values(), strict=True)]
            toy.check_close(moved, expected, tolerance)
    engine.remove_process_set(cases["alone"][0]["process_set"])


@on_backends(2, spare=())
def test_local_variables_are_not_reduced() -> None:
    model = toy.model(lambda: [keras.layers.Dense(3, name="shared"), keras.layers.Dense(2, name="local")])
    layer = model.get_layer("local")
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layer)
    optimizer.build(model.trainable_variables)
    before = toy.weights(model)
    shapes = [each.shape for each in before]
    own = [np.full(shape, engine.rank() + 1.0, np.float32) for shape in shapes]
    optimizer.apply([toy.tensor(each) for each in own], model.trainable_variables)
    moved = [a - b for a, b in zip(before, toy.weights(model), strict=True)]
    mean = (1 + engine.size()) / 2
    local = (engine.rank() + 1) / engine.size()
    toy.check_close(moved, [np.full(each, mean if k < 2 else local) for k, each in enumerate(shapes)])


def test_ranks_that_disagree_are_told_before_anything_is_reduced() -> None:
    rank = engine.rank()
    odd = toy.Steps(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), ((3, 4), (4 + rank,)))
    with pytest.raises(engine.errors.MismatchError, match=r"v1.*float32\[5\].*float32\[4\]") as told:
        odd.apply(toy.gradients_of(rank, 0, ((3, 4), (4 + rank,))))
    assert "the ranks' optimizers have different parameters" in str(told.value)
    odd = toy.Steps(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=engine.Sum if rank else engine.Average))
    with pytest.raises(engine.errors.MismatchError, match="the ranks give different options"):
        odd.apply(toy.gradients_of(rank, 0))
    steps = toy.Steps(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    steps.apply(toy.gradients_of(rank, 0))  # The engine goes on.
    toy.check_same_everywhere(steps.values())


def test_different_beginnings_are_told() -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("engine")
    logger.addHandler(handler)
    try:
        steps = toy.Steps(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        if engine.rank() == 1:
            steps.variables[1].assign(steps.variables[1] + 1)
        take = steps.stateless if toy.BACKEND == "jax" else steps.apply
        take(toy.gradients_of(engine.rank(), 0))
        engine.barrier("told")
    finally:
        logger.removeHandler(handler)
    expected = ["'gradient"] if engine.rank() == 0 else []
    lines = [line for line in told if "parameters differ in the first step" in line]
    assert len(lines) == len(expected), told
    assert all("v1" in line and "BroadcastGlobalVariablesCallback(0)" in line for line in lines)


def test_what_cannot_be_wrapped_is_refused() -> None:
    sgd = keras.optimizers.SGD
    wrap = hvd.DistributedOptimizer
    with pytest.raises(TypeError, match=r"expected a keras.optimizers.Optimizer, not str: call keras.optimizers.get"):
        wrap("sgd")
    optimizer = wrap(sgd())
    with pytest.raises(ValueError, match="wrapped in DistributedOptimizer already"):
        wrap(optimizer)
    with pytest.raises(ValueError, match="the optimizer inside of this LossScaleOptimizer is wrapped"):
        wrap(keras.optimizers.LossScaleOptimizer(optimizer))
    with pytest.raises(ValueError, match="Adasum"):
        wrap(sgd(), op=engine.Adasum)
    with pytest.raises(ValueError, match="backward_passes_per_step is 1 or more"):
        wrap(sgd(), backward_passes_per_step=0)
    with pytest.raises(TypeError, match="local_layers has a str"):
        hvd.PartialDistributedOptimizer(sgd(), local_layers=["a"])
    inner = toy.Steps(keras.optimizers.LossScaleOptimizer(wrap(sgd())))
    with pytest.raises(ValueError, match=r"Wrap from outside: DistributedOptimizer\(keras.optimizers.LossScale"):
        (inner.stateless if toy.BACKEND == "jax" else inner.apply)(toy.gradients_of(engine.rank(), 0))
    plain = optimizer.unwrap()
    assert plain is optimizer and type(plain) is type(sgd()) and "_engine" not in vars(plain)
    assert engine.DistributedOptimizer(plain) is plain
