"""Reduction of `tf.IndexedSlices`: their rows are gathered, and added up on every rank.

Each rank first adds up its duplicate rows, so that a row of an embedding that a batch looks up a thousand times is sent
once. Indices and values are sent as one group.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..collectives.compression import resolve
from ..collectives.failures import announce_failure
from ..collectives.process_sets import ProcessSet
from ..collectives.reduce_ops import Average, Op, Sum
from ..errors import UnsupportedOperationError
from . import op as _op
from .call import Call


def allreduce(
    slices: Any,
    op: Op,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: Any = None,
    optimizer: int = -1,
) -> Any:
    """Add up, or average, `tf.IndexedSlices` over all ranks. Collective.

    The rows and their number may differ by rank; dtypes and the shape of a row may not. An average divides every row by
    the number of ranks. `compression` is of the values, sent as float16 or bfloat16 with `Compression.fp16` and `bf16`;
    any `op` but `Sum` and `Average` raises UnsupportedOperationError. `optimizer` is that of `Call`.

    The result has no duplicate rows and is equal on all ranks. An average of integers has floats, as in Horovod:
    float32 for integers of 8 and 16 bits, float64 for wider ones.
    """
    try:
        if op not in (Sum, Average):
            raise UnsupportedOperationError(
                f"tf.IndexedSlices support only Sum and Average, not {op.name.title()}; make them dense by "
                "tf.convert_to_tensor"
            )
        wire, own = resolve(compression, op)
        number = process_set.call_number
    except Exception as error:
        announce_failure(process_set, "allgather", name, error)
        raise
    values = tf.convert_to_tensor(slices.values)
    if op is Average and values.dtype.is_integer:
        values = tf.cast(values, tf.float32 if values.dtype.size < 4 else tf.float64)
    dtype = values.dtype
    indices, values = _add_equal_rows(tf.convert_to_tensor(slices.indices), values)
    values = _multiply_values(values, prescale)
    context = None
    if own is not None:
        values, context = own.compress(values)
    if wire in ("float16", "bfloat16") and slices.values.dtype in (tf.float32, tf.float64):
        values = tf.cast(values, wire)
    call = Call("allgather", name, number, group=True, optimizer=optimizer)
    (indices, values), rows = _op.exchange_rows(call, [indices, values])
    if values.dtype != dtype and own is None:
        values = tf.cast(values, dtype)
    if own is not None:
        values = own.decompress(values, context)
    indices, values = _add_equal_rows(indices, values)
    if op is Average:
        values = values / tf.cast(tf.shape(rows)[1], values.dtype)
    return tf.IndexedSlices(_multiply_values(values, postscale), indices, slices.dense_shape)


def _add_equal_rows(indices: Any, values: Any) -> tuple[Any, Any]:
    """Add up rows with equal indices, in the order of their first occurrence. Half precision is added in float32."""
    distinct, places = tf.unique(indices)
    wide = tf.float32 if values.dtype in (tf.float16, tf.bfloat16) else values.dtype
    total = tf.math.unsorted_segment_sum(tf.cast(values, wide), places, tf.size(distinct))
    return distinct, tf.cast(total, values.dtype)


def _multiply_values(values: Any, factor: float) -> Any:
    if factor == 1.0:
        return values
    if values.dtype.is_integer:  # A factor of 0.5 would become 0 as an integer.
        return tf.saturate_cast(tf.cast(values, tf.float64) * factor, values.dtype)
    return values * tf.cast(factor, values.dtype)
