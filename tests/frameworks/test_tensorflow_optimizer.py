"""`DistributedOptimizer` around optimizers of TensorFlow 1: eager mode, `tf.function`, sessions, several passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import engine
import engine.tensorflow as hvd
from engine.errors import EngineError, MismatchError

from . import tensorflow_toy as toy
from .tensorflow_ranks import PYTHON, SIZES, on_op_ranks

pytestmark = on_op_ranks(*SIZES, PYTHON)
v1 = tf.compat.v1
Optimizer = Callable[[], Any]
traced = pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
OPTIMIZERS: dict[str, Optimizer] = {
    "descent": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
}


def trained(optimizer: Any, batches: Sequence[Any], traced: bool) -> list[np.ndarray]:
    """Return a model after an optimizer's steps on these batches."""
    variables = toy.model()

    def step(batch: Any) -> None:
        optimizer.minimize(lambda: toy.loss_of(variables, batch), None, variables)

    run = toy.as_function(step, traced)
    for batch in batches:
        run(batch)
    return toy.values(variables)


def trained_in_session(optimizer: Any, batches: Sequence[Any]) -> list[np.ndarray]:
    """Train like `trained`, in a graph and a session."""
    arrays = [batch.numpy() for batch in batches]
    with tf.Graph().as_default(), v1.Session() as session:
        variables = toy.model()
        batch = v1.placeholder(tf.float64, [None, 8])
        step = optimizer.minimize(toy.loss_of(variables, batch), var_list=variables)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for array in arrays:
            session.run(step, {batch: array})
        return list(session.run(variables))


@pytest.mark.sample(6)
@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_shards_train_as_the_whole_batch_does(kind: str, mode: str) -> None:
    wholes = [toy.whole_batch(step) for step in range(3)]
    expected = trained(OPTIMIZERS[kind](), wholes, False)
    optimizer, shards = hvd.DistributedOptimizer(OPTIMIZERS[kind]()), [toy.shard(each) for each in wholes]
    if mode == "session":
        found = trained_in_session(optimizer, shards)
    else:
        found = trained(optimizer, shards, mode == "function")
    toy.check_same_everywhere(found)
    toy.check_close(found, expected, 1e-9)


@pytest.mark.sample(4)
@pytest.mark.parametrize("average", [False, True], ids=["sum", "average"])
@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_several_passes_make_a_step(mode: str, average: bool) -> None:
    # Two steps of two passes each, and one left-over pass without a step.
    wholes = [toy.whole_batch(step) for step in range(5)]
    plain, alone = v1.train.MomentumOptimizer(0.1, 0.9), toy.model()
    for first in (0, 2):
        total = [np.zeros(each.shape) for each in alone]
        for batch in wholes[first : first + 2]:
            pairs = plain.compute_gradients(lambda batch=batch: toy.loss_of(alone, batch), alone)
            total = [one + other.numpy() for one, (other, _) in zip(total, pairs, strict=True)]
        plain.apply_gradients(
            [(tf.constant(each / (2 if average else 1)), v) for each, v in zip(total, alone, strict=True)]
        )
    optimizer = hvd.DistributedOptimizer(
        v1.train.MomentumOptimizer(0.1, 0.9), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    shards = [toy.shard(each) for each in wholes]
    tensors = engine.counters()["tensors"]
    if mode == "session":
        found = trained_in_session(optimizer, shards)
    else:
        found = trained(optimizer, shards, mode == "function")
    assert engine.counters()["tensors"] - tensors == 1 + 2, "one comparison, and each step is reduced once, as a group"
    toy.check_close(found, toy.values(alone), 1e-9)
    toy.check_same_everywhere(found)


def test_a_global_step_counts_steps_and_not_passes() -> None:
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1), backward_passes_per_step=3)
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("weight", [], tf.float32, v1.ones_initializer())
        count = v1.train.get_or_create_global_step()
        step = optimizer.minimize(weight**2, count)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for _ in range(7):
            session.run(step)
        assert session.run(count) == 2


@pytest.mark.sample(1)
@traced
def test_gradients_may_be_clipped_between(traced: bool) -> None:
    variables, optimizer = toy.model(), hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    whole = toy.whole_batch(0)

    def step(batch: Any) -> None:
        pairs = optimizer.compute_gradients(lambda: toy.loss_of(variables, batch), variables)
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.5)
        optimizer.apply_gradients(zip(clipped, variables, strict=True))

    toy.as_function(step, traced)(toy.shard(whole))
    expected = toy.model()
    with tf.GradientTape() as tape:
        loss = toy.loss_of(expected, whole)
    clipped, _ = tf.clip_by_global_norm(tape.gradient(loss, expected), 0.5)
    toy.descend(expected, clipped, 1.0)
    toy.check_close(toy.values(variables), toy.values(expected))


def test_gradients_that_a_tape_has_made_are_reduced_when_they_are_applied() -> None:
    variables, optimizer = toy.model(), hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.125))
    for step in range(3):
        with tf.GradientTape() as tape:
            loss = toy.loss_of(variables, toy.shard(toy.whole_batch(step)))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    toy.check_close(toy.values(variables), toy.trained_alone(3))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "as_dense"])
def test_sparse_gradients(passes: int, dense: bool, rank: int) -> None:
    table = tf.Variable(np.ones((5, 2)))
    optimizer = hvd.DistributedOptimizer(
        v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=passes, sparse_as_dense=dense
    )

    def run() -> None:
        optimizer.minimize(lambda: tf.reduce_sum(tf.gather(table, [rank, rank, 3])), var_list=[table])

    if passes > 1 and not dense:
        assert "sparse_as_dense=True" in toy.raises(ValueError, run)
        return
    for _ in range(passes):
        run()
    mine = np.zeros((5, 2))
    mine[3] += passes
    mine[rank] += 2 * passes
    toy.check_close([table.numpy()], [1 - toy.averaged([mine])[0]])


def test_a_local_variable_stays_with_its_rank(rank: int, size: int) -> None:
    shared, own = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    optimizer.register_local_var(own)
    optimizer.minimize(lambda: (shared + own) * float(rank), var_list=[shared, own])
    toy.check_close([shared, own], [1 - (size - 1) / 2, 1 - rank / size], 1e-6)


def test_wrapping_keeps_the_object_and_ends(rank: int, size: int) -> None:
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    assert hvd.DistributedOptimizer(optimizer, "named", True, "/cpu:0", "/cpu:0") is optimizer
    assert isinstance(optimizer, v1.train.GradientDescentOptimizer)
    assert type(optimizer).__name__ == "GradientDescentOptimizer"
    assert "already" in toy.raises(ValueError, lambda: hvd.DistributedOptimizer(optimizer))
    assert type(optimizer.unwrap()) is v1.train.GradientDescentOptimizer
    weight = tf.Variable(1.0)
    optimizer.minimize(lambda: weight * float(rank))
    toy.check_close([weight], [1 - 0.1 * rank], 1e-6)


def test_an_optimizer_of_keras_goes_to_its_binding(rank: int, size: int) -> None:
    optimizer = keras.optimizers.SGD(1.0)
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True, "num_groups": 2}
    assert hvd.DistributedOptimizer(optimizer, **options) is optimizer
    weight = keras.Variable(1.0, name="weight")
    optimizer.build([weight])
    for scale in (1.0, 3.0):
        optimizer.apply([tf.constant(scale * rank)], [weight])
    toy.check_close([weight.numpy()], [1 - (size - 1)], 1e-6)


def test_the_binding_of_keras_under_its_other_name() -> None:
    from engine.tensorflow.keras.callbacks import MetricAverageCallback

    import engine.keras
    import engine.tensorflow.keras as other

    assert MetricAverageCallback is engine.keras.callbacks.MetricAverageCallback
    for name in engine.keras.__all__:
        assert getattr(other, name) is getattr(engine.keras, name), name


def test_what_cannot_be_is_refused_at_once() -> None:
    for error, given, options, part in (
        (TypeError, object(), {}, "keras.optimizers.Optimizer"),
        (EngineError, v1.train.AdamOptimizer(), {"op": hvd.Adasum}, "DistributedGradientTape"),
        (ValueError, v1.train.AdamOptimizer(), {"backward_passes_per_step": 0}, "backward_passes_per_step"),
        (ValueError, v1.train.AdamOptimizer(), {"num_groups": 1, "groups": []}, "not both"),
        (TypeError, v1.train.AdamOptimizer(), {"compression": 3}, "Compression"),
    ):
        kind = type(given)
        text = toy.raises(error, lambda given=given, options=options: hvd.DistributedOptimizer(given, **options))
        assert part in text and type(given) is kind, text


def test_ranks_with_other_options_are_told(rank: int, size: int) -> None:
    if size == 1:
        return
    op = hvd.Sum if rank == size - 1 else hvd.Average
    wrap = lambda: hvd.DistributedOptimizer(v1.train.AdamOptimizer(), op=op)  # noqa: E731
    text = toy.raises(MismatchError, wrap)
    assert "different options" in text and "op=Sum" in text, text
