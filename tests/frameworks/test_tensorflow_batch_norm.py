"""`SyncBatchNormalization` of TensorFlow does what Keras' layer does with all ranks' batches as one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import engine
import engine.tensorflow as hvd

from . import tensorflow_toy as toy
from .tensorflow_ranks import SIZES, on_op_ranks

pytestmark = on_op_ranks(*SIZES)
traced = pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
SHAPES = {"rows": (4,), "images": (3, 5, 4), "scaled": (4,)}


def inputs_of(step: int, shape: tuple[int, ...], rows: list[int], dtype: str = "float64") -> list[Any]:
    """Return each rank's input in a step, with these numbers of rows, around a mean that is not small."""
    random = np.random.default_rng(step)
    return [tf.constant(random.normal(size=(count, *shape)) * 2 + 7, dtype) for count in rows]


def both(shape: tuple[int, ...], **options: Any) -> tuple[Any, Any]:
    """Return the synchronized layer, and Keras' own."""
    made = hvd.SyncBatchNormalization(**options), keras.layers.BatchNormalization(**options)
    for layer in made:
        layer.build((None, *shape))
        for weight, scale in zip(layer.trainable_weights, (1.5, 0.5), strict=True):
            weight.assign(scale + np.arange(shape[-1]) / 3)
    return made


def passed(layer: Any, inputs: Any, weights: Any, mask: Any = None) -> tuple[Any, Any, list[Any]]:
    """Return output, input gradient and parameter gradients of a loss that differs by element."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output = layer(inputs, training=True, mask=mask)
        loss = tf.reduce_sum(tf.sin(output) * weights)
    by_input, *others = tape.gradient(loss, [inputs, *layer.trainable_weights])
    return output, by_input, others


@pytest.mark.sample(4)
@traced
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_it_is_one_batch(kind: str, uneven: bool, traced: bool, rank: int, size: int) -> None:
    shape, dtype = SHAPES[kind], "float64"
    rows = [4 + 3 * each * uneven for each in range(size)]
    mine, whole = both(shape, dtype=dtype, momentum=0.9, name=f"{kind}{uneven}{traced}")
    run = toy.as_function(lambda *given: passed(mine, *given), traced)
    part = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    for step in range(3):
        inputs = tf.concat(inputs_of(step, shape, rows), 0)
        weights = tf.constant(np.random.default_rng(step).normal(size=inputs.shape))
        output, by_input, others = run(inputs[part], weights[part])
        expected_output, expected_by_input, expected_others = passed(whole, inputs, weights)
        summed = [each * size for each in toy.averaged(others)]
        toy.check_close([output, by_input], [expected_output[part], expected_by_input[part]], 1e-9)
        toy.check_close(summed, expected_others, 1e-9)
    moving = [each.numpy() for each in mine.non_trainable_weights]
    toy.check_close(moving, whole.non_trainable_weights, 1e-9)
    toy.check_same_everywhere(moving)
    inputs = inputs_of(9, shape, [2])[0]
    toy.check_close([mine(inputs, training=False)], [whole(inputs, training=False)], 1e-9)


def test_a_rank_without_rows_and_masked_rows(rank: int, size: int) -> None:
    mine, whole = both((4,), dtype="float64")
    rows = [5, 0, 3][:size]
    parts = inputs_of(1, (4,), rows)
    weights = [tf.constant(np.random.default_rng(each).normal(size=(rows[each], 4))) for each in range(size)]
    output, by_input, _ = passed(mine, parts[rank], weights[rank])
    expected, expected_by_input, _ = passed(whole, tf.concat(parts, 0), tf.concat(weights, 0))
    part = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    toy.check_close([output, by_input], [expected[part], expected_by_input[part]], 1e-9)

    sequences = inputs_of(2, (6, 4), [3] * size)  # different lengths on each rank
    masks = [np.arange(6) < [[2 + each], [6], [1]] for each in range(size)]
    mine, whole = both((6, 4), dtype="float64")[0], both((4,), dtype="float64")[1]
    mine(sequences[rank], training=True, mask=tf.constant(masks[rank]))
    chosen = tf.concat([tf.boolean_mask(one, other) for one, other in zip(sequences, masks, strict=True)], 0)
    whole(chosen, training=True)
    toy.check_close([each.numpy() for each in mine.non_trainable_weights], whole.non_trainable_weights, 1e-9)


def test_half_precision_is_merged_in_full(rank: int, size: int) -> None:
    layer = hvd.SyncBatchNormalization(dtype="mixed_float16")
    parts = inputs_of(3, (8,), [64] * size, "float16")
    output = layer(parts[rank], training=True)
    assert output.dtype == tf.float16
    values = np.concatenate([each.numpy().astype(float) for each in parts])
    normal = (parts[rank].numpy() - values.mean(0)) / np.sqrt(values.var(0) + 1e-3)
    toy.check_close([output], [normal], 1e-2)
    toy.check_same_everywhere([each.numpy() for each in layer.non_trainable_weights])


def test_one_layer_may_be_called_twice_in_a_step(rank: int, size: int) -> None:
    layer, _ = both((4,), dtype="float64")

    @tf.function
    def run(one: Any, other: Any) -> Any:
        return layer(one, training=True), layer(other, training=True)

    parts = inputs_of(4, (4,), [6] * size), inputs_of(5, (4,), [6] * size)
    for found, given in zip(run(parts[0][rank], parts[1][rank]), parts, strict=True):
        values = np.concatenate(given)
        normal = (given[rank] - values.mean(0)) / np.sqrt(values.var(0) + 1e-3)
        gamma, beta = (each.numpy() for each in layer.trainable_weights)
        toy.check_close([found], [normal * gamma + beta], 1e-9)


def test_a_model_trains_as_one_process_does(rank: int, size: int) -> None:
    def model(norm: Any) -> Any:
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Dense(6, "tanh"), norm(), keras.layers.Dense(3)], name="net"
        )

    mine, whole = model(hvd.SyncBatchNormalization), model(keras.layers.BatchNormalization)
    data = np.random.default_rng(1).normal(size=(4, 6 * size, 8)).astype("float32")

    def step(net: Any, batch: Any, distributed: bool) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(batch, training=True) - tf.sin(batch[:, :3])) ** 2)
        tape = hvd.DistributedGradientTape(tape) if distributed else tape
        for variable, gradient in zip(
            net.trainable_variables, tape.gradient(loss, net.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * gradient)

    run = tf.function(lambda batch: step(mine, batch, True))
    for batch in data:
        run(batch[rank::size])
        step(whole, batch, False)
    toy.check_close([each.numpy() for each in mine.variables], [each.numpy() for each in whole.variables], 1e-5)
    toy.check_same_everywhere([each.numpy() for each in mine.variables])


def test_a_process_set_normalises_together_and_others_alone(rank: int, size: int) -> None:
    if size < 3:
        return
    chosen = engine.add_process_set([0, 2])
    layer = hvd.SyncBatchNormalization(process_set=chosen, dtype="float64", scale=False, center=False, epsilon=1e-9)
    parts = inputs_of(6, (4,), [5] * size)
    found = layer(parts[rank], training=True).numpy()
    values = np.concatenate([parts[0], parts[2]] if rank != 1 else [parts[1]])
    toy.check_close([found], [(parts[rank] - values.mean(0)) / values.std(0)], 1e-6)
    again = hvd.SyncBatchNormalization.from_config(layer.get_config())
    assert again.process_set.ranks == [0, 2]
    engine.remove_process_set(chosen)


def test_a_saved_layer_and_wrong_options() -> None:
    assert "fused" in toy.raises(ValueError, lambda: hvd.SyncBatchNormalization(fused=True))
    layer = hvd.SyncBatchNormalization(fused=False, momentum=0.5, name="normal")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(again) is hvd.SyncBatchNormalization and again.momentum == 0.5 and again.name == "normal"
    assert again.process_set is hvd.global_process_set
