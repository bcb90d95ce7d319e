"""Elastic training with JAX: `JaxState`, whose values are pytrees."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from ..elastic.copies import NUMPY, Memory, Place
from ..elastic.samplers import ElasticBatchSampler, ElasticSampler
from ..elastic.state import HostsUpdatedInterrupt, ObjectState, Parts, State, expect_names
from ..elastic.worker.batches import loop
from ..elastic.worker.gate import JobOver
from ..elastic.worker.run import leave, run
from .state import _flat, _is_key

__all__ = [
    "ElasticBatchSampler",
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "JaxState",
    "JobOver",
    "ObjectState",
    "State",
    "leave",
    "loop",
    "run",
]


class JaxArrays:
    """Arrays of JAX. They are copied: a program that is given an array to use up (`donate_argnums`) deletes it."""

    def owns(self, value: Any) -> bool:
        """Whether a value is an array of JAX."""
        return isinstance(value, jax.Array)

    def key(self, array: Any) -> Hashable:
        """Equal for one array."""
        return id(array)

    def place(self, array: Any, start: int) -> Place:
        """What is kept of an array, at a place; of random keys their numbers, and what they are for."""
        plain = jax.random.key_data(array) if _is_key(array) else array
        origin = str(jax.random.key_impl(array)) if _is_key(array) else ""
        return Place(start, plain.nbytes, np.dtype(plain.dtype), plain.shape, origin)

    def memory(self, nbytes: int) -> Memory:
        """Memory for copies."""
        return NUMPY.memory(nbytes)

    def write(self, arrays: list[Any], views: list[Any]) -> None:
        """Copy arrays into views."""
        for array, view in zip(arrays, views, strict=True):
            np.copyto(view, np.asarray(jax.random.key_data(array) if _is_key(array) else array))

    def view(self, memory: Memory, place: Place) -> Any:
        """The numbers at a place of memory."""
        return NUMPY.view(memory, place)

    def own(self, view: Any, place: Place) -> Any:
        """An array of JAX, on its default device."""
        array = jax.numpy.array(view, copy=True)
        return jax.random.wrap_key_data(array, impl=place.origin) if place.origin else array


class JaxState(ObjectState):
    """Pytrees of arrays, and whatever else a training goes on from.

    Arrays of JAX do not change, so that a program makes new ones: it assigns them to the state, and so do `restore` and
    `sync`. Of a pytree with arrays the leaves are kept, and its structure is that of the present value; so it may
    hold functions, as `TrainState` of flax does. A value without arrays of JAX is pickled.

    Parameters
    ----------
    **values
        Such as `params` and `opt_state`.

    Raises
    ------
    TypeError
        A value that cannot be pickled, by name.
    ValueError
        A name that the state has for something else.

    Examples
    --------
    >>> state = JaxState(params=params, opt_state=optimizer.init(params), epoch=0)
    >>> state.params, state.opt_state = step(state.params, state.opt_state, batch)
    """

    arrays = JaxArrays()

    def _kept(self, value: Any) -> Any:
        leaves = _leaves(value)
        return super()._kept(value) if leaves is None else Parts(leaves)

    def _load(self, name: str, present: Any, kept: Any) -> None:
        leaves = _leaves(present)
        if leaves is None:
            super()._load(name, present, kept)
            return
        expect_names(name, leaves, kept)
        structure = jax.tree_util.tree_structure(present)
        setattr(self, name, jax.tree_util.tree_unflatten(structure, [kept[path] for path in leaves]))


def _leaves(value: Any) -> dict[str, Any] | None:
    """The leaves of a pytree that has arrays of JAX, by their paths; None of anything else."""
    try:
        leaves, _ = _flat(value)
    except (TypeError, ValueError):  # such as a dict of keys without an order
        return None
    return leaves if any(isinstance(leaf, jax.Array) for leaf in leaves.values()) else None
