"""Collectives for numbers, arrays, tensors and variables of Keras, outside of compiled programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from ..collectives import collectives, objects
from ..collectives.compression import Compression
from ..collectives.failures import announce_failure
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Average
from ..frameworks.surface import choose_op
from ..session import runtime
from .names import named_variables, names_of


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> NDArray[Any]:
    """Combine a value over all ranks. Collective. See `engine.allreduce`.

    Parameters
    ----------
    value : number, array, tensor or keras.Variable
        Value of equal shape and dtype on all ranks.
    name : str, optional
        Name of the operation, equal on all ranks.
    average : bool, optional
        Old form of `op`: True for `Average`, False for `Sum`.
    prescale_factor, postscale_factor : float, optional
        Factors for the inputs, and for the result.
    op : Op, optional
        `Average` by default.
    compression : optional
        See `engine.Compressor`.

    Returns
    -------
    numpy.ndarray

    Raises
    ------
    ValueError
        Both `average` and `op` are given.
    EngineError
        Same as for `engine.allreduce`.
    """
    array = _to_array(value, "allreduce", name, process_set)
    chosen = choose_op(average, op)
    result = collectives.allreduce(array, chosen, name, prescale_factor, postscale_factor, process_set, compression)
    return np.asarray(result)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> NDArray[Any]:
    """Concatenate values over all ranks along the first dimension, which may differ by rank. Collective.

    Parameters and errors are those of `allreduce`. Returns a `numpy.ndarray`.
    """
    return np.asarray(collectives.allgather(_to_array(value, "allgather", name, process_set), name, process_set))


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NDArray[Any]:
    """Return the value of one rank as a `numpy.ndarray`. Collective.

    Parameters and errors are those of `allreduce`.
    """
    return np.asarray(
        collectives.broadcast(_to_array(value, "broadcast", name, process_set), root_rank, name, process_set)
    )


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray[Any]:
    """Combine a value over all ranks, and return this rank's rows. Collective. See `engine.reducescatter`.

    Parameters and errors are those of `allreduce`. Returns a `numpy.ndarray`.
    """
    array = _to_array(value, "reducescatter", name, process_set)
    return np.asarray(collectives.reducescatter(array, op, name, prescale_factor, postscale_factor, process_set, None))


def broadcast_variables(variables: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Copy the values of one rank's variables to every rank. Collective.

    Variables have equal names on all ranks, in any order; those of the same name are matched by their order.
    `root_rank` is the world rank whose values are sent. If names, dtypes or shapes differ, all ranks raise
    MismatchError before anything is changed.
    """
    known = list(variables)
    broadcast_named(dict(zip(names_of(known), known, strict=True)), root_rank, process_set)


def broadcast_named(variables: Mapping[str, Any], root_rank: int, process_set: ProcessSet) -> None:
    """Copy the values of one rank's variables to every rank, matched by the given names. Collective."""
    if runtime.is_waiting():
        return  # A world begins with a broadcast of the elastic state.
    described = {
        name: (f"{keras.backend.standardize_dtype(each.dtype)}{list(each.shape)}", 0)
        for name, each in variables.items()
    }
    arrays = {name: np.array(keras.ops.convert_to_numpy(each.value)) for name, each in variables.items()}
    title = (
        "the ranks' variables differ, so that one rank's cannot be given to the others. Build one model on all ranks, "
        "and name its layers: Keras numbers those without a name over all models of a process"
    )
    objects.broadcast_arrays(arrays, described, root_rank, title, process_set)
    for name, variable in variables.items():
        variable.assign(arrays[name])


def broadcast_global_variables(root_rank: int, model: Any = None, process_set: ProcessSet = global_process_set) -> None:
    """Copy the weights and the optimizer state of one rank's model to every rank. Collective.

    Parameters
    ----------
    root_rank : int
        World rank whose values are sent.
    model : keras.Model
        Model that is built; compiled or not. It is required, since Keras 3 has no collection of global variables.
        During `fit`, use `BroadcastGlobalVariablesCallback`.

    Raises
    ------
    TypeError
        No model is given.
    MismatchError
        The ranks' models differ; all ranks raise it, before anything is changed.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Keras 3 has no collection of global variables: call broadcast_global_variables(root_rank, model), or give "
            "BroadcastGlobalVariablesCallback(root_rank) to fit()"
        )
    broadcast_named(named_variables(model), root_rank, process_set)


def _to_array(value: Any, kind: str, name: str | None, process_set: ProcessSet) -> NDArray[Any]:
    """Convert a value to a NumPy array; a failure is announced to the other ranks, and raised."""
    try:
        if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
            return np.asarray(keras.ops.convert_to_numpy(value))
        array = np.asarray(value)
        if array.dtype == object:
            raise TypeError(f"expected a number, an array or a tensor, not {type(value).__qualname__}")
        return array
    except Exception as error:
        announce_failure(process_set, kind, name, error)
        raise
