"""Broadcast and comparison of pytrees between ranks, and the wait for running programs before the engine ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..collectives import objects
from ..collectives.collectives import broadcast_async
from ..collectives.failures import announce_failure
from ..collectives.process_sets import ProcessSet, global_process_set
from ..errors import UnsupportedTensorError
from ..frameworks.agreement import unique_names
from ..host.patience import Patience
from ..session import runtime, topology
from .adapter import expect_host

_LOOK = 0.002  # seconds between two polls of arrays that are being computed
_place: tuple[int, int] | None = None  # rank and size of the world for which programs are compiled


def broadcast_pytree(tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Send the pytree of one rank to every rank: parameters, the state of an optimizer, random keys. Collective.

    Parameters
    ----------
    tree : pytree
        Tree with the same paths, dtypes and shapes on all ranks, in any order. Its arrays may be of JAX or NumPy. Other
        leaves are sent pickled, and so are arrays of dtypes that the engine does not support, such as int4 and strings.
    root_rank : int
        World rank whose values are sent.
    process_set : ProcessSet, optional
        Process set whose ranks take part, including the root.

    Returns
    -------
    pytree
        New tree of the same structure.

    Raises
    ------
    MismatchError
        The ranks' structures, dtypes or shapes differ; all ranks raise it.
    UnsupportedTensorError
        The engine cannot read an array, such as a tracer inside `jit`.
    """
    if runtime.is_waiting():
        return tree  # A world begins with a broadcast of the elastic state.
    try:
        named, structure = _flatten_by_path(tree)
        sent = {path: _to_plain_array(path, leaf) for path, leaf in named.items() if _is_array(leaf)}
        described = {path: (objects.describe(path, sent[path]) if path in sent else "object", 0) for path in named}
        sent = {path: plain for path, plain in sent.items() if _is_taken(plain.dtype)}
    except Exception as error:
        announce_failure(process_set, "allgather", None, error)  # The others submit an allgather here.
        raise
    order = objects.compare_descriptions(
        described, "broadcast_pytree: the ranks do not hold the same tree", None, process_set
    )
    handles = {path: broadcast_async(sent[path], root_rank, None, process_set) for path in order if path in sent}
    results = {path: handle.wait() for path, handle in handles.items()}
    if len(sent) < len(named):
        others = {path: leaf for path, leaf in named.items() if path not in sent}
        results |= objects.broadcast_object(others, root_rank, None, process_set)
    leaves = [_restore_keys(leaf, results[path]) for path, leaf in named.items()]
    return jax.tree_util.tree_unflatten(structure, leaves)


broadcast_parameters = broadcast_pytree


def check_consistency(tree: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> None:
    """Check that all ranks hold the same pytree, bit by bit. Collective.

    Parameters
    ----------
    tree : pytree
        Tree of arrays, numbers and strings.
    name : str, optional
        Name of the operation, equal on all ranks.

    Raises
    ------
    MismatchError
        Same as for `engine.check_consistency`; it names leaves by their paths.
    """
    try:
        named, _ = _flatten_by_path(tree)
        plain = {path: _to_plain_array(path, leaf) if _is_array(leaf) else leaf for path, leaf in named.items()}
    except Exception as error:
        announce_failure(process_set, "allgather", name, error)
        raise
    objects.check_consistency(plain, name, process_set)


def wait_for_programs(timeout: float) -> str | None:
    """Wait until programs on the CPU have ended, since they may still submit collectives.

    It waits for programs whose results are alive, and for all that this thread has dispatched. JAX runs the programs of
    a thread one after the other, so a program that is dispatched now ends after the others.

    Returns a description of the work that still runs after `timeout` seconds; None if all has ended.
    """
    try:
        [*_, processor] = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves it out: no program has collectives.
        return None
    last = _plus_one(jax.device_put(np.float32(0), processor))
    waiting = [last, *jax.live_arrays("cpu")]
    patience = Patience(timeout)
    while waiting := [array for array in waiting if not array.is_deleted() and not array.is_ready()]:
        if not patience.seconds_left():
            return "a program of JAX that was dispatched has not ended"
        time.sleep(_LOOK)
    return None


@jax.jit
def _plus_one(number: Any) -> Any:
    return number + 1


def _flatten_by_path(tree: Any) -> tuple[dict[str, Any], Any]:
    """Return the leaves of a tree by unique paths, and its structure."""
    paths, leaves, structure = flatten_tree(tree)
    return dict(zip(unique_names(map(jax.tree_util.keystr, paths)), leaves, strict=True)), structure


def flatten_tree(tree: Any) -> tuple[list[tuple[Any, ...]], list[Any], Any]:
    """Return the paths of a tree's leaves, the leaves, and the structure.

    If a class is registered without keys, JAX numbers the children of its nodes. If such a node has the same number of
    unique strings as auxiliary data, as one with a dict does, these are used as keys. So ranks match children by name,
    in any order.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path for path, _ in named]
    if any(isinstance(key, jax.tree_util.FlattenedIndexKey) for path in paths for key in path):
        paths = [tuple(path) for path in _with_keys(structure, [list(path) for path in paths], 0)]
    return paths, [leaf for _, leaf in named], structure


def _with_keys(structure: Any, paths: list[list[Any]], depth: int) -> list[list[Any]]:
    """Return the paths of the leaves below a node at a depth, with its keys instead of its children's numbers."""
    node, children = structure.node_data(), structure.children()
    keys = node[1] if node is not None and isinstance(node[1], tuple | list) else ()
    are_keys = all(isinstance(key, str) for key in keys) and len(children) == len(keys) == len(set(keys))
    found: list[list[Any]] = []
    for number, child in enumerate(children):
        below = paths[len(found) : len(found) + child.num_leaves]
        for path in below:
            if are_keys and isinstance(path[depth], jax.tree_util.FlattenedIndexKey):
                path[depth] = jax.tree_util.DictKey(keys[number])
        found += _with_keys(child, below, depth + 1)
    return found if children else paths


def path_names(paths: Sequence[Any]) -> list[str]:
    """Return unique names of the leaves at these paths, independent of their order.

    They are short, such as `layer/bias`. Names that would be equal, such as those of the keys `1` and `"1"`, are
    written as in Python.
    """
    short = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    counts = Counter(short)
    return unique_names(
        name if counts[name] == 1 else jax.tree_util.keystr(path) for name, path in zip(short, paths, strict=True)
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _is_taken(dtype: Any) -> bool:
    """Return whether arrays of a dtype are sent without pickling."""
    kind = np.dtype(dtype)
    return kind == jax.numpy.bfloat16 or (kind.kind in "biufc" and kind.itemsize <= (16 if kind.kind == "c" else 8))


def _is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of random keys, which have a dtype of their own."""
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_plain_array(path: str, leaf: Any) -> Any:
    """Convert a leaf to an array of numbers that the engine can read."""
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedTensorError(f"{path or 'the tree'} is a tracer: this is for arrays, outside of jit")
    plain = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if isinstance(plain, jax.Array):
        expect_host(plain, path or "the tree")
    return plain


def _restore_keys(leaf: Any, result: Any) -> Any:
    """Convert a result to random keys if the given leaf had them; else return it unchanged."""
    return jax.random.wrap_key_data(result, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else result


def forget_programs() -> None:
    """Discard compiled programs if size or rank differ from the previous world, since shapes depend on both."""
    global _place
    if _place != (now := (topology.rank(), topology.size())):
        _place = now
        jax.clear_caches()
