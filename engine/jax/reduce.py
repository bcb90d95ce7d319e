"""The gradients of one step over all ranks, in one grouped call: what `distributed` and Keras call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import numpy as jnp

from ..compression import resolve
from ..frameworks.options import Options
from .primitive import ALLREDUCE, Settings


def reduce_arrays(arrays: Sequence[Any], name: str, options: Options, number: int) -> list[Any]:
    """Reduce arrays over the ranks in one call, compiled or not. Collective.

    Parameters
    ----------
    arrays : sequence of jax.Array
    name : str
        Equal on all ranks.
    options : Options
        Of these `op`, `process_set`, `compression`, `prescale` and `postscale`.
    number : int
        Of the optimizer, a step of which ends with this; -1: of none.

    Returns
    -------
    list of jax.Array
    """
    wire, own = resolve(options.compression, options.op)
    pairs = [(array, None) if own is None else own.compress(array) for array in arrays]
    settings = Settings(
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
