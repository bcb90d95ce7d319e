"""Names of variables and gradients, which are equal on all ranks of a program, however often each rank traces it."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import tensorflow as tf

# Number of operations of each name in a graph. Each trace has a graph of its own, so a rank that traces more often than
# the others counts the same.
_given: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def name_of(source: Any, default: str = "") -> str:
    """Return the name of a variable; `default` for objects without a name, such as a tensor in eager mode.

    Variables of Keras have a path, such as `sequential/dense/kernel`; others have the name from their construction.
    """
    path = getattr(source, "path", None)
    if isinstance(path, str) and path:
        return path
    if isinstance(source, tf.Tensor) and not hasattr(source, "graph"):
        return default
    name = getattr(source, "name", None)
    return name.partition(":")[0] if isinstance(name, str) and name else default


def key_of(source: Any) -> int:
    """Return a number that identifies a variable; it is the same for a Keras variable and its TensorFlow variable."""
    return id(getattr(source, "handle", source))


def once_in_graph(name: str) -> str:
    """Return a name for a new operation, unique in its graph, in which operations run concurrently.

    The second operation of a name in one trace gets `#1`. In eager mode operations run one after the other, and the
    name is returned unchanged.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):  # up to the function that the program calls
        graph = graph.outer_graph
    seen = _given.setdefault(graph, Counter())
    count = seen[name]
    seen[name] += 1
    return f"{name}#{count}" if count else name
