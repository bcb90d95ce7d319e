"""Collectives on arrays of JAX, which run at once on arrays, and can be traced by `jit`, `grad`, `vmap` and others.

Inside `jit`, `scan`, `while_loop` and `cond` each call needs a unique name, and shapes are fixed: an allgather takes
the same number of rows from each rank, and an all-to-all has no splits. docs/reference/framework-limits.md has more.
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
from .primitive import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER, CallSettings, Collective

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
        Name of the operation, equal on all ranks. Inside `jit` and control flow each call needs a unique name.
    process_set : ProcessSet, optional
        Process set whose ranks call the function."""
_REDUCED = f"""    op : Op, optional
        Operation; `Average` by default.
{_NAMED}
    compression : optional
        `Compression.none`, `fp16`, `bf16`, `fp8`, `tuned`, `tuned8`, or a user-defined compressor. See
        `engine.Compressor`.
    prescale_factor, postscale_factor : float, optional
        Factors of the inputs and of the result."""
_RAISES = """    Raises
    ------
    EngineError
        Same as for the function of the same name in `engine`. A compiled program raises `jax.errors.JaxRuntimeError`
        with the same text, from which `engine.errors.of` makes the engine's error.
    """

DOCUMENTATION = {
    "allreduce": f"""Combine an array over all ranks. Collective.

    Parameters
    ----------
    tensor : jax.Array
        Array of equal shape and dtype on all ranks. The dtype is one that `engine.allreduce` supports.
{_REDUCED}

    Returns
    -------
    jax.Array
        Array with the dtype and shape of the input. Gradients flow through it with `Sum`, `Average` and `Adasum`: they
        are reduced over the ranks by the same operation. `vmap` maps it to one collective.

{_RAISES}""",
    "grouped_allreduce": f"""Combine several arrays over all ranks in one request. Collective.

    Parameters
    ----------
    tensors : sequence of jax.Array
        Arrays like that of `allreduce`, of any dtypes; their number and order are equal on all ranks.
{_REDUCED}

    Returns
    -------
    list of jax.Array
        Arrays like that of `allreduce`.

{_RAISES}""",
    "broadcast": f"""Return a new array with the values of the root rank's. Collective.

    Parameters
    ----------
    tensor : jax.Array
        Array of equal shape and dtype on all ranks.
    root_rank : int
        Rank in the world whose values are sent.
{_NAMED}

    Returns
    -------
    jax.Array
        Array with the values of the root rank. Gradients flow back to the root rank, which receives their average over
        ranks, or their sum with `mathematical_gradients`.

{_RAISES}""",
    "allgather": f"""Concatenate the arrays of all ranks along the first dimension, in rank order. Collective.

    Parameters
    ----------
    tensor : jax.Array
        Array of equal dtype and shape on all ranks, except that the first dimension may differ outside of compiled
        programs. An array without dimensions counts as one row.
{_NAMED}

    Returns
    -------
    jax.Array
        Result, equal on all ranks. Gradients flow through it: a rank receives those of its own rows, averaged over
        ranks, or summed with `mathematical_gradients`.

{_RAISES}""",
    "grouped_allgather": f"""Concatenate several arrays over all ranks in one request. Collective.

    Parameters
    ----------
    tensors : sequence of jax.Array
        Arrays like that of `allgather`, of any dtypes; their number and order are equal on all ranks.
{_NAMED}

    Returns
    -------
    list of jax.Array
        Arrays like that of `allgather`.

{_RAISES}""",
    "alltoall": f"""Send rows to each rank, and receive rows from each rank. Collective.

    Parameters
    ----------
    tensor : jax.Array
        Rows for rank 0, then those for rank 1, and so on. Dtype and shape are equal on all ranks, except that the
        first dimension may differ outside of compiled programs.
    splits : sequence of int, optional
        Number of rows for each rank; equal by default. Compiled programs do not support it.
{_NAMED}

    Returns
    -------
    jax.Array, or pair of jax.Array
        Received rows in rank order, and with `splits` also their numbers by rank, int32. Gradients flow back to the
        ranks that sent the rows.

{_RAISES}""",
    "reducescatter": f"""Combine an array over all ranks, and return this rank's rows of the result. Collective.

    Parameters
    ----------
    tensor : jax.Array
        Array with at least one dimension; otherwise the same as for `allreduce`.
{_REDUCED}

    Returns
    -------
    jax.Array
        Rows of this rank. Rows are divided in rank order; if they do not divide evenly, the first ranks have one more.
        Gradients flow through it with `Sum` and `Average`: that of a row comes from the rank that received the row.
        With `Sum` it is multiplied by the number of ranks. `mathematical_gradients` divides both gradients by this
        number.

{_RAISES}""",
    "grouped_reducescatter": f"""Combine several arrays in one request, and return this rank's rows of each. Collective.

    Parameters
    ----------
    tensors : sequence of jax.Array
        Arrays like that of `reducescatter`, of any dtypes; their number and order are equal on all ranks.
{_REDUCED}

    Returns
    -------
    list of jax.Array
        Arrays like that of `reducescatter`.

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
        settings = CallSettings(
            process_set, op, float(prescale), float(postscale), wire, grouped=grouped, mathematical=are_mathematical()
        )
        results = kind(given if grouped else [given], name, settings)
        return results if grouped else results[0]

    return call_reduction


def _broadcast(array: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    (root,) = whole_numbers([root_rank], ROOT, process_set, "broadcast", name)
    settings = CallSettings(process_set, root=root, mathematical=are_mathematical())
    return BROADCAST([array], name, settings)[0]


def _allgather(array: Any, name: str | None, process_set: ProcessSet) -> Any:
    settings = CallSettings(process_set, mathematical=are_mathematical())
    return ALLGATHER([_in_rows(array)], name, settings)[0]


def _grouped_allgather(arrays: Sequence[Any], name: str | None, process_set: ProcessSet) -> list[Any]:
    settings = CallSettings(process_set, grouped=True, mathematical=are_mathematical())
    return ALLGATHER([_in_rows(array) for array in arrays], name, settings)


def _alltoall(array: Any, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
    chosen = None if splits is None else whole_numbers(splits, SPLITS, process_set, "alltoall", name)
    settings = CallSettings(process_set, mathematical=are_mathematical(), splits=chosen)
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
