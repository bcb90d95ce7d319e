"""Collectives on arrays of JAX, which run at once on arrays, and can be traced by `jit`, `grad`, `vmap` and others.

Inside `jit`, `scan`, `while_loop` and `cond` each call needs a unique name, and shapes are fixed: an allgather takes
the same number of rows from each rank, and an all-to-all has no splits. docs/frameworks.md has more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import jax
import numpy as np

from ..collectives.failures import ROOT, SPLITS, whole_numbers
from ..collectives.process_sets import ProcessSet
from ..collectives.reduce_ops import Op
from ..frameworks.backward import are_mathematical
from ..frameworks.surface import Tensors, make_functions
from . import adapter as _adapter  # noqa: F401  (registers jax.Array)
from .primitive import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER, Collective, Settings

ORDERS = {
    "allreduce": "tensor op=Average name compression prescale_factor postscale_factor process_set",
    "grouped_allreduce": "tensors op=Average name compression prescale_factor postscale_factor process_set",
    "broadcast": "tensor root_rank name process_set",
    "allgather": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "alltoall": "tensor splits name process_set",
    "reducescatter": "tensor op=Average name compression prescale_factor postscale_factor process_set",
    "grouped_reducescatter": "tensors op=Average name compression prescale_factor postscale_factor process_set",
}

_NAMED = """    name : str, optional
        Equal on all ranks. Needed inside `jit` and control flow, where each call has a name of its own.
    process_set : ProcessSet, optional
        Whose ranks take part."""
_REDUCED = f"""    op : Op, optional
        `Average` by default.
{_NAMED}
    compression : optional
        `Compression.none`, `fp16`, `bf16` or `tuned`, or a compressor of one's own. See `engine.Compressor`.
    prescale_factor, postscale_factor : float, optional
        Multiply the inputs, and the result."""
_RAISES = """    Raises
    ------
    EngineError
        As for the function of the same name in `engine`. In a compiled program it is `jax.errors.JaxRuntimeError` with
        the same text: `engine.errors.of` gives the engine's.
    """

DOCUMENTATION = {
    "allreduce": f"""Combine an array over all ranks. Collective.

    Parameters
    ----------
    tensor : jax.Array
        Of equal shape and dtype on all ranks; the dtypes of `engine.allreduce`.
{_REDUCED}

    Returns
    -------
    jax.Array
        Of the input's dtype and shape. Gradients flow through it with `Sum`, `Average` and `Adasum`: the same reduction
        of the ranks' gradients. `vmap` makes one collective of it.

{_RAISES}""",
    "grouped_allreduce": f"""Combine several arrays over all ranks in one request. Collective.

    Parameters
    ----------
    tensors : sequence of jax.Array
        As for `allreduce`, of any dtypes; equally many on all ranks, in one order.
{_REDUCED}

    Returns
    -------
    list of jax.Array
        As from `allreduce`.

{_RAISES}""",
    "broadcast": f"""A new array with the values of the root's. Collective.

    Parameters
    ----------
    tensor : jax.Array
        Of equal shape and dtype on all ranks.
    root_rank : int
        Whose values, by its rank in the world.
{_NAMED}

    Returns
    -------
    jax.Array
        Gradients flow back to the root: their average over ranks; their sum with `mathematical_gradients`.

{_RAISES}""",
    "allgather": f"""Concatenate the arrays of all ranks along the first dimension, in rank order. Collective.

    Parameters
    ----------
    tensor : jax.Array
        Of equal dtype and shape on all ranks, except that the first dimension may differ outside of compiled programs.
        An array without dimensions counts as one row.
{_NAMED}

    Returns
    -------
    jax.Array
        Equal on all ranks. Gradients flow through it: those of this rank's rows, averaged over ranks; summed with
        `mathematical_gradients`.

{_RAISES}""",
    "grouped_allgather": f"""Concatenate several arrays over all ranks in one request. Collective.

    Parameters
    ----------
    tensors : sequence of jax.Array
        As for `allgather`, of any dtypes; equally many on all ranks, in one order.
{_NAMED}

    Returns
    -------
    list of jax.Array
        As from `allgather`.

{_RAISES}""",
    "alltoall": f"""Send some rows to each rank, and receive what each has for this one. Collective.

    Parameters
    ----------
    tensor : jax.Array
        The rows for rank 0, then those for rank 1, and so on. Of equal dtype and shape on all ranks, except that the
        first dimension may differ outside of compiled programs.
    splits : sequence of int, optional
        How many rows go to each rank; by default equally many. Not in compiled programs.
{_NAMED}

    Returns
    -------
    jax.Array, or pair of jax.Array
        The rows received, in rank order; with `splits` also how many came from each rank, int32. Gradients flow back
        the way the rows came.

{_RAISES}""",
    "reducescatter": f"""Combine an array over all ranks, and keep this rank's share of the rows. Collective.

    Parameters
    ----------
    tensor : jax.Array
        Of at least one dimension; otherwise as for `allreduce`.
{_REDUCED}

    Returns
    -------
    jax.Array
        The rows are divided in rank order; where they do not divide evenly, the first ranks have one more. Gradients
        flow through it with `Sum` and `Average`: each row's from the rank that it went to, with `Sum` multiplied by the
        number of ranks. With `mathematical_gradients` both are divided by that.

{_RAISES}""",
    "grouped_reducescatter": f"""Combine several arrays in one request, and keep this rank's rows of each. Collective.

    Parameters
    ----------
    tensors : sequence of jax.Array
        As for `reducescatter`, of any dtypes; equally many on all ranks, in one order.
{_REDUCED}

    Returns
    -------
    list of jax.Array
        As from `reducescatter`.

{_RAISES}""",
}


def _make_reduction(kind: Collective, grouped: bool) -> Callable[..., Any]:
    """Make the function that calls a reduction of one array or of several."""

    def call_reduction(
        given: Any,
        op: Op,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        compression: Any = None,
    ) -> Any:
        wire = None if compression is None else compression.wire
        settings = Settings(
            process_set, op, float(prescale), float(postscale), wire, grouped=grouped, mathematical=are_mathematical()
        )
        results = kind(given if grouped else [given], name, settings)
        return results if grouped else results[0]

    return call_reduction


def _broadcast(array: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    (root,) = whole_numbers([root_rank], ROOT, process_set, "broadcast", name)
    settings = Settings(process_set, root=root, mathematical=are_mathematical())
    return BROADCAST([array], name, settings)[0]


def _allgather(array: Any, name: str | None, process_set: ProcessSet) -> Any:
    settings = Settings(process_set, mathematical=are_mathematical())
    return ALLGATHER([_in_rows(array)], name, settings)[0]


def _grouped_allgather(arrays: Sequence[Any], name: str | None, process_set: ProcessSet) -> list[Any]:
    settings = Settings(process_set, grouped=True, mathematical=are_mathematical())
    return ALLGATHER([_in_rows(array) for array in arrays], name, settings)


def _alltoall(array: Any, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
    chosen = None if splits is None else whole_numbers(splits, SPLITS, process_set, "alltoall", name)
    settings = Settings(process_set, mathematical=are_mathematical(), splits=chosen)
    result, rows = ALLTOALL.bind_arrays([_in_rows(array)], name, settings)
    return result if splits is None else (result, jax.numpy.asarray(rows[0]))


def _in_rows(array: Any) -> Any:
    """Return the array with at least one dimension."""
    return array if array.ndim else array.reshape(1)


def _to_jax_array(value: Any) -> Any:
    """Convert numbers and NumPy arrays to arrays of JAX; return other values unchanged."""
    return jax.numpy.asarray(value) if isinstance(value, np.ndarray | Number | np.generic) else value


CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": _make_reduction(ALLREDUCE, False),
    "grouped_allreduce": _make_reduction(ALLREDUCE, True),
    "broadcast": _broadcast,
    "allgather": _allgather,
    "grouped_allgather": _grouped_allgather,
    "alltoall": _alltoall,
    "reducescatter": _make_reduction(REDUCESCATTER, False),
    "grouped_reducescatter": _make_reduction(REDUCESCATTER, True),
}

globals().update(make_functions(__name__, Tensors(jax.Array, "jax.Array", CALLS, _to_jax_array), ORDERS))
for _name, _text in DOCUMENTATION.items():
    globals()[_name].__doc__ = inspect.cleandoc(_text)
