"""Broadcast of one rank's parameters to all ranks."""

from __future__ import annotations

from typing import Any

import mxnet
from mxnet import gluon

from ..collectives import objects
from ..collectives.collectives import broadcast_, broadcast_async_
from ..collectives.failures import announce_failure
from ..collectives.process_sets import ProcessSet, global_process_set
from ..errors import UnsupportedTensorError
from ..session import runtime
from .adapter import check


def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the parameters of one rank to every rank, in place. Collective.

    Parameters whose shape is unknown before the first forward pass are broadcast in it, after their initialisation.

    Parameters
    ----------
    params : mapping of str to mxnet.nd.NDArray or gluon.Parameter
        `net.collect_params()`, or the arguments or auxiliary states of a module.
    root_rank : int
        World rank whose values are sent.
    prefix : str, optional
        Accepted for existing scripts, and without effect.
    process_set : ProcessSet, optional
        Process set whose ranks take part, including the root.

    Raises
    ------
    MismatchError
        The ranks' names, dtypes or shapes differ; all ranks raise it, before anything is changed.
    TypeError, UnsupportedTensorError
        `params` is not a mapping; or an entry is not an array, is sparse, or is not in main memory.
    """
    if runtime.is_waiting():
        return  # A world begins with a broadcast of the elastic state.
    try:
        if not callable(getattr(params, "items", None)):
            raise TypeError(f"broadcast_parameters takes a mapping, not a {type(params).__qualname__}")
        arrays: dict[str, Any] = {}
        later: dict[str, Any] = {}
        for name, value in sorted(params.items()):
            arrays |= _arrays_of(name, value, later)
        described = {name: (objects.describe(name, array), 0) for name, array in arrays.items()}
        described |= dict.fromkeys(later, ("not initialised yet", 0))
    except Exception as error:
        announce_failure(process_set, "allgather", None, error)  # The others submit an allgather here.
        raise
    objects.compare_descriptions(
        described, "broadcast_parameters: the ranks do not hold the same model", None, process_set
    )
    for handle in [broadcast_async_(array, root_rank, None, process_set) for array in arrays.values()]:
        handle.wait()
    for name, parameter in later.items():
        _broadcast_when_initialised(parameter, f"parameter.{name}", root_rank, process_set)


def _arrays_of(name: str, value: Any, later: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of one entry by name; a parameter that has none yet is added to `later`."""
    if isinstance(value, gluon.Parameter):
        if value._deferred_init:
            later[name] = value
            return {}
        several = value.list_data()
        found = {f"{name} on {each.context}" if len(several) > 1 else name: each for each in several}
    elif isinstance(value, mxnet.nd.NDArray):
        found = {name: value}
    else:
        raise UnsupportedTensorError(f"{name!r} is a {type(value).__qualname__}, not an array; use broadcast_object")
    for array in found.values():
        check(array)
    return found


def _broadcast_when_initialised(parameter: Any, name: str, root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast the initial values of a parameter in the first forward pass, which determines its shape."""

    def initialize_and_broadcast(*arguments: Any) -> None:
        del parameter._init_impl
        parameter._init_impl(*arguments)
        for number, array in enumerate(parameter.list_data()):
            broadcast_(array, root_rank, f"{name}.{number}" if number else name, process_set)

    parameter._init_impl = initialize_and_broadcast
