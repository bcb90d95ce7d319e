"""The gradients of collectives on TensorFlow's tensors, as `engine.frameworks.backward` tells which they are.

Ranks and sizes are asked when the program runs: a traced function outlives the world that it was traced in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..frameworks.backward import backward_name, combining, expect_gradient
from ..types import Average
from . import op  # which imports this module in its turn
from .call import Call


def of(call: Call, inputs: Sequence[Any], rows: Any, gradients: Sequence[Any]) -> list[Any]:
    """The gradients of a collective's inputs.

    Parameters
    ----------
    call : Call
    inputs : sequence of tf.Tensor
    rows : tf.Tensor or None
        Of an allgather or all-to-all: how many rows of each tensor came from each rank.
    gradients : sequence
        Of its results; None where there is none.

    Raises
    ------
    EngineError
        A reduction that has no gradient.
    """
    if call.kind == "allreduce":
        return of_allreduce(call, gradients)
    if call.kind == "broadcast":
        return of_broadcast(call, gradients)
    if call.kind == "reducescatter":
        return of_reducescatter(call, inputs, gradients)
    if call.kind == "allgather":
        return of_allgather(call, inputs, rows, gradients)
    return [of_alltoall(call, inputs[0], rows, gradients[0])]


def of_allreduce(call: Call, gradients: Sequence[Any]) -> list[Any]:
    """The gradient of a sum over ranks is the sum of the gradients; of an average, their average."""
    expect_gradient(call.op, _function(call))
    return _apart(lambda tensors: op.reduce(_backward(call), tensors), gradients)


def of_broadcast(call: Call, gradients: Sequence[Any]) -> list[Any]:
    """Every rank's output is the root's input, whose gradient combines those of all; the others' have zeros."""
    totals = _combined(call, gradients)
    is_root = tf.equal(op.place(0)[0], call.root)
    return [None if each is None else tf.where(is_root, each, tf.zeros_like(each)) for each in totals]


def of_allgather(call: Call, inputs: Sequence[Any], rows: Any, gradients: Sequence[Any]) -> list[Any]:
    """Every rank's output holds this rank's rows: their gradient combines what all ranks ask of these."""
    totals = _combined(call, gradients)
    rank, _ = op.place(call.set)
    mine: list[Any] = []
    for k, (total, tensor) in enumerate(zip(totals, inputs, strict=True)):
        if total is None:
            mine.append(None)
            continue
        start = tf.reduce_sum(rows[k][:rank])
        own = total[start : start + rows[k][rank]]
        mine.append(tf.reshape(own, tf.shape(tensor)))
    return mine


def of_alltoall(call: Call, tensor: Any, rows: Any, gradient: Any) -> Any:
    """The gradient travels back the way that the rows came. Rows that were not sent have zeros."""
    gradient = _dense(gradient)
    if gradient is None:
        return None
    sent, _ = op.gather(_backward(call), [gradient], tf.cast(rows[0], tf.int64))
    shape = tf.shape(tensor)
    kept = shape[0] - tf.shape(sent[0])[0]
    unsent = tf.zeros(tf.concat([[kept], shape[1:]], 0), gradient.dtype)
    return tf.reshape(tf.concat([sent[0], unsent], 0), shape)


def of_reducescatter(call: Call, inputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Each row went to one rank: all ranks' inputs get the gradient from there."""
    expect_gradient(call.op, _function(call))
    back = _backward(call)._replace(kind="allgather", op=Call("").op, wire=0, prescale=1.0, postscale=1.0)
    totals = _apart(lambda tensors: op.gather(back, tensors)[0], gradients)
    return [
        None if total is None else tf.reshape(_scaled(call, total), tf.shape(tensor))
        for total, tensor in zip(totals, inputs, strict=True)
    ]


def _scaled(call: Call, total: Any) -> Any:
    """The gradient of a reduce-scatter: Horovod's is the mathematical one times the ranks."""
    factor = call.prescale * call.postscale
    total = total if factor == 1.0 else total * tf.cast(factor, total.dtype)
    if (call.op is Average) is not call.mathematical:
        return total
    size = tf.cast(op.place(call.set)[1], total.dtype)
    return total / size if call.mathematical else total * size


def _combined(call: Call, gradients: Sequence[Any]) -> list[Any]:
    """The gradients of tensors that all ranks' outputs depend on: their sum over ranks, or Horovod's average."""
    back = _backward(call)._replace(kind="allreduce", op=combining(call.mathematical), root=0)
    return _apart(lambda tensors: op.reduce(back, tensors), gradients)


def _apart(collective: Any, gradients: Sequence[Any]) -> list[Any]:
    """What a collective makes of those gradients that there are; complex ones travel as pairs of real numbers."""
    dense = [_dense(each) for each in gradients]
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


def _dense(gradient: Any) -> Any:
    """A gradient as a tensor, or None if there is none: of integers TensorFlow passes none, or zeros."""
    if gradient is None:
        return None
    tensor = tf.convert_to_tensor(gradient)
    return tensor if tensor.dtype.is_floating or tensor.dtype.is_complex else None


def _backward(call: Call) -> Call:
    return call._replace(name=backward_name(call.name), optimizer=-1, backward=True)


def _function(call: Call) -> str:
    return f"grouped_{call.kind}" if call.group else call.kind
