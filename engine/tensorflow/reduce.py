"""Reduction of the gradients of one step over all ranks, for optimizers and tapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ..collectives.compression import resolve
from ..collectives.reduce_ops import Adasum
from ..frameworks.agreement import columns_of_absent, order_suffix
from ..frameworks.options import ReductionOptions
from . import op as _op
from . import sparse
from .call import WIRES, Call

BUCKET_BYTES = 4 << 20
"""Size in bytes at which a bucket of gradients ends. Smaller buckets start earlier, larger ones cost less."""


@tf.autograph.experimental.do_not_convert
def reduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    options: ReductionOptions,
    *,
    prefix: str = "gradient.",
    num_groups: int = 0,
    groups: Sequence[Sequence[int]] | None = None,
    optimizer: int = -1,
) -> list[Any]:
    """Reduce the gradients of one step over all ranks. Collective, in eager mode and in a graph.

    In eager mode all dense gradients are sent in one request. In a graph they are sent in buckets, those of the last
    variables first, each as soon as it is complete, while the others are still being computed.

    A gradient that is None is so on all ranks, which compare it. Names are unique, and equal and in the same order on
    all ranks. Options `op`, `process_set`, `compression`, `prescale`, `postscale` and `sparse_as_dense` are used.
    `num_groups` is the number of buckets with equally many gradients; 0: the default buckets. `groups` has the indices
    of the gradients in each bucket; each other gradient is a bucket of its own. `optimizer` is the number of the
    optimizer whose step this is, for the tuner; -1: none.

    Results are in the order of `gradients`; unchanged on a rank that is not in the process set.
    """
    results = list(gradients)
    if not options.process_set.included():
        return results
    if options.sparse_as_dense:
        results = [tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in results]
    sparse_ones = [k for k, each in enumerate(results) if isinstance(each, tf.IndexedSlices)]
    others = [k for k in range(len(results)) if k not in set(sparse_ones)]
    # The limits and names of buckets do not depend on which of their gradients exist.
    buckets = [
        bucket
        for bucket in _divide_into_buckets(others, results, num_groups, groups)
        if any(results[k] is not None for k in bucket)
    ]
    _, own = resolve(options.compression, options.op)
    for k in reversed(sparse_ones):
        ends = optimizer if not buckets and k == sparse_ones[0] else -1
        results[k] = sparse.allreduce(
            results[k],
            options.op,
            prefix + names[k],
            options.prescale,
            options.postscale,
            options.process_set,
            options.compression,
            ends,
        )
    for bucket in buckets:
        present = [k for k in bucket if results[k] is not None]
        sent = [results[k] for k in present]
        contexts = []
        if own is not None:
            sent, contexts = map(list, zip(*(own.compress(each) for each in sent), strict=True))
        if len(present) < len(bucket):
            sent.append(tf.zeros([0, columns_of_absent([names[k] for k in bucket if results[k] is None])]))
        more = f"+{len(bucket) - 1}{order_suffix([names[k] for k in bucket])}" if len(bucket) > 1 else ""
        call = _make_call(options, f"{prefix}{names[bucket[0]]}{more}", len(buckets) > 1)
        if bucket is buckets[-1]:
            call = call._replace(optimizer=optimizer)
        reduced = _op.reduce(call, sent)[: len(present)]
        if own is not None:
            reduced = [own.decompress(each, context) for each, context in zip(reduced, contexts, strict=True)]
        for k, result in zip(present, reduced, strict=True):
            results[k] = result
    return results


def _make_call(options: ReductionOptions, name: str, overlaps: bool) -> Call:
    wire, _ = resolve(options.compression, options.op)
    return Call(
        "allreduce",
        name,
        options.process_set.call_number,
        options.op,
        0 if options.op is Adasum else WIRES[wire],
        options.prescale,
        options.postscale,
        group=True,
        overlaps=overlaps,
    )


def _divide_into_buckets(
    others: list[int], gradients: Sequence[Any], num_groups: int, groups: Sequence[Sequence[int]] | None
) -> list[list[int]]:
    """Divide the indices of the gradients that are not sparse into buckets, in the order of their submission."""
    if not others:
        return []
    if groups is not None:
        known = set(others)
        chosen = [sorted(known.intersection(group)) for group in groups]  # in the same order on all ranks
        rest = known.difference(*chosen)
        return sorted([*filter(None, chosen), *([k] for k in rest)], key=max, reverse=True)
    if num_groups:
        count = min(num_groups, len(others))
        starts = [len(others) * part // count for part in range(count + 1)]
        return [others[starts[part] : starts[part + 1]] for part in reversed(range(count))]
    if tf.executing_eagerly() or _op.blocks_thread():
        return [others]
    return _by_size(others, lambda k: _count_bytes(gradients[k]))


def _by_size(others: list[int], size: Callable[[int], int]) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    filled = 0
    for k in reversed(others):
        if filled >= BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(k)
        filled += size(k)
    return buckets


def _count_bytes(gradient: Any) -> int:
    """Return the size of a gradient in bytes, as far as its shape is known while the program is traced."""
    if gradient is None:
        return 0
    return int(gradient.shape.num_elements() or 0) * int(gradient.dtype.size)
