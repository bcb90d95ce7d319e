"""Fallback collectives on TensorFlow's tensors in Python, for programs that cannot use the native ops.

In eager mode they are the engine's own. In a graph `tf.numpy_function` calls them one after the other, in the order of
the program. Each needs the GIL, and holds a thread of TensorFlow until it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from ..collectives import collectives, groups
from ..collectives.compression import MARKERS
from ..collectives.process_sets import ProcessSet
from ..errors import EngineError
from ..session import runtime
from . import order
from .call import WIRES, Call

_WIRE_NAMES = {number: name for name, number in WIRES.items()}


def reduce(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """Run an allreduce, reduce-scatter, broadcast or barrier, and return its results; a barrier has none."""
    if tf.executing_eagerly():
        return _reduce(call, tensors)

    def run(*arrays: Any) -> list[Any]:
        with context.eager_mode():  # With TensorFlow 1 behaviour, a tensor would otherwise be a graph node here, too.
            values = [tf.convert_to_tensor(array) for array in arrays]
            return [np.asarray(each) for each in _reduce(call, values, judged=False)]

    return _in_graph(run, tensors, [each.dtype for each in tensors])


def exchange_rows(call: Call, tensors: Sequence[Any], splits: Any = None) -> tuple[list[Any], Any]:
    """Run an allgather or all-to-all; return its results, and for each the number of rows from each rank (int32)."""
    given = [] if splits is None else [splits]
    if tf.executing_eagerly():
        results, rows = _exchange_eagerly(call, tensors, *given)
        return results, tf.constant(rows, tf.int32)

    def run(*arrays: Any) -> list[Any]:
        with context.eager_mode():
            values = [tf.convert_to_tensor(array) for array in arrays]
            sizes = values[-1] if given else None
            results, rows = _exchange_eagerly(call, values[: len(tensors)], sizes, judged=False)
            return [*(np.asarray(each) for each in results), np.array(rows, np.int32)]

    *results, rows = _in_graph(run, [*tensors, *given], [*(each.dtype for each in tensors), tf.int32])
    return results, rows


def read_rank_and_size(number: int) -> tuple[Any, Any]:
    """Return this rank's number in a process set and the set's size (int32), evaluated when the program runs."""

    def run() -> list[Any]:
        process_set = runtime.called_set(number)
        return [np.int32(process_set.engine.rank), np.int32(process_set.size())]

    if tf.executing_eagerly():
        rank, size = run()
        return tf.constant(rank), tf.constant(size)
    rank, size = tf.numpy_function(run, [], [tf.int32, tf.int32])
    return tf.ensure_shape(rank, []), tf.ensure_shape(size, [])


def _in_graph(run: Any, inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    if order.is_called(tf.compat.v1.get_default_graph()):
        raise EngineError(
            "calls of Python have no order in the gradient of a function that another function calls: take the "
            "gradient inside of the outer function, or have native ops (ENGINE_TENSORFLOW_NATIVE=1)"
        )
    with order.after_the_last():
        results = tf.numpy_function(run, list(inputs), list(dtypes))
    order.keep_in_order(results[0].op if dtypes else results)  # Without outputs the result is the operation itself.
    return list(results) if dtypes else []


def _reduce(call: Call, tensors: Sequence[Any], judged: bool = True) -> list[Any]:
    process_set = runtime.called_set(call.set)
    if call.kind == "barrier":
        collectives.barrier(call.name, process_set)
        return []
    if call.kind == "broadcast":
        return [collectives.broadcast(tensors[0], call.root, call.name, process_set)]
    compression = MARKERS[_WIRE_NAMES[call.wire]]
    settings = call.op, call.name, call.prescale, call.postscale, process_set, compression
    if call.group:
        run = groups.grouped_allreduce if call.kind == "allreduce" else groups.grouped_reducescatter
        results = run(tensors, *settings)
    else:
        single = collectives.allreduce if call.kind == "allreduce" else collectives.reducescatter
        results = [single(tensors[0], *settings)]
    _mark_step(call, process_set, judged)
    return results


def _exchange_eagerly(
    call: Call, tensors: Sequence[Any], splits: Any = None, judged: bool = True
) -> tuple[list[Any], list[Any]]:
    process_set = runtime.called_set(call.set)
    if call.kind == "alltoall":
        sent = None if splits is None or not len(splits) else splits
        handle = collectives.alltoall_async(tensors[0], sent, call.name, process_set)
        result = handle.wait()
        return [result if sent is None else result[0]], [handle.rows]
    if not call.group:
        handle = collectives.allgather_async(tensors[0], call.name, process_set)
        return [handle.wait()], [handle.rows]
    gathering = groups.grouped_allgather_async(tensors, call.name, process_set)
    results = gathering.wait()
    _mark_step(call, process_set, judged)
    return list(results), gathering.rows


def _mark_step(call: Call, process_set: ProcessSet, judged: bool) -> None:
    """Mark the end of a step; it is judged unless a graph runs it, on a thread that TensorFlow has lent."""
    if call.optimizer >= 0:
        process_set.engine.mark_step(call.optimizer, judged)
