"""Collectives on TensorFlow's tensors: values, dtypes, shapes, and exactly one call on every rank.

Two ranks also run the Python implementation, which replaces native ops where these cannot be built.
"""

from __future__ import annotations

import ctypes
import queue
import tempfile
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import engine
import engine.tensorflow as hvd
from engine.config import config
from engine.tensorflow import op
from engine.tensorflow.call import Call

from ..on_ranks import spare
from .tensorflow_ranks import MODES, PYTHON, SIZES, on_op_ranks, tensors

pytestmark = on_op_ranks(*SIZES, PYTHON)

REDUCED = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "bool")
MOVED = (*REDUCED, "uint32", "uint64", "complex64", "complex128")


def test_ops_are_native_unless_they_were_asked_not_to_be() -> None:
    assert op.native is config.load(config.read_environment()).tensorflow_native


@pytest.mark.parametrize("mode", MODES)
def test_values(mode: str, rank: int, size: int) -> None:
    x = np.arange(4 * size, dtype=np.float32).reshape(2 * size, 2) + rank

    def program(x: Any) -> Any:
        return (
            hvd.allreduce(x),
            hvd.allreduce(x, op=engine.Sum, prescale_factor=1 / 3, postscale_factor=3.0, name="scaled"),
            hvd.allgather(x[: rank + 1]),
            hvd.broadcast(x, size - 1, name="spread"),
            hvd.alltoall(x),
            *hvd.alltoall(x, splits=[1] * size, name="exchange"),
            hvd.reducescatter(x[: 2 * size - 1], op=engine.Sum),
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
            hvd.process_set_included_op(),
        )

    mean, scaled, gathered, spread, mixed, some, rows, part, *told = (
        each.numpy() for each in MODES[mode](program)(tf.constant(x))
    )
    base = x - rank
    everyone = [base + r for r in range(size)]
    np.testing.assert_allclose(mean, np.mean(everyone, 0))
    np.testing.assert_allclose(scaled, np.sum(everyone, 0), rtol=1e-6)
    np.testing.assert_array_equal(gathered, np.concatenate([each[: r + 1] for r, each in enumerate(everyone)]))
    np.testing.assert_array_equal(spread, everyone[-1])
    np.testing.assert_array_equal(mixed, np.concatenate([each[2 * rank : 2 * rank + 2] for each in everyone]))
    np.testing.assert_array_equal(some, np.stack([each[rank] for each in everyone]))
    assert rows.tolist() == [1] * size
    mine = np.array_split(np.sum(everyone, 0)[: 2 * size - 1], size)[rank]
    np.testing.assert_allclose(part, mine)
    assert told == [rank, size, rank, 1]


@pytest.mark.parametrize("mode", MODES)
def test_dtypes(mode: str, rank: int, size: int, parts: Any) -> None:
    for name in REDUCED:
        with parts.part(f"reduce {name}"):
            result = MODES[mode](lambda x: hvd.allreduce(x, op=engine.Max))(tf.cast([rank, 1, 0], name))
            assert result.dtype.name == name
            assert tf.cast(result, tf.int32).numpy().tolist() == [1 if name == "bool" and size > 1 else size - 1, 1, 0]
    for name in MOVED:
        with parts.part(f"move {name}"):
            result = MODES[mode](hvd.allgather)(tf.cast([[rank]], name))
            assert result.dtype.name == name
            sent = [float(r > 0) if name == "bool" else float(r) for r in range(size)]
            assert np.real(tf.cast(result, tf.complex64).numpy()).ravel().tolist() == sent


@pytest.mark.parametrize("mode", MODES)
def test_groups_mix_dtypes_and_shapes(mode: str, rank: int, size: int) -> None:
    sent = [tf.fill([3, 2], float(rank)), tf.constant(rank, tf.int64), tf.zeros([0, 4], tf.bfloat16)]
    reduced = MODES[mode](lambda *xs: hvd.grouped_allreduce(list(xs), op=engine.Sum, name=f"group {mode}"))(*sent)
    total = sum(range(size))
    assert [each.numpy().tolist() for each in reduced[:2]] == [[[total] * 2] * 3, total]
    assert reduced[2].shape == (0, 4) and reduced[2].dtype == tf.bfloat16
    gathered = MODES[mode](lambda *xs: hvd.grouped_allgather(list(xs)))(sent[0][:rank], sent[1], sent[2])
    assert gathered[0].shape == (sum(min(r, 3) for r in range(size)), 2)
    assert gathered[1].numpy().tolist() == list(range(size))
    parts = MODES[mode](lambda *xs: hvd.grouped_reducescatter(list(xs), op=engine.Sum))(
        tf.ones([size + 1]), tf.ones([1])
    )
    assert [each.shape[0] for each in parts] == [2 if rank == 0 else 1, int(rank == 0)]
    assert all(set(each.numpy().tolist()) <= {float(size)} for each in parts)


def test_variables_arrays_and_numbers_are_taken(rank: int, size: int) -> None:
    for value in (tf.Variable([1.0, 2.0]), np.float32([1, 2]), [1.0, 2.0]):
        assert hvd.allreduce(value, op=engine.Sum).numpy().tolist() == [size, 2 * size]
    assert engine.allreduce(tf.constant([1.0], tf.bfloat16)).dtype == tf.bfloat16
    variable = tf.Variable([float(rank)])
    engine.broadcast_(variable, size - 1)
    assert variable.numpy().tolist() == [size - 1]
    with pytest.raises(TypeError, match=r"expected a tf\.Tensor, not str"):
        hvd.allreduce("text")


@pytest.mark.parametrize("mode", MODES)
def test_slices_are_added_up(mode: str, rank: int, size: int) -> None:
    values = tf.ones([3, 2], tf.float32) * (rank + 1)
    indices = tf.constant([rank, 7, 7], tf.int64)

    def program(values: Any, indices: Any) -> Any:
        slices = tf.IndexedSlices(values, indices, tf.constant([8, 2], tf.int64))
        return hvd.allreduce(slices, op=engine.Sum), hvd.allreduce(
            slices, compression=engine.Compression.fp16, name="sparse"
        )

    total, mean = MODES[mode](program)(values, indices)
    want = np.zeros([8, 2], np.float32)
    for r in range(size):
        want[r] += r + 1
        want[7] += 2 * (r + 1)
    assert sorted(total.indices.numpy().tolist()) == sorted({*range(size), 7})
    np.testing.assert_array_equal(tf.convert_to_tensor(total).numpy(), want)
    np.testing.assert_allclose(tf.convert_to_tensor(mean).numpy(), want / size, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_an_average_of_integers_in_slices_is_exact_and_of_floats(dtype: str, rank: int, size: int) -> None:
    """The rows would overflow or be truncated if they were added, or divided, in their own dtype."""
    values = tf.constant([[100, 3], [100, 2 * rank], [7 + rank, 1]], dtype)
    slices = tf.IndexedSlices(values, tf.constant([5, 5, rank]), tf.constant([6, 2]))
    want = np.zeros([6, 2])
    want[5] = [200, 3 + size - 1]
    want[range(size)] += [[(7 + each) / size, 1 / size] for each in range(size)]
    alone = hvd.allreduce(slices, op=engine.Average)
    (grouped,) = hvd.grouped_allreduce([slices], op=engine.Average, compression=engine.Compression.fp16)
    for mean in (alone, grouped):
        assert mean.values.dtype == tf.truediv(values, values).dtype
        np.testing.assert_allclose(tf.convert_to_tensor(mean).numpy(), want, rtol=1e-6)


def test_a_factor_on_integers_in_slices_truncates_the_product(size: int) -> None:
    slices = tf.IndexedSlices(tf.constant([[9, -9]], tf.int64), tf.constant([1]), tf.constant([3, 2]))
    total = hvd.allreduce(slices, op=engine.Sum, prescale_factor=0.5)
    assert total.values.numpy().tolist() == [[4 * size, -4 * size]]
    total = hvd.allreduce(slices, op=engine.Sum, postscale_factor=0.5)
    assert total.values.numpy().tolist() == [[9 * size // 2, -(9 * size // 2)]]


@pytest.mark.parametrize("op", ["Min", "Max", "Product", "Adasum"])
def test_an_operation_that_slices_have_not_is_refused(op: str) -> None:
    """The error is a NotImplementedError, as Horovod raises, and the engine's ArgumentError, too."""
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    for call in (lambda op: hvd.allreduce(slices, op=op), lambda op: hvd.grouped_allreduce([slices], op=op)):
        with pytest.raises(NotImplementedError, match=f"not {op}") as raised:
            call(getattr(hvd, op))
        assert isinstance(raised.value, engine.errors.ArgumentError)


def test_shapes_that_are_known_while_tracing() -> None:
    known: list[Any] = []

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def program(x: Any) -> Any:
        gathered, scattered, reduced = hvd.allgather(x), hvd.reducescatter(x), hvd.allreduce(x)
        exchanged, rows = hvd.alltoall(x, splits=tf.zeros([engine.size()], tf.int32))
        known.extend(each.shape.as_list() for each in (gathered, scattered, reduced, exchanged, rows, hvd.rank_op()))
        return gathered

    program(tf.ones([engine.size(), 8]))
    assert known == [[None, 8], [None, 8], [None, 8], [None, 8], [None], []]


def test_without_an_engine_the_text_says_where_an_elastic_job_has_one() -> None:
    """A compiled program raises it, whether it communicates or asks for the rank."""
    absent = 12345  # not the number of a process set
    call = Call("allreduce", None, absent)
    programs: list[Any] = [lambda: op.read_rank_and_size(absent), lambda: op.reduce(call, [tf.ones([1])])]
    told = r"NotInitializedError: .*that elastic\.run wraps"
    for program in (*programs, *map(tf.function, programs)):
        if op.native:
            with pytest.raises(tf.errors.FailedPreconditionError, match=told):
                program()


def test_none_is_folded_merged_or_dropped() -> None:
    """Covers a constant input, equal calls, a result times zero, an unused result, and one used only for its shape."""

    @tf.function
    def program() -> Any:
        constant = hvd.allreduce(tf.constant([1.0, 2.0]), name="constant")
        once, twice = hvd.allreduce(tf.ones([2])), hvd.allreduce(tf.ones([2]))
        zero = hvd.allreduce(tf.ones([3]), name="zero") * 0.0
        shape = tf.shape(hvd.allreduce(tf.ones([4]), name="shape"))
        hvd.allreduce(tf.ones([5]), name="unused")
        hvd.allreduce(tf.ones([5]))
        return constant, once, twice, zero, shape

    program()
    before = tensors()
    for _ in range(4):
        program()
    assert tensors() - before == 4 * 7


def test_a_result_that_one_rank_uses_is_computed_by_all(rank: int) -> None:
    @tf.function
    def program(x: Any) -> Any:
        mean = hvd.allreduce(x, name="printed")
        if rank == 0:
            return tf.reduce_sum(mean)
        return tf.constant(0.0)

    @tf.function
    def nested(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0, lambda: program(x), lambda: tf.constant(0.0))

    for _ in range(3):
        nested(tf.ones([4]))


def test_named_calls_have_no_order_and_unnamed_ones_do() -> None:
    def program(x: Any, name: str | None) -> Any:
        return [hvd.allreduce(x, name=name and f"{name}{k}") for k in range(3)]

    spec = tf.TensorSpec([2])
    found = {}
    for name in ("named", None):
        graph = tf.function(program).get_concrete_function(spec, name).graph
        ops = [each for each in graph.get_operations() if each.type in ("EngineReduce", "PyFunc")]
        assert len(ops) == 3
        found[name] = [len(each.control_inputs) for each in ops]
    assert found[None][0] == 0 and all(found[None][1:])
    if op.native:
        assert found["named"] == [0, 0, 0]


def test_many_calls_in_any_order_on_one_thread() -> None:
    """Ranks make independent calls in different orders; none waits for another."""

    @tf.function
    def program(x: Any) -> Any:
        return [tf.reduce_sum(hvd.allreduce(x * k, op=engine.Sum, name=f"many{k}")) for k in range(50)]

    program(tf.ones([10]))
    before = engine.counters()["tensors"]
    for _ in range(3):
        results = program(tf.ones([10]))
        assert [float(each) for each in results] == [10.0 * k * engine.size() for k in range(50)]
    assert engine.counters()["tensors"] - before == 3 * 50


class Memory(ctypes.Structure):
    """Heap statistics of the C library: `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def bytes_in_use() -> int:
    """Return the bytes of the heap that are in use."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Memory
    return int(mallinfo().uordblks)


@on_op_ranks(2, spare(3))
def test_ten_thousand_calls_that_end_after_their_kernels_have_returned(size: int) -> None:
    """All calls but a step's first are submitted without waiting, and end on another thread. None is lost or leaks."""
    calls, runs, rounds = 100, 25, 4

    @tf.function(autograph=False)
    def program(x: Any) -> Any:
        return tf.stack([hvd.allreduce(x + k, op=engine.Sum, name=f"late {k}") for k in range(calls)])

    x, want = tf.zeros([]), np.arange(calls, dtype=np.float32) * size
    used, before = [], tensors()
    for _ in range(rounds):
        for _ in range(runs):
            found = program(x).numpy()
        np.testing.assert_array_equal(found, want)
        used.append(bytes_in_use())
    assert tensors() - before == rounds * runs * calls
    # A leak shows in every round; in one round TensorFlow may allocate something that it keeps.
    least = min(later - earlier for earlier, later in pairwise(used))
    assert least < runs * calls * 16, ("as much as the smallest piece of memory for each call", used)


def test_a_name_that_is_used_again(size: int) -> None:
    """The name occurs again in one graph and in its gradient, and in a function that is called twice."""

    @tf.function
    def direct(x: Any) -> Any:
        return tf.stack([hvd.allreduce(x * k, op=engine.Sum, name="again") for k in range(5)])

    @tf.function
    def inner(x: Any) -> Any:
        return hvd.allreduce(x, op=engine.Sum, name="called twice")

    @tf.function
    def nested(x: Any) -> Any:
        return tf.stack([inner(x), inner(x * 2)])

    x = tf.constant(1.0)
    for _ in range(3):
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = direct(x)
        assert results.numpy().tolist() == [size * k for k in range(5)]
        assert float(tape.gradient(results, x)) == size * 10
        assert nested(x).numpy().tolist() == [size, 2 * size]


@pytest.mark.parametrize("name", ["looped", None])
def test_iterations_of_a_loop_overlap(name: str | None, size: int) -> None:
    @tf.function
    def program(steps: Any) -> Any:
        def body(k: Any, total: Any) -> Any:
            return k + 1, total + hvd.allreduce(tf.cast(k, tf.float32), op=engine.Sum, name=name)

        return tf.while_loop(lambda k, _: k < steps, body, (0, 0.0), parallel_iterations=10)[1]

    assert float(program(tf.constant(100))) == size * sum(range(100))


@on_op_ranks(2, spare(3))
def test_a_call_without_a_name_is_refused_while_another_run_of_its_function_has_it_in_flight(
    rank: int, size: int
) -> None:
    @tf.function(autograph=False)
    def program(x: Any) -> Any:
        return hvd.allreduce(x, op=engine.Sum)

    ended: queue.Queue[str] = queue.Queue()

    def run() -> None:
        try:
            ended.put(str(float(program(tf.constant(1.0)))))
        except tf.errors.OpError as error:
            ended.put(error.message)

    program(tf.constant(1.0))
    threads = [threading.Thread(target=run) for _ in range(2 if rank == 0 else 0)]
    for thread in threads:
        thread.start()
    refused = ended.get(timeout=60) if rank == 0 else ""
    engine.barrier("one run was refused")
    if rank > 0:  # their runs follow each other, and match both the one in flight and the refused one
        run()
        run()
        one, other = ended.get(), ended.get()
    else:
        one, other = ended.get(timeout=60), refused
    for thread in threads:
        thread.join()
    assert one == f"{size}.0" and ("MismatchError" if rank else "runs several times at once") in other, (one, other)


def test_a_call_without_a_name_keeps_its_place_when_one_rank_traces_again(rank: int, size: int) -> None:
    traced = []

    @tf.function
    def program(x: Any) -> Any:
        traced.append(x.shape)
        return hvd.allreduce(tf.reduce_sum(x), op=engine.Sum), hvd.allreduce(tf.reduce_sum(x) * 10, op=engine.Sum)

    for step in range(4):
        rows = 3 if rank == 0 and step == 2 else 2
        one, ten = program(tf.ones([rows]))
        total = 2.0 * size + (rows == 3 or (step == 2 and rank != 0))
        assert (float(one), float(ten)) == (total, 10 * total)
    assert len(traced) == (2 if rank == 0 else 1)


def test_a_saved_function_works_after_loading() -> None:
    if not op.native:
        pytest.skip("calls of Python cannot be saved")

    class Module(tf.Module):  # type: ignore[misc]
        @tf.function(input_signature=[tf.TensorSpec([None])])
        def mean(self, x: Any) -> Any:
            return hvd.allreduce(x, name="saved")

    with tempfile.TemporaryDirectory() as path:
        tf.saved_model.save(Module(), path)
        loaded = tf.saved_model.load(path)
    assert loaded.mean(tf.ones([3])).numpy().tolist() == [1.0] * 3


def test_barriers_and_other_process_sets(rank: int, size: int) -> None:
    hvd.barrier()
    tf.function(hvd.barrier)()
    if size > 1:
        others = engine.add_process_set(range(1, size))
        if rank:
            for mode in MODES.values():
                result = mode(lambda x: hvd.allreduce(x, op=engine.Sum, process_set=others))(tf.constant(1.0))
                assert float(result) == size - 1
                part = mode(lambda x: hvd.reducescatter(x, op=engine.Sum, process_set=others))(tf.ones([size - 1]))
                assert part.numpy().tolist() == [size - 1]
                assert int(mode(hvd.size_op)(others.process_set_id)) == size - 1
        engine.remove_process_set(others)


def test_xla_is_refused_while_tracing() -> None:
    @tf.function(jit_compile=True)
    def program(x: Any) -> Any:
        return tf.function(hvd.allreduce)(x)

    with pytest.raises(Exception, match=r"EngineError: a collective cannot be compiled by XLA.*jit_compile=False"):
        program(tf.ones([2]))


def test_results_lie_in_their_inputs_memory_where_nobody_else_needs_it() -> None:
    """An input that is still read elsewhere stays unchanged."""

    @tf.function
    def program(x: Any) -> Any:
        y = x * 2.0
        first = hvd.allreduce(y, op=engine.Sum, name="in place")
        kept = hvd.allreduce(x, op=engine.Sum, name="kept")
        return first, kept, x

    x = tf.ones([1000])
    first, kept, same = program(x)
    assert set(first.numpy()) == {2.0 * engine.size()} and set(kept.numpy()) == {float(engine.size())}
    assert set(same.numpy()) == set(x.numpy()) == {1.0}


def test_numbers_of_rows_that_do_not_fit_are_refused() -> None:
    """Row counts are sent as int32: three billion rows of nothing would be a negative number."""
    if op.native:
        with pytest.raises(tf.errors.InvalidArgumentError, match="numbers of rows as int32"):
            hvd.allgather(tf.zeros([3_000_000_000, 0]))


def test_what_one_rank_cannot_submit_is_told_to_the_others_in_its_words(rank: int, size: int) -> None:
    splits = [1] * (size + 1 if rank == 0 else size)
    with pytest.raises((tf.errors.OpError, engine.errors.EngineError, ValueError)) as error:
        hvd.alltoall(tf.zeros([size]), splits=splits, name="divided")
    assert not op.native or f"splits says how many rows go to each of {size} ranks" in str(error.value), error.value
    assert hvd.allreduce(tf.ones(2), op=engine.Sum).numpy().tolist() == [size, size]


def test_splits_and_roots_that_are_no_whole_numbers_are_refused_on_all_ranks(rank: int, size: int) -> None:
    """A cast would truncate them: 1.9 rows would become 1."""
    wrong = ([1.9] * size, [1.0] * size, np.ones(size), tf.ones([size]), [True] * size, ["1"] * size, [])
    failures = (tf.errors.OpError, engine.errors.EngineError)
    for number, splits in enumerate(wrong):
        given = splits if rank == size - 1 else [1] * size
        with pytest.raises(failures, match="splits holds whole numbers, one for each rank"):
            hvd.alltoall(tf.zeros([size]), splits=given, name=f"splits {number}")
    for number, root in enumerate((0.7, 0.0, "0", np.float32(0), None)):
        with pytest.raises(failures, match="root_rank is a whole number, that of a rank"):
            hvd.broadcast(tf.zeros([size]), root if rank == size - 1 else 0, name=f"root {number}")
    assert hvd.alltoall(tf.zeros([size]), np.ones(size, np.uint8), name="small")[1].numpy().tolist() == [1] * size
