"""Collectives on TensorFlow's tensors, with Horovod's names, argument order and defaults.

They work in eager mode and in `tf.function`, and gradients flow through them: Horovod's, or the mathematical ones. See
`engine.tensorflow.gradients`, and docs/explanation/collective-gradients.md for a table of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ..collectives.failures import ROOT, SPLITS, announce_failure, whole_numbers
from ..collectives.process_sets import ProcessSet
from ..collectives.reduce_ops import Adasum, Op
from ..errors import ArgumentError, UnsupportedTensorError
from ..frameworks.backward import are_mathematical
from ..frameworks.surface import Tensors, make_functions
from . import adapter as _adapter  # noqa: F401  (registers tf.Tensor)
from . import op as _op
from . import sparse
from .call import WIRES, Call

# Parameters of each function in the order of `horovod.tensorflow`.
ORDERS = {
    "allreduce": (
        "tensor average device_dense device_sparse compression op prescale_factor postscale_factor name process_set "
        "ignore_name_scope"
    ),
    "grouped_allreduce": (
        "tensors average device_dense device_sparse compression op prescale_factor postscale_factor process_set name"
    ),
    "reducescatter": ("tensor device_dense compression op=Average name process_set prescale_factor postscale_factor"),
    "grouped_reducescatter": (
        "tensors device_dense compression op=Average process_set prescale_factor postscale_factor name"
    ),
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
}


def _make_call(kind: str, name: str | None, process_set: ProcessSet, tensors: Sequence[Any], **settings: Any) -> Call:
    """Make the description of a call; a failure is announced to the other ranks."""
    try:
        if name is not None and not name:
            raise ArgumentError(
                "the name is empty; give one character or more, or leave the name out to match calls by their order"
            )
        for tensor in tensors:
            if not tensor.dtype.is_numpy_compatible or tensor.dtype == tf.string:
                raise UnsupportedTensorError(f"a tensor of dtype {tensor.dtype.name} cannot be communicated: encode it")
        number = process_set.call_number
    except Exception as error:
        announce_failure(process_set, kind, name, error)
        raise
    return Call(kind, name, number, mathematical=are_mathematical(), **settings)


def _run_reduction(
    kind: str,
    group: bool,
    tensors: Sequence[Any],
    op: Op,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: Any = None,
) -> list[Any]:
    wire = 0 if op is Adasum else WIRES[getattr(compression, "wire", None)]
    settings = {"op": op, "wire": wire, "prescale": float(prescale), "postscale": float(postscale), "group": group}
    return _op.reduce(_make_call(kind, name, process_set, tensors, **settings), tensors)


def _allreduce(tensor: Any, *settings: Any) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        return sparse.allreduce(tensor, *settings)
    return _run_reduction("allreduce", False, [tensor], *settings)[0]


def _grouped_allreduce(tensors: Sequence[Any], op: Op, name: str | None, *settings: Any) -> list[Any]:
    dense = [k for k, each in enumerate(tensors) if not isinstance(each, tf.IndexedSlices)]
    results = list(tensors)
    for k, each in enumerate(tensors):
        if isinstance(each, tf.IndexedSlices):
            results[k] = sparse.allreduce(each, op, None if name is None else f"{name}.{k}", *settings)
    if dense or not tensors:
        reduced = _run_reduction("allreduce", True, [tensors[k] for k in dense], op, name, *settings)
        for k, result in zip(dense, reduced, strict=True):
            results[k] = result
    return results


def _reducescatter(tensor: Any, *settings: Any) -> Any:
    return _run_reduction("reducescatter", False, [tensor], *settings)[0]


def _allgather(tensor: Any, name: str | None, process_set: ProcessSet) -> Any:
    return _op.exchange_rows(_make_call("allgather", name, process_set, [tensor]), [tensor])[0][0]


def _grouped_allgather(tensors: Sequence[Any], name: str | None, process_set: ProcessSet) -> list[Any]:
    return _op.exchange_rows(_make_call("allgather", name, process_set, tensors, group=True), tensors)[0]


def _broadcast(tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    (root,) = whole_numbers([root_rank], ROOT, process_set, "broadcast", name)
    return _op.reduce(_make_call("broadcast", name, process_set, [tensor], root=root), [tensor])[0]


def _alltoall(tensor: Any, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
    call = _make_call("alltoall", name, process_set, [tensor])
    if splits is None:
        return _op.exchange_rows(call, [tensor], tf.zeros([0], tf.int64))[0][0]
    results, rows = _op.exchange_rows(call, [tensor], _convert_splits(splits, process_set, name))
    return results[0], rows[0]


def _convert_splits(splits: Any, process_set: ProcessSet, name: str | None) -> Any:
    """Convert splits to a tensor of int64, but refuse floats and empty splits.

    `tf.cast` would truncate floats, and the ops interpret empty splits as equal shares.
    """
    try:
        counts = tf.convert_to_tensor(splits)
        if counts.shape.num_elements() == 0:
            raise ArgumentError(f"{SPLITS}, and there are none; leave splits out to send each rank as many rows")
        if not counts.dtype.is_integer:
            raise UnsupportedTensorError(f"{SPLITS}, and these are {counts.dtype.name}")
    except Exception as error:
        announce_failure(process_set, "alltoall", name, error)
        raise
    return tf.cast(counts, tf.int64)


_CALLS = {
    "allreduce": _allreduce,
    "grouped_allreduce": _grouped_allreduce,
    "reducescatter": _reducescatter,
    "grouped_reducescatter": partial(_run_reduction, "reducescatter", True),
    "allgather": _allgather,
    "grouped_allgather": _grouped_allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
}


def _to_tensor(value: Any) -> Any:
    """Convert variables, arrays, numbers, and lists of these to a tensor; return other values unchanged."""
    if isinstance(value, tf.Variable | np.ndarray | np.generic | bool | int | float | complex | list | tuple):
        return tf.convert_to_tensor(value)
    if isinstance(getattr(value, "value", None), tf.Variable):  # a variable of Keras
        return tf.convert_to_tensor(value.value)
    return value


_KINDS: Any = (tf.Tensor, tf.IndexedSlices)
globals().update(
    {
        # AutoGraph would needlessly convert the functions that these call.
        name: tf.autograph.experimental.do_not_convert(function)
        for name, function in make_functions(__name__, Tensors(_KINDS, "tf.Tensor", _CALLS, _to_tensor), ORDERS).items()
    }
)
