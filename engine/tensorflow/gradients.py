"""Gradients of collectives on TensorFlow's tensors, as defined in `engine.frameworks.backward`.

Ranks and sizes are evaluated when the program runs, since a traced function may outlive its world.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..collectives.reduce_ops import Average
from ..frameworks.backward import backward_name, choose_backward_op, expect_gradient
from . import op  # circular: it imports this module, too
from .call import Call


def differentiate_call(call: Call, inputs: Sequence[Any], rows: Any, gradients: Sequence[Any]) -> list[Any]:
    """Compute the gradients of a collective's inputs.

    `rows` is the number of rows of each tensor from each rank, for an allgather or all-to-all. A gradient is None for a
    result without one. Raises EngineError if the reduction has no gradient.
    """
    if call.kind == "allreduce":
        return differentiate_allreduce(call, gradients)
    if call.kind == "broadcast":
        return differentiate_broadcast(call, gradients)
    if call.kind == "reducescatter":
        return differentiate_reducescatter(call, inputs, gradients)
    if call.kind == "allgather":
        return differentiate_allgather(call, inputs, rows, gradients)
    return [differentiate_alltoall(call, inputs[0], rows, gradients[0])]


def differentiate_allreduce(call: Call, gradients: Sequence[Any]) -> list[Any]:
    """Reduce the gradients by the same operation: a sum for a sum over ranks, an average for an average."""
    expect_gradient(call.op, _name_function(call))
    return _apply_to_existing(lambda tensors: op.reduce(_backward(call), tensors), gradients)


def differentiate_broadcast(call: Call, gradients: Sequence[Any]) -> list[Any]:
    """Combine the gradients of all ranks' outputs for the root's input; the other ranks' inputs get zeros."""
    totals = _combine_gradients(call, gradients)
    is_root = tf.equal(op.read_rank_and_size(0)[0], call.root)
    return [None if each is None else tf.where(is_root, each, tf.zeros_like(each)) for each in totals]


def differentiate_allgather(call: Call, inputs: Sequence[Any], rows: Any, gradients: Sequence[Any]) -> list[Any]:
    """Combine the gradients of all ranks' outputs, and return the part for this rank's rows."""
    totals = _combine_gradients(call, gradients)
    rank, _ = op.read_rank_and_size(call.set)
    mine: list[Any] = []
    for k, (total, tensor) in enumerate(zip(totals, inputs, strict=True)):
        if total is None:
            mine.append(None)
            continue
        start = tf.reduce_sum(rows[k][:rank])
        own = total[start : start + rows[k][rank]]
        mine.append(tf.reshape(own, tf.shape(tensor)))
    return mine


def differentiate_alltoall(call: Call, tensor: Any, rows: Any, gradient: Any) -> Any:
    """Send the gradient of each row back to the rank that it came from. Rows that were not sent get zeros."""
    gradient = _to_dense(gradient)
    if gradient is None:
        return None
    sent, _ = op.exchange_rows(_backward(call), [gradient], tf.cast(rows[0], tf.int64))
    shape = tf.shape(tensor)
    kept = shape[0] - tf.shape(sent[0])[0]
    unsent = tf.zeros(tf.concat([[kept], shape[1:]], 0), gradient.dtype)
    return tf.reshape(tf.concat([sent[0], unsent], 0), shape)


def differentiate_reducescatter(call: Call, inputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Gather the gradient of each row from the rank that received it, for all ranks' inputs."""
    expect_gradient(call.op, _name_function(call))
    back = _backward(call)._replace(kind="allgather", op=Call("").op, wire=0, prescale=1.0, postscale=1.0)
    totals = _apply_to_existing(lambda tensors: op.exchange_rows(back, tensors)[0], gradients)
    return [
        None if total is None else tf.reshape(_scale_gradient(call, total), tf.shape(tensor))
        for total, tensor in zip(totals, inputs, strict=True)
    ]


def _scale_gradient(call: Call, total: Any) -> Any:
    """Scale the gradient of a reduce-scatter: Horovod's is the mathematical one times the number of ranks."""
    factor = call.prescale * call.postscale
    total = total if factor == 1.0 else total * tf.cast(factor, total.dtype)
    if (call.op is Average) is not call.mathematical:
        return total
    size = tf.cast(op.read_rank_and_size(call.set)[1], total.dtype)
    return total / size if call.mathematical else total * size


def _combine_gradients(call: Call, gradients: Sequence[Any]) -> list[Any]:
    """Combine the gradients of tensors on which all ranks' outputs depend: their sum, or Horovod's average."""
    back = _backward(call)._replace(kind="allreduce", op=choose_backward_op(call.mathematical), root=0)
    return _apply_to_existing(lambda tensors: op.reduce(back, tensors), gradients)


def _apply_to_existing(collective: Any, gradients: Sequence[Any]) -> list[Any]:
    """Apply a collective to the existing gradients; complex ones are sent as pairs of real numbers."""
    dense = [_to_dense(each) for each in gradients]
    members = [each for each in dense if each is not None]
    if not members:
        return dense
    sent = [
        tf.stack([tf.math.real(each), tf.math.imag(each)], -1) if each.dtype.is_complex else each for each in members
    ]
    results = iter(
        [
            tf.complex(result[..., 0], result[..., 1]) if each.dtype.is_complex else result
            for each, result in zip(members, collective(sent), strict=True)
        ]
    )
    return [None if each is None else next(results) for each in dense]


def _to_dense(gradient: Any) -> Any:
    """Return a gradient as a tensor; None if there is none, or if it is the zero gradient of integers."""
    if gradient is None:
        return None
    tensor = tf.convert_to_tensor(gradient)
    return tensor if tensor.dtype.is_floating or tensor.dtype.is_complex else None


def _backward(call: Call) -> Call:
    return call._replace(name=backward_name(call.name), optimizer=-1, backward=True)


def _name_function(call: Call) -> str:
    return f"grouped_{call.kind}" if call.group else call.kind
