"""Names of variables and gradients: equal on all ranks that run one program, however often each of them traces it."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import tensorflow as tf

# How often a name was given to an operation of a graph. A trace begins with a graph of its own, so that a rank which
# traces once more than the others counts as they did.
_given: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def name_of(source: Any, default: str = "") -> str:
    """What a variable is called; `default` for what has no name, as a tensor in eager mode.

    Keras tells the path to its variables, such as `sequential/dense/kernel`; others have the name that they were given.
    """
    path = getattr(source, "path", None)
    if isinstance(path, str) and path:
        return path
    if isinstance(source, tf.Tensor) and not hasattr(source, "graph"):
        return default
    name = getattr(source, "name", None)
    return name.partition(":")[0] if isinstance(name, str) and name else default


def key_of(source: Any) -> int:
    """A number that tells variables apart, whether one of Keras or the variable of TensorFlow inside it is given."""
    return id(getattr(source, "handle", source))


def once_in_graph(name: str) -> str:
    """A name for an operation that is made now. In a graph, where operations run side by side, each gets its own.

    The second operation of a name in one trace gets `#1`. In eager mode one follows the other, and may have its name.
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
