"""Gradients through TensorFlow's collectives, compared with one process that has all ranks' inputs.

That process gives the mathematical gradients. Horovod's, the default, are a known multiple of them for each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import engine
import engine.tensorflow as hvd
from engine.errors import EngineError
from engine.frameworks.backward import mathematical_gradients
from engine.tensorflow import op

from .tensorflow_ranks import MODES, PYTHON, SIZES, on_op_ranks

pytestmark = on_op_ranks(*SIZES, PYTHON)


def drawn(seed: int, *shape: int) -> Any:
    return tf.constant(np.random.default_rng(seed).normal(size=shape))


def inputs(rank: int, *shape: int) -> Any:
    return drawn(rank, *shape)


def weights(rank: int, *shape: int) -> Any:
    """Return the weights of a rank's loss, which every rank can compute."""
    return drawn(100 + rank, *shape)


def gradient_of(function: Callable[[Any], Any], x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = function(x)
    return tape.gradient(loss, x)


def check(
    shapes: list[tuple[int, ...]],
    collective: Callable[[Any], Any],
    model: Callable[[list[Any]], list[Any]],
    horovod: float = 1.0,
) -> None:
    """Compare the collective's gradient with that of `model`, which maps all ranks' inputs to all ranks' outputs.

    `horovod` is the factor by which Horovod's gradient is larger. The tape is inside or outside of the traced function.
    """
    me = engine.rank()
    everyone = [inputs(rank, *shape) for rank, shape in enumerate(shapes)]
    with tf.GradientTape() as tape:
        tape.watch(everyone)
        outputs = model([each * 2 for each in everyone])
        loss = tf.add_n([tf.reduce_sum(each * weights(rank, *each.shape)) for rank, each in enumerate(outputs)])
    exact = tape.gradient(loss, everyone)[me]
    want = np.zeros(shapes[me]) if exact is None else tf.convert_to_tensor(exact).numpy()

    def program(x: Any) -> Any:
        output = collective(x * 2)
        return tf.reduce_sum(output * weights(me, *outputs[me].shape))

    ways = {
        "eager": lambda x: gradient_of(program, x),
        "outside": lambda x: gradient_of(tf.function(program), x),
        "inside": lambda x: tf.function(lambda y: gradient_of(program, y))(x),
    }
    for mathematical, factor in ((None, horovod), (True, 1.0)):
        for way, run in ways.items():
            with nullcontext() if mathematical is None else mathematical_gradients(mathematical):
                found = run(everyone[me])
            np.testing.assert_allclose(
                found.numpy(), want * factor, rtol=1e-9, atol=1e-12, err_msg=f"{way} {mathematical}"
            )


def test_allreduce(size: int) -> None:
    shapes = [(3, 4)] * size
    check(shapes, lambda x: hvd.allreduce(x, op=engine.Sum), lambda xs: [tf.add_n(xs)] * size)
    check(
        shapes,
        lambda x: hvd.allreduce(x, op=engine.Average, prescale_factor=0.1, postscale_factor=3.0, name="reduced"),
        lambda xs: [tf.add_n(xs) * 0.3 / size] * size,
    )


def test_grouped_allreduce(size: int) -> None:
    def flat(tensors: list[Any]) -> Any:
        return tf.concat([tf.reshape(each, [-1]) for each in tensors], 0)

    check(
        [(3, 4)] * size,
        lambda x: flat(hvd.grouped_allreduce([x[:1], x[1:]], op=engine.Sum)),
        lambda xs: [flat([tf.add_n(xs)])] * size,
    )


def test_broadcast(size: int) -> None:
    root = size - 1
    check(
        [(5,)] * size,
        lambda x: hvd.broadcast(x, root, name="root"),
        lambda xs: [tf.identity(xs[root])] * size,
        1 / size,
    )


def test_allgather_of_uneven_rows(size: int) -> None:
    check([(rank, 3) for rank in range(size)], hvd.allgather, lambda xs: [tf.concat(xs, 0)] * size, 1 / size)
    check([()] * size, hvd.allgather, lambda xs: [tf.stack(xs)] * size, 1 / size)
    check(
        [(rank + 1, 2) for rank in range(size)],
        lambda x: tf.concat(hvd.grouped_allgather([x, x[:1] * 3]), 0),
        lambda xs: [tf.concat([*xs, *(x[:1] * 3 for x in xs)], 0)] * size,
        1 / size,
    )


def test_alltoall_of_uneven_rows(size: int) -> None:
    splits = [[(rank + other) % 3 for other in range(size)] for rank in range(size)]
    starts = [np.cumsum([0, *each]) for each in splits]
    check(
        [(sum(each) + 2, 3) for each in splits],
        lambda x: hvd.alltoall(x, splits=splits[engine.rank()])[0],
        lambda xs: [
            tf.concat([x[begin[r] : begin[r + 1]] for x, begin in zip(xs, starts, strict=True)], 0) for r in range(size)
        ],
    )


def test_reducescatter_of_uneven_rows(size: int) -> None:
    rows = [2 if rank == 0 else 1 for rank in range(size)]
    shapes = [(size + 1, 2)] * size
    check(shapes, lambda x: hvd.reducescatter(x, op=engine.Sum), lambda xs: tf.split(tf.add_n(xs), rows), size)
    check(
        shapes,
        lambda x: hvd.reducescatter(x, name="scattered", postscale_factor=0.5),
        lambda xs: tf.split(tf.add_n(xs) * 0.5 / size, rows),
        size,
    )


def test_gradients_of_gradients(size: int) -> None:
    x = tf.constant([1.0, 2.0, 3.0], tf.float64)

    def cubed(y: Any) -> Any:
        return tf.reduce_sum(hvd.allreduce(y**3, op=engine.Sum, name="cubed"))

    for mode in MODES.values():
        second = mode(lambda y: _second(cubed, y))(x)
        np.testing.assert_allclose(second.numpy(), 6 * x.numpy() * size)


def _gradient_sum(function: Callable[[Any], Any], x: Any) -> Any:
    return tf.reduce_sum(gradient_of(function, x))


def _second(function: Callable[[Any], Any], x: Any) -> Any:
    return gradient_of(lambda y: _gradient_sum(function, y), x)


def test_calls_without_a_name_keep_their_order_in_the_graph_of_a_gradient(size: int) -> None:
    """TensorFlow does not order them, and their gradients do not depend on each other."""

    @tf.function
    def program(x: Any) -> Any:
        return tf.add_n([tf.reduce_sum(hvd.allreduce(x[k], op=engine.Sum) * (k + 1.0)) for k in range(20)])

    for _ in range(3):
        found = gradient_of(program, tf.ones([20, 2]))
        assert tf.convert_to_tensor(found).numpy().tolist() == [[(k + 1.0) * size] * 2 for k in range(20)]


@pytest.mark.parametrize("name", ["called four times", None])
def test_each_call_of_a_function_gets_its_own_gradient(name: str | None, rank: int, size: int) -> None:
    """TensorFlow runs these gradients in any order, here in a different one on each rank."""

    @tf.custom_gradient
    def late(x: Any) -> Any:
        def backward(gradient: Any) -> Any:
            delay = gradient
            for _ in range(60):
                delay = tf.sin(delay)
            return gradient + tf.where(delay > 1.0, 1.0, 0.0)

        return tf.identity(x), backward

    @tf.function(autograph=False)
    def inner(x: Any) -> Any:
        return hvd.allreduce(x, op=engine.Sum, name=name)

    @tf.function(autograph=False)
    def outer(xs: Any) -> Any:
        reduced = [inner(x) for x in xs]
        return tf.add_n([(late(x) if (k + rank) % 2 else x) * (k + 1.0) for k, x in enumerate(reduced)])

    if not op.native:
        with pytest.raises(EngineError, match="take the gradient inside of the outer function"):
            gradient_of(outer, [tf.constant(1.0) for _ in range(4)])
        return
    found = gradient_of(outer, [tf.constant(1.0) for _ in range(4)])
    assert [float(each) for each in found] == [size * (k + 1.0) for k in range(4)]


@pytest.mark.parametrize("name", ["row", None])
def test_a_jacobian_of_all_rows_at_once(name: str | None, size: int) -> None:
    x = tf.constant([1.0, 2.0, 3.0], tf.float64)

    @tf.function(autograph=False)
    def program() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x**2, op=engine.Sum, name=name)
        return tape.jacobian(y, x)

    if not op.native:
        pytest.skip("calls of Python have no names for them")
    np.testing.assert_allclose(program().numpy(), np.diag(2 * size * x.numpy()))


def test_complex_numbers(size: int) -> None:
    x = tf.constant([1 + 2j, 3 - 1j], tf.complex128)
    for mode in MODES.values():
        found = gradient_of(mode(lambda y: tf.reduce_sum(tf.abs(hvd.allgather(y)) ** 2)), x)
        np.testing.assert_allclose(found.numpy(), 2 * x.numpy())


def test_slices_and_integers_beside_floats(rank: int, size: int) -> None:
    def program(x: Any) -> Any:
        _, gathered = hvd.grouped_allgather([tf.constant([rank]), x], name="integers beside")
        return tf.reduce_sum(tf.gather(gathered, [0, 0, 1]))

    for mode in MODES.values():
        found = gradient_of(mode(program), tf.ones([2, 2]))
        assert tf.convert_to_tensor(found).numpy().tolist() == ([[2, 2], [1, 1]] if rank == 0 else [[0, 0], [0, 0]])


def test_a_jacobian_row_by_row() -> None:
    x = tf.constant([1.0, 2.0], tf.float64)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = hvd.allreduce(x**2, name="jacobian")
    rows = tape.jacobian(y, x, experimental_use_pfor=False).numpy()
    np.testing.assert_allclose(rows, np.diag(2 * x.numpy()))


def test_some_reductions_have_none() -> None:
    with pytest.raises(EngineError, match="op=Max has no gradient"):
        gradient_of(lambda x: tf.reduce_sum(hvd.allreduce(x, op=engine.Max)), tf.ones([2]))


COLLECTIVES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "grouped_allgather": lambda tensors: hvd.grouped_allgather(tensors),
    "grouped_allreduce": lambda tensors: hvd.grouped_allreduce(tensors, op=hvd.Sum),
    "grouped_reducescatter": lambda tensors: hvd.grouped_reducescatter(tensors, op=hvd.Sum),
    "allgather": lambda tensors: [hvd.allgather(each) for each in tensors],
    "broadcast": lambda tensors: [hvd.broadcast(each, 0, name=f"twice {k}") for k, each in enumerate(tensors)],
    "alltoall": lambda tensors: [hvd.alltoall(each) for each in tensors],
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradients_of_one_collective_may_be_taken_several_times_in_a_session(name: str, rank: int, size: int) -> None:
    """There is one gradient for each result, and a second loss, all in one run of the session."""
    if not op.native:
        pytest.skip("calls of Python hold a thread each, and a session has no order for them")

    def grads(session: Any) -> list[Any]:
        tensors = [tf.constant(np.full([2 * size, 3], float(rank + k))) for k in range(3)]
        outputs = COLLECTIVES[name](tensors)
        twice = [*zip(outputs, tensors, strict=True)] * 2
        asked = [tf.compat.v1.gradients(output, each, tf.ones_like(output))[0] for output, each in twice]
        found: list[Any] = session.run(asked)
        return found

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        found = grads(session)
    # All ranks' losses depend once on each rank's rows; Horovod averages their gradients.
    factor = {"grouped_allreduce": size, "grouped_reducescatter": size, "broadcast": 1.0 if rank == 0 else 0.0}
    for each in found:
        np.testing.assert_allclose(each, np.full([2 * size, 3], factor.get(name, 1.0)))
