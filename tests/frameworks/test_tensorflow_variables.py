"""Broadcasts of variables and objects with TensorFlow: eager, in `tf.function`, in a graph of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import engine
import engine.tensorflow as hvd
from engine.errors import EngineError, MismatchError, UnsupportedTensorError

from . import tensorflow_toy as toy
from .tensorflow_ranks import SIZES, on_op_ranks

pytestmark = on_op_ranks(*SIZES)
DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "uint32", "int64", "bool", "complex64"]


def own_variables(rank: int) -> list[Any]:
    """Return variables of many dtypes and shapes, including an empty one and two with the same name."""
    made = [tf.Variable(tf.cast(tf.reshape(tf.range(6) + rank, [2, 3]) % 3, dtype), name=dtype) for dtype in DTYPES]
    made += [
        tf.Variable(float(rank), name="same"),
        tf.Variable(10.0 + rank, name="same"),
        tf.Variable(np.zeros([0, 3])),
    ]
    return [*made, keras.Variable(np.full([2], rank), name="of_keras")]


@pytest.mark.parametrize("inplace", [False, True])
def test_variables_come_from_the_root(inplace: bool, rank: int, size: int) -> None:
    for root in {0, size - 1}:
        variables = own_variables(rank)
        assert hvd.broadcast_variables(variables, root, inplace=inplace) is None
        for found, expected in zip(variables, own_variables(root), strict=True):
            assert np.array_equal(found.numpy(), expected.numpy()), found


def test_variables_come_from_the_root_in_a_function(rank: int, size: int) -> None:
    variables = [tf.Variable(np.full([3], float(rank)), name="w"), tf.Variable(rank, name="w"), tf.Variable(2.0 * rank)]

    @tf.function
    def run() -> Any:
        hvd.broadcast_variables(variables[:2], size - 1)
        return hvd.broadcast_(variables[2:], size - 1, "third")

    (third,) = run()
    last = size - 1
    assert third == 2.0 * last == variables[2].numpy()
    assert variables[0].numpy().tolist() == [last] * 3 and variables[1].numpy() == last


def test_values_are_returned_in_eager_mode(rank: int) -> None:
    variables = [tf.Variable(float(rank)), keras.Variable(np.full([2], rank))]
    found = hvd.broadcast_(variables, 0)
    assert [each.numpy().tolist() for each in found] == [0.0, [0.0, 0.0]]


def test_all_variables_of_a_graph(rank: int, size: int) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name in ("one", "two"):
            tf.compat.v1.get_variable(name, initializer=[float(rank), 1.0 + rank])
        tf.compat.v1.get_variable("kept", initializer=float(rank), collections=["own"])
        operation = hvd.broadcast_global_variables(size - 1)
        session.run(
            [tf.compat.v1.global_variables_initializer(), *(v.initializer for v in tf.compat.v1.get_collection("own"))]
        )
        session.run(operation)
        found = session.run(tf.compat.v1.global_variables())
        assert [each.tolist() for each in found] == [[size - 1.0, float(size)]] * 2
        assert session.run(tf.compat.v1.get_collection("own")) == [rank]


def test_global_variables_and_eager_mode_exclude_each_other() -> None:
    assert "broadcast_variables" in toy.raises(EngineError, lambda: hvd.broadcast_global_variables(0))


def test_different_models_are_refused_before_anything_is_changed(rank: int, size: int) -> None:
    if size == 1:
        return
    last = size - 1
    mine = [tf.Variable([float(rank)] * 2, name="a"), tf.Variable(np.zeros(4 if rank == last else 3), name="b")]
    text = toy.raises(MismatchError, lambda: hvd.broadcast_variables(mine, 0))
    assert f"'b': rank {last} has float64[4], rank 0 has float64[3]" in text, text
    assert mine[0].numpy()[0] == rank


def test_what_is_no_variable_is_refused_on_all_ranks(rank: int, size: int) -> None:
    odd = tf.constant(1.0) if rank == size - 1 else tf.Variable(1.0)
    text = toy.raises(EngineError, lambda: hvd.broadcast_variables([odd], 0))
    assert "no variable" in text, text
    texts = tf.Variable("text", name="words")
    assert "'words' holds strings" in toy.raises(UnsupportedTensorError, lambda: hvd.broadcast_variables([texts], 0))


def test_a_process_set_has_a_root_of_its_own(rank: int, size: int) -> None:
    if size < 3:
        return
    chosen = engine.add_process_set([1, 2])
    variable = tf.Variable(float(rank))
    hvd.broadcast_variables([variable], 2, chosen)
    assert variable.numpy() == (2.0 if rank else 0.0)
    engine.remove_process_set(chosen)


def test_objects(rank: int, size: int) -> None:
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    assert hvd.broadcast_object(rank, 0, None, "named") == 0
    from_last = hvd.broadcast_object_fn(size - 1, name="again")
    assert [from_last(rank), from_last([rank])] == [size - 1, [size - 1]]
    assert hvd.allgather_object((rank, "x"), None, "gathered") == [(each, "x") for each in range(size)]
