"""Training with MXNet on ranks: gluon's trainer, an updater, parameters from one rank."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest

import engine

from ..on_ranks import on_ranks
from .environment import PYTHON

pytestmark = on_ranks(1, 2, 3, python=str(PYTHON))

STEPS = 5
ROWS = 12  # of a whole batch: each rank gets an equal share


def batches() -> tuple[np.ndarray, np.ndarray]:
    """Inputs [steps, rows, 4] and targets [steps, rows, 1]."""
    drawn = np.random.RandomState(3)
    inputs = drawn.uniform(-1, 1, (STEPS, ROWS, 4)).astype("float32")
    return inputs, np.sin(inputs).sum(axis=2, keepdims=True)


def network(seed: int, known: bool = True) -> Any:
    """Network initialized from a seed; with `known`, its shapes are known before the first input."""
    import mxnet
    from mxnet.gluon import nn

    mxnet.random.seed(seed)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, activation="tanh", in_units=4 if known else 0), nn.Dense(1, in_units=8 if known else 0))
    net.initialize(mxnet.init.Uniform(0.5))
    return net


def train(net: Any, trainer: Any, rank: int, size: int) -> None:
    """Train with gluon for some steps on this rank's share of each batch."""
    import mxnet
    from mxnet import autograd

    loss = mxnet.gluon.loss.L2Loss()
    share = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    for inputs, targets in zip(*batches(), strict=True):
        with autograd.record():
            value = loss(net(mxnet.nd.array(inputs[share])), mxnet.nd.array(targets[share]))
        value.backward()
        trainer.step(ROWS // size)


def weights(net: Any) -> dict[str, np.ndarray]:
    return {name: each.data().asnumpy() for name, each in net.collect_params().items()}


def steps_of(number: int) -> int:
    """Number of marked steps of the optimizer with that number, since marks are recorded."""
    return sum(mark[2] == number for mark in engine.session.runtime.current_engine().steps(0)[1])


def expect_equal(net: Any, expected: dict[str, np.ndarray]) -> None:
    """Check that ranks hold the same bits, and nearly the values of a single process."""
    engine.check_consistency(weights(net))
    for name, value in weights(net).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("hybrid", [False, True], ids=["imperative", "hybrid"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_gluon_equals_one_process_with_the_whole_batch(optimizer: str, hybrid: bool, rank: int, size: int) -> None:
    from mxnet import gluon

    import engine.mxnet as hvd

    alone = network(seed=0)
    train(alone, gluon.Trainer(alone.collect_params(), optimizer, {"learning_rate": 0.1}, kvstore=None), 0, 1)
    net = network(seed=rank)
    if hybrid:
        net.hybridize()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    engine.session.runtime.current_engine().record_steps()
    trainer = hvd.DistributedTrainer(net.collect_params(), optimizer, {"learning_rate": 0.1})
    train(net, trainer, rank, size)
    expect_equal(net, weights(alone))
    assert steps_of(trainer._reduction.number) == STEPS


def test_parameters_of_unknown_shape_are_broadcast_in_the_first_forward(rank: int, size: int) -> None:
    from mxnet import gluon

    import engine.mxnet as hvd

    alone = network(seed=size - 1, known=False)
    train(alone, gluon.Trainer(alone.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None), 0, 1)
    net = network(seed=rank, known=False)
    hvd.broadcast_parameters(net.collect_params(), root_rank=size - 1)
    train(net, hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}), rank, size)
    expect_equal(net, weights(alone))


def update(optimizer: Any, size: int, rank: int, dtype: str) -> np.ndarray:
    """Run steps of an updater as the `Module` API does, with a rank's gradients, or their average for rank -1."""
    import mxnet

    updater = mxnet.optimizer.get_updater(optimizer)
    values = [mxnet.nd.ones((3,), dtype=dtype), mxnet.nd.ones((2, 2), dtype=dtype)]
    for step in range(3):
        ranks = range(size) if rank < 0 else [rank]  # the average, or one rank's own
        share = float(np.mean([(step + 1) * (each + 1) for each in ranks]))
        for index, value in enumerate(values):
            gradient = mxnet.nd.ones(value.shape, dtype=dtype) * share
            if optimizer.aggregate_num > 0:
                updater([index], [gradient], [value])
            else:
                updater(index, gradient, value)
    return np.concatenate([each.asnumpy().ravel() for each in values])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_an_updater_reduces_each_gradient_once(name: str, dtype: str, rank: int, size: int) -> None:
    """Holds even where an optimizer's `update_multi_precision` calls its `update`."""
    import mxnet

    import engine.mxnet as hvd

    options = {"learning_rate": 0.125, "multi_precision": dtype == "float16"}
    expected = update(mxnet.optimizer.create(name, **options), size, -1, dtype)
    optimizer = mxnet.optimizer.create(name, **options)
    wrapped = engine.DistributedOptimizer(optimizer, op=hvd.Average)
    assert wrapped is optimizer
    engine.session.runtime.current_engine().record_steps()
    found = update(wrapped, size, rank, dtype)
    assert steps_of(wrapped._engine.number) == 3
    np.testing.assert_allclose(found, expected, rtol=1e-3 if dtype == "float16" else 1e-6)


def test_a_wrapped_optimizer_keeps_its_class_and_is_saved_as_a_plain_one() -> None:
    import mxnet

    import engine.mxnet as hvd

    optimizer = mxnet.optimizer.SGD(learning_rate=0.5)
    wrapped = hvd.DistributedOptimizer(optimizer)
    assert isinstance(wrapped, mxnet.optimizer.SGD)
    assert type(wrapped).__name__ == "SGD"
    copy = pickle.loads(pickle.dumps(wrapped))
    assert type(copy) is mxnet.optimizer.SGD
    assert copy.lr == 0.5
    with pytest.raises(ValueError, match="wrapped in DistributedOptimizer already"):
        hvd.DistributedOptimizer(wrapped)
    net = network(seed=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), wrapped)  # reduces once, not twice
    assert type(trainer._optimizer) is mxnet.optimizer.SGD
    assert type(optimizer) is mxnet.optimizer.SGD


@on_ranks(2, 3, python=str(PYTHON))
def test_a_rank_outside_of_the_process_set_trains_by_itself(rank: int) -> None:
    import mxnet

    import engine.mxnet as hvd

    alone = hvd.add_process_set([0])
    value = mxnet.nd.ones((2,))
    optimizer = hvd.DistributedOptimizer(mxnet.optimizer.SGD(learning_rate=1.0), process_set=alone)
    mxnet.optimizer.get_updater(optimizer)([0], [mxnet.nd.ones((2,)) * rank], [value])
    assert value.asnumpy().tolist() == [1 - rank] * 2
    hvd.barrier()
    hvd.remove_process_set(alone)


def test_what_makes_no_sense_is_refused_with_the_reason(rank: int) -> None:
    import mxnet
    from mxnet import gluon

    import engine.mxnet as hvd

    net = network(seed=0)
    sgd = mxnet.optimizer.SGD()
    with pytest.raises(ValueError, match="binding of MXNet has no op=Adasum"):
        hvd.DistributedOptimizer(sgd, op=hvd.Adasum)
    with pytest.raises(TypeError, match="for gluon use DistributedTrainer"):
        engine.DistributedOptimizer(gluon.Trainer(net.collect_params(), "sgd", kvstore=None))
    several = network(seed=0)
    several.collect_params().reset_ctx([mxnet.cpu(0), mxnet.cpu(1)])
    with pytest.raises(engine.errors.EngineError, match="start more ranks"):
        hvd.DistributedTrainer(several.collect_params(), "sgd")
    with pytest.raises(TypeError, match="takes a mapping"):
        hvd.broadcast_parameters(list(net.collect_params().values()))
    assert type(sgd) is mxnet.optimizer.SGD


@on_ranks(2, 3, python=str(PYTHON))
@pytest.mark.parametrize("kind", ["trainer", "optimizer"])
def test_gradients_are_reduced_with_those_of_their_names(kind: str, rank: int, size: int) -> None:
    """A list made from a set has another order on each rank, and in each step."""
    import mxnet
    from mxnet import autograd, gluon

    import engine.mxnet as hvd

    draw = random.Random(rank)
    parameters = {name: gluon.Parameter(name, shape=(3,)) for name in "abcd"}
    for each in parameters.values():
        each.initialize(mxnet.init.Zero())
    if kind == "trainer":
        given = list(parameters.values())
        draw.shuffle(given)
        trainer = hvd.DistributedTrainer(given, "sgd", {"learning_rate": 1.0})
    else:
        names = dict(enumerate("abcd"))
        optimizer = hvd.DistributedOptimizer(mxnet.optimizer.SGD(learning_rate=1.0, param_idx2name=names))
        updater = mxnet.optimizer.get_updater(optimizer)
    steps = 2
    for _ in range(steps):
        with autograd.record():
            terms = [(k + 1) * (rank + 1) * each.data().sum() for k, each in enumerate(parameters.values())]
            loss = mxnet.nd.add_n(*terms)
        loss.backward()
        if kind == "trainer":
            trainer.step(1)
            continue
        order = list(range(4))
        draw.shuffle(order)
        each_of = [list(parameters.values())[k] for k in order]
        updater(order, [each.grad() for each in each_of], [each.data() for each in each_of])
    for k, (name, each) in enumerate(parameters.items()):
        right = -steps * (k + 1) * (size + 1) / 2
        assert each.data().asnumpy().tolist() == [right] * 3, name


@on_ranks(2, 3, python=str(PYTHON))
def test_parameters_that_one_rank_lacks_are_named(rank: int) -> None:
    import mxnet
    from mxnet import autograd, gluon

    import engine.mxnet as hvd

    names = "ab" if rank == 0 else "ac"
    parameters = [gluon.Parameter(f"{name}_of_lacks", shape=(3,)) for name in names]
    for each in parameters:
        each.initialize(mxnet.init.Zero())
    trainer = hvd.DistributedTrainer(parameters, "sgd")
    with autograd.record():
        loss = parameters[0].data().sum() + parameters[1].data().sum()
    loss.backward()
    with pytest.raises(engine.errors.MismatchError, match="'b_of_lacks'"):
        trainer.step(1)


@on_ranks(2, 3, python=str(PYTHON))
def test_models_that_differ_are_not_broadcast(rank: int) -> None:
    import mxnet

    import engine.mxnet as hvd

    own = mxnet.nd.ones((2 + rank,))
    with pytest.raises(engine.errors.MismatchError, match="do not hold the same model"):
        hvd.broadcast_parameters({"weight": own})
    assert own.asnumpy().tolist() == [1] * (2 + rank)
