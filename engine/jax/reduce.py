"""Reduction of the gradients of one step over all ranks in one grouped call, for `distributed` and Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import numpy as jnp

from ..collectives.compression import resolve
from ..frameworks.options import ReductionOptions
from .primitive import ALLREDUCE, CallSettings


def reduce_arrays(arrays: Sequence[Any], name: str, options: ReductionOptions, number: int) -> list[Any]:
    """Reduce arrays over the ranks in one call, compiled or not. Collective.

    `name` is equal on all ranks. `number` is that of the optimizer whose step this completes; -1: none. Options `op`,
    `process_set`, `compression`, `prescale` and `postscale` are used.
    """
    wire, own = resolve(options.compression, options.op)
    pairs = [(array, None) if own is None else own.compress(array) for array in arrays]
    settings = CallSettings(
        options.process_set,
        options.op,
        options.prescale,
        options.postscale,
        wire,
        grouped=True,
        optimizer=number,
    )
    results = ALLREDUCE([jnp.asarray(sent) for sent, _ in pairs], name, settings)
    if own is None:
        return results
    return [own.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
