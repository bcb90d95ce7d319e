"""Gradient tapes of TensorFlow with reduced gradients, in eager mode and in `tf.function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import engine
import engine.tensorflow as hvd
from engine.errors import EngineError
from engine.session import runtime

from ..adasum_reference import adasum
from . import tensorflow_toy as toy
from .tensorflow_ranks import PYTHON, SIZES, on_op_ranks

pytestmark = on_op_ranks(*SIZES, PYTHON)
traced = pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
FAILED = EngineError, tf.errors.OpError  # raised in eager mode and by a graph, respectively


def gradients_of(variables: Sequence[Any], batch: Any, **options: Any) -> list[Any]:
    """Return reduced gradients of this rank's part of a batch."""
    with tf.GradientTape() as tape:
        loss = toy.loss_of(variables, toy.shard(batch))
    return hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)


def local_gradients(variables: Sequence[Any], batch: Any) -> list[np.ndarray]:
    """Return the gradients of this rank only."""
    with tf.GradientTape() as tape:
        loss = toy.loss_of(variables, toy.shard(batch))
    return [each.numpy() for each in tape.gradient(loss, variables)]


@pytest.mark.sample(3)
@traced
@pytest.mark.parametrize("within", [False, True], ids=["after", "around"])
def test_shards_train_as_the_whole_batch_does(traced: bool, within: bool) -> None:
    variables = toy.model()

    def step(batch: Any) -> None:
        if within:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = toy.loss_of(variables, batch)
        else:
            with tf.GradientTape() as tape:
                loss = toy.loss_of(variables, batch)
            tape = hvd.DistributedGradientTape(tape)
        toy.descend(variables, tape.gradient(loss, variables))

    run = toy.as_function(step, traced)
    for number in range(3):
        run(toy.shard(toy.whole_batch(number)))
    toy.check_close(toy.values(variables), toy.trained_alone(3))
    toy.check_same_everywhere(toy.values(variables))


@traced
@pytest.mark.parametrize("name", ["Average", "Sum", "Min", "Max"])
def test_each_operation(name: str, traced: bool) -> None:
    variables, batch = toy.model(), toy.whole_batch(0)
    mine = local_gradients(variables, batch)
    found = toy.as_function(lambda: gradients_of(variables, batch, op=getattr(hvd, name)), traced)()
    gathered = engine.allgather_object(mine)
    combine = {"Average": np.mean, "Sum": np.sum, "Min": np.min, "Max": np.max}[name]
    toy.check_close(found, [combine(of_ranks, 0) for of_ranks in zip(*gathered, strict=True)])


@traced
def test_adasum_combines_gradients(size: int, traced: bool) -> None:
    if size == 3:
        return
    variables, batch = toy.model(), toy.whole_batch(0)
    mine = local_gradients(variables, batch)
    found = toy.as_function(lambda: gradients_of(variables, batch, op=hvd.Adasum), traced)()
    gathered = engine.allgather_object(mine)
    toy.check_close(found, [adasum(of_ranks) for of_ranks in zip(*gathered, strict=True)])


class Negated(hvd.Compressor):
    """A compressor of the program's own: -x in float32."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tf.cast(-tensor, tf.float32), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(-tensor, ctx)


@pytest.mark.sample(10)
@traced
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"compression": hvd.Compression.fp16}, 2e-3),
        ({"compression": hvd.Compression.bf16}, 2e-2),
        ({"compression": hvd.Compression.tuned}, 2e-2),
        ({"compression": Negated}, 1e-6),
        ({"gradient_predivide_factor": 2.0}, 1e-11),
        ({"num_groups": 2}, 1e-11),
        ({"num_groups": 9}, 1e-11),
        ({"device_dense": "/cpu:0", "device_sparse": "/cpu:0"}, 1e-11),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_options_that_leave_an_average(options: dict[str, Any], tolerance: float, traced: bool) -> None:
    variables, batch = toy.model(), toy.whole_batch(0)
    found = toy.as_function(lambda: gradients_of(variables, batch, **options), traced)()
    expected = toy.averaged(local_gradients(variables, batch))
    assert all(each.dtype == tf.float64 for each in found)
    toy.check_close(found, expected, tolerance)


@traced
def test_groups_of_variables(traced: bool) -> None:
    variables, batch = toy.model(), toy.whole_batch(0)
    groups = [[variables[3], variables[0]], [variables[1]]]
    found = toy.as_function(lambda: gradients_of(variables, batch, groups=groups), traced)()
    toy.check_close(found, toy.averaged(local_gradients(variables, batch)))


@traced
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "as_dense"])
def test_embeddings(rank: int, size: int, traced: bool, dense: bool) -> None:
    table = tf.Variable(np.arange(40.0).reshape(10, 4) / 7, name="table")
    chosen = [[1, 1, 2, 9], [2, 3], []][rank] if size > 1 else [1, 1, 2, 9]

    def loss(indices: Any) -> Any:
        return tf.reduce_sum(tf.gather(table, indices) ** 3)

    def step(indices: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(indices)
        return hvd.DistributedGradientTape(tape, sparse_as_dense=dense).gradient(value, table)

    found = toy.as_function(step, traced)(tf.constant(chosen, tf.int32))
    with tf.GradientTape() as tape:
        value = loss(tf.constant(chosen, tf.int32))
    mine = tf.convert_to_tensor(tape.gradient(value, table)).numpy()
    expected = toy.averaged([mine])
    toy.check_same_everywhere([tf.convert_to_tensor(found)])
    assert isinstance(found, tf.IndexedSlices) is not dense
    if not dense:
        assert len(set(found.indices.numpy())) == len(found.indices)
    toy.check_close([tf.convert_to_tensor(found)], expected)


@traced
def test_structures_and_gradients_that_are_none(traced: bool) -> None:
    used, unused = tf.Variable(2.0 + engine.rank(), name="used"), tf.Variable([1.0], name="unused")
    sources = {"b": [used, unused], "a": used}

    def step() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            value = used**2
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(value, sources), tape.gradient(value, unused), tape.gradient(value, used)

    many, none, one = toy.as_function(step, traced)()
    expected = 4.0 + (engine.size() - 1)
    assert none is None and many["b"][1] is None
    assert many["a"] == many["b"][0] == one == expected


@traced
def test_a_gradient_that_one_rank_lacks_is_named_at_once(rank: int, size: int, traced: bool) -> None:
    suffix = "traced" if traced else "eager"
    used = tf.Variable([1.0, 2.0], name=f"used {suffix}")
    head = tf.Variable([3.0, 4.0], name=f"head {suffix}")

    def step() -> Any:
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(used * (head if rank == 0 else 1.0))
        return hvd.DistributedGradientTape(tape).gradient(value, [used, head])

    if size == 1:
        return
    text = toy.raises(Exception, toy.as_function(step, traced))
    assert f"'head {suffix}': rank" in text and "float32[2] without a gradient" in text, text


@traced
def test_gradients_that_other_ranks_lack_later_on_are_no_partners_of_others(size: int, rank: int, traced: bool) -> None:
    """Ranks have as many gradients, of equal shapes, but of different variables."""
    three = [tf.Variable([1.0, 2.0], name=f"{name} {traced}") for name in ("first", "second", "third")]

    def step(chosen: Sequence[int]) -> Any:
        with tf.GradientTape() as tape:
            value = tf.add_n([tf.reduce_sum(three[k] ** 2) for k in chosen])
        return hvd.DistributedGradientTape(tape).gradient(value, three)

    run = toy.as_function(step, traced)
    assert [each is None for each in run((0, 1))] == [False, False, True]
    if size > 1:
        text = toy.raises(FAILED, lambda: run((0, 1) if rank else (0, 2)))
        assert "ranks disagree" in text, text
    assert [each is None for each in run((1, 2))] == [True, False, False]


@pytest.mark.slow
@on_op_ranks(3)
def test_three_thousand_operations_in_the_first_step(rank: int) -> None:
    weights = tf.Variable(tf.ones([3000]))

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            parts = tf.unstack(weights)
            tape.watch(parts)
            value = tf.add_n(parts) * float(rank)
        return tf.stack(hvd.DistributedGradientTape(tape, num_groups=3000).gradient(value, parts))

    for _ in range(2):
        assert step().numpy().tolist() == [1.0] * 3000


@traced
def test_two_tapes_of_one_step_may_have_the_same_variables(traced: bool) -> None:
    shared, own = tf.Variable(float(engine.rank()), name="w"), tf.Variable(1.0, name="w")

    def step() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            first, second = shared**2 * own, shared**3
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(first, [shared, own]), tape.gradient(second, [shared, own])

    (by_shared, by_own), (again, none) = toy.as_function(step, traced)()
    ranks = np.arange(engine.size(), dtype=float)
    toy.check_close([by_shared, by_own, again], [np.mean(2 * ranks), np.mean(ranks**2), np.mean(3 * ranks**2)], 1e-6)
    assert none is None


def test_a_rank_that_traces_once_more_goes_on_with_the_others() -> None:
    variables = toy.model()

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = toy.loss_of(variables, batch)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        toy.descend(variables, gradients)
        return gradients

    traces = []
    for number in range(4):
        batch = toy.shard(toy.whole_batch(number))
        if number in (1, 2) and engine.rank() == engine.size() - 1:
            batch = batch[: 1 + number]  # another shape, for which only this rank retraces
        mine = (
            local_gradients(variables, toy.whole_batch(number)) if len(batch) == 4 else own_gradients(variables, batch)
        )
        expected = toy.averaged(mine)
        toy.check_close(step(batch), expected)
        traces.append(step.experimental_get_tracing_count())
    counts = engine.allgather_object(traces[-1])
    assert counts[-1] > 1 and set(counts[:-1]) <= {1}, counts
    toy.check_same_everywhere(toy.values(variables))


def own_gradients(variables: Sequence[Any], batch: Any) -> list[np.ndarray]:
    with tf.GradientTape() as tape:
        loss = toy.loss_of(variables, batch)
    return [each.numpy() for each in tape.gradient(loss, variables)]


@traced
@pytest.mark.parametrize("scaled", [True, False])
def test_local_sources_stay_with_their_rank(traced: bool, scaled: bool, rank: int, size: int) -> None:
    variables, batch = toy.model(), toy.whole_batch(0)

    class Layer:
        trainable_weights = variables[2:]

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = toy.loss_of(variables, toy.shard(batch))
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=[Layer()], scale_local_gradients=scaled)
        tape.register_local_source(variables[0])
        return tape.gradient(loss, variables)

    found = toy.as_function(step, traced)()
    mine = local_gradients(variables, batch)
    share = size if scaled else 1
    expected = [each / share for each in mine]
    expected[1] = toy.averaged(mine)[1]
    toy.check_close(found, expected)


def test_jacobians_are_of_this_rank() -> None:
    weight = tf.Variable([1.0, 2.0 + engine.rank()])
    with tf.GradientTape(persistent=True) as tape:
        value = weight**2
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    tensors = engine.counters()["tensors"]
    toy.check_close([tape.jacobian(value, weight)], [np.diag(2 * weight.numpy())], 1e-6)
    assert engine.counters()["tensors"] == tensors


def test_generic_names_serve_ranks_with_other_names() -> None:
    weight = tf.Variable(1.0 + engine.rank(), name=f"of_rank_{engine.rank()}")
    with tf.GradientTape() as tape:
        value = weight**2
    found = hvd.DistributedGradientTape(tape).gradient(value, [weight], use_generic_names=True)
    toy.check_close(found, [np.mean(2.0 * (1 + np.arange(engine.size())))], 1e-6)


def test_a_process_set_reduces_and_others_train_alone(rank: int, size: int) -> None:
    if size == 1:
        return
    chosen = engine.add_process_set([0, 2] if size == 3 else [0])
    variables, batch = toy.model(), toy.whole_batch(0)
    found = gradients_of(variables, batch, process_set=chosen)
    gathered = engine.allgather_object(local_gradients(variables, batch))
    ranks = chosen.ranks if chosen.included() else [rank]
    expected = [np.mean(of_ranks, 0) for of_ranks in zip(*[gathered[each] for each in ranks], strict=True)]
    toy.check_close(found, expected)
    engine.remove_process_set(chosen)


@traced
def test_a_gradient_is_the_end_of_a_step(traced: bool) -> None:
    variables, batch = toy.model(), toy.whole_batch(0)
    run = toy.as_function(lambda: gradients_of(variables, batch), traced)
    run()
    native = runtime.current_engine()
    native.record_steps()
    start = native.steps(0)[0] + len(native.steps(0)[1])
    for _ in range(3):
        run()
    engine.barrier()
    marks = native.steps(start)[1]
    assert len(marks) == 3 and len({mark[2] for mark in marks}) == 1, marks


def test_tapes_for_the_same_variables_count_as_one_optimizer() -> None:
    variables = [tf.Variable(1.0, name="counted")]
    gradients_of_one = lambda: _gradient(variables)  # noqa: E731
    gradients_of_one()
    before = hvd.global_process_set.numbers.next("optimizer")
    gradients_of_one()
    assert hvd.global_process_set.numbers.next("optimizer") == before + 1


def _gradient(variables: Sequence[Any]) -> Any:
    with tf.GradientTape() as tape:
        value = variables[0] ** 2
    return hvd.DistributedGradientTape(tape).gradient(value, variables)


@traced
def test_ranks_that_differ_are_told_and_go_on(traced: bool, rank: int, size: int) -> None:
    if size == 1:
        return
    last = rank == size - 1
    weight = tf.Variable(np.ones(3 if last else 2), name=f"differs{traced}")
    text = toy.raises(FAILED, toy.as_function(lambda: _gradient_of(weight), traced))
    assert "float64" in text and "differs" in text, text
    weight = tf.Variable(np.ones(2), name=f"agrees{traced}")
    op = hvd.Sum if last else hvd.Average
    assert "sum" in toy.raises(FAILED, toy.as_function(lambda: _gradient_of(weight, op=op), traced)).lower()
    toy.check_close([_gradient_of(weight)], [np.full(2, 2.0)])


def _gradient_of(weight: Any, **options: Any) -> Any:
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(weight**2)
    return hvd.DistributedGradientTape(tape, **options).gradient(value, weight)


def test_options_are_checked_at_once() -> None:
    weight = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        pass
    for error, options, part in (
        (ValueError, {"num_groups": -1}, "num_groups"),
        (ValueError, {"num_groups": 2, "groups": [[]]}, "not both"),
        (TypeError, {"groups": [1, 2]}, "list of lists"),
        (ValueError, {"groups": [[weight], [weight]]}, "twice"),
        (ValueError, {"gradient_predivide_factor": 0.0}, "positive"),
        (ValueError, {"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op=Average"),
        (TypeError, {"compression": "fp16"}, "Compression"),
        (TypeError, {"compression": engine.Scheme()}, "scheme"),
        (ValueError, {"op": 99}, "99"),
    ):
        text = toy.raises(error, lambda options=options: hvd.DistributedGradientTape(tape, **options))
        assert part in text, text
    assert type(tape) is tf.GradientTape
    assert "GradientTape" in toy.raises(TypeError, lambda: hvd.DistributedGradientTape([1]))
    wrapped = hvd.DistributedGradientTape(tape)
    assert wrapped is tape and isinstance(tape, tf.GradientTape) and type(tape).__name__ == "GradientTape"
    assert "already" in toy.raises(ValueError, lambda: hvd.DistributedGradientTape(tape))
    with tf.GradientTape() as other:
        pass
    bad = lambda: hvd.PartialDistributedGradientTape(other, local_layers=[3])  # noqa: E731
    assert "no layer" in toy.raises(TypeError, bad)
