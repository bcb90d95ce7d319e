"""Elastic training with JAX: `JaxState`, whose values are pytrees."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .. import elastic
from ..elastic import *  # noqa: F403
from ..elastic.copies import ArrayPlace, NumpyArrays
from ..elastic.state import ObjectState, Parts, expect_names
from .state import _flatten_by_path, _is_key

__all__ = ["JaxState"]
__all__ += elastic.__all__


class JaxArrays(NumpyArrays):
    """Copies of arrays of JAX, needed since a program deletes arrays that are donated to it (`donate_argnums`)."""

    def is_array(self, value: Any) -> bool:
        """Return whether a value is an array of JAX."""
        return isinstance(value, jax.Array)

    def describe_array(self, array: Any, start: int) -> ArrayPlace:
        """Describe the copy of an array that begins at `start`, in bytes; of random keys their data and algorithm."""
        plain = jax.random.key_data(array) if _is_key(array) else array
        origin = str(jax.random.key_impl(array)) if _is_key(array) else ""
        return ArrayPlace(start, plain.nbytes, np.dtype(plain.dtype), plain.shape, origin)

    def copy_into_views(self, arrays: list[Any], views: list[Any]) -> None:
        """Copy each array into the view for its place; of random keys, copy their data."""
        for array, view in zip(arrays, views, strict=True):
            np.copyto(view, np.asarray(jax.random.key_data(array) if _is_key(array) else array))

    def copy_view(self, view: Any, place: ArrayPlace) -> Any:
        """Copy such a view to an array of JAX on the default device."""
        array = jax.numpy.array(view, copy=True)
        return jax.random.wrap_key_data(array, impl=place.origin) if place.origin else array


class JaxState(ObjectState):
    """State of a training job: pytrees of arrays, and further values.

    Arrays of JAX are immutable. So a program assigns new ones to the state, and so do `restore` and `sync`. Only the
    leaves of a pytree with arrays are saved, and its structure is that of the present value. So it may contain
    functions, like `TrainState` of flax. A value without arrays of JAX is pickled.

    Parameters
    ----------
    **values
        Values of the state, such as `params` and `opt_state`.

    Raises
    ------
    TypeError
        A value cannot be pickled; the error names it.
    ValueError
        A name is reserved by the state.

    Examples
    --------
    >>> state = JaxState(params=params, opt_state=optimizer.init(params), epoch=0)
    >>> state.params, state.opt_state = step(state.params, state.opt_state, batch)
    """

    arrays = JaxArrays()

    def _extract_state(self, value: Any) -> Any:
        leaves = _find_leaves(value)
        return super()._extract_state(value) if leaves is None else Parts(leaves)

    def _load(self, name: str, present: Any, kept: Any) -> None:
        leaves = _find_leaves(present)
        if leaves is None:
            super()._load(name, present, kept)
            return
        expect_names(name, leaves, kept)
        structure = jax.tree_util.tree_structure(present)
        setattr(self, name, jax.tree_util.tree_unflatten(structure, [kept[path] for path in leaves]))


def _find_leaves(value: Any) -> dict[str, Any] | None:
    """Return the leaves of a pytree that has arrays of JAX, by their paths; None for other values."""
    try:
        leaves, _ = _flatten_by_path(value)
    except (TypeError, ValueError):  # for example a dict whose keys cannot be sorted
        return None
    return leaves if any(isinstance(leaf, jax.Array) for leaf in leaves.values()) else None
