"""The collectives that TensorFlow's programs consist of: native ops, or Python where these cannot be.

The native ops (engine_ext/bindings/tensorflow_op.c) are asynchronous kernels that TensorFlow's C API registers. In a
graph they hold no thread, and those with a name run beside each other in any order. Those without a name meet the other
ranks' by their number, so they run in the order of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ..errors import EngineError
from . import fallback
from .call import Call


def reduce(call: Call, tensors: Sequence[Any]) -> list[Any]:
    """Submit an allreduce, reduce-scatter, broadcast or barrier. Gradients flow through it.

    Parameters
    ----------
    call : Call
    tensors : sequence of tf.Tensor
        One, or with `call.group` any number; of a barrier none.

    Returns
    -------
    list of tf.Tensor

    Raises
    ------
    tf.errors.OpError
        In eager mode, or when the graph runs: what the engine has refused, or why it failed.
    """
    return _through_python(call, tensors, None)[0]


def gather(call: Call, tensors: Sequence[Any], splits: Any = None) -> tuple[list[Any], Any]:
    """Submit an allgather, or an all-to-all with `splits` (int64). Gradients flow through it.

    Parameters and errors as of `reduce`.

    Returns
    -------
    results : list of tf.Tensor
    rows : tf.Tensor
        How many rows of each tensor came from each rank; int32, of shape (tensors, ranks).
    """
    return _through_python(call, tensors, splits)


def place(number: int) -> tuple[Any, Any]:
    """This rank's number in a process set, and how many ranks that has: int32, asked whenever the program runs."""
    return fallback.place(number)


def expect_no_xla() -> None:
    """Raise EngineError while a function is traced that XLA is to compile, in which no collective can run."""
    from tensorflow.python.ops import control_flow_util

    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise EngineError(
            "a collective cannot be compiled by XLA: use tf.function(jit_compile=False), and model.compile("
            "jit_compile=False) with Keras, for the function that communicates; what it calls may be compiled"
        )


def _through_python(call: Call, tensors: Sequence[Any], splits: Any) -> tuple[list[Any], Any]:
    """A collective by Python, with its gradient."""
    from . import gradients

    if not tf.executing_eagerly():
        expect_no_xla()
    if call.kind == "barrier":
        return fallback.reduce(call, []), None
    count = len(tensors)
    gathers = call.kind in ("allgather", "alltoall")

    @tf.custom_gradient
    def run(*inputs: Any) -> tuple[Any, Callable[..., Any]]:
        if not gathers:
            results, rows = fallback.reduce(call, inputs), None
        else:
            results, rows = fallback.gather(call, inputs, splits)
        _tell_shapes(call, inputs, results, rows)

        def gradient(*outputs: Any) -> Any:
            if call.kind == "allreduce":
                return gradients.of_allreduce(call, outputs)
            if call.kind == "broadcast":
                return gradients.of_broadcast(call, outputs)
            if call.kind == "reducescatter":
                return gradients.of_reducescatter(call, inputs, outputs)
            if call.kind == "allgather":
                return gradients.of_allgather(call, inputs, rows, outputs[:count])
            return gradients.of_alltoall(call, inputs[0], rows, outputs[0])

        return tuple(results) if rows is None else (*results, rows), gradient

    outputs = run(*tensors)
    return (list(outputs[:count]), outputs[count]) if gathers else (list(outputs), None)


def _tell_shapes(call: Call, tensors: Sequence[Any], results: Sequence[Any], rows: Any) -> None:
    """Tell the tracing program what is known of the results' shapes."""
    if tf.executing_eagerly():
        return
    for tensor, result in zip(tensors, results, strict=True):
        shape = tensor.shape
        if call.kind in ("allgather", "alltoall", "reducescatter") and shape.rank is not None:
            shape = tf.TensorShape([None, *shape[1:]])
        result.set_shape(shape)
    if rows is not None:
        rows.set_shape([len(results), None])
