"""The order and the survival of collectives in a graph.

TensorFlow runs stateful operations in the order of the program, and none is dropped, where it adds control dependencies
by itself: in functions, but not in the graph of a function's gradient. So collectives that need an order get it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

_GRADIENTS = "__backward_"  # how the names of gradients' graphs begin


def is_of_session(graph: Any) -> bool:
    """Whether a graph is one of TensorFlow 1, of which sessions run parts, and not that of a function."""
    return not hasattr(graph, "outer_graph")


def is_called(graph: Any) -> bool:
    """Whether a graph is that of the gradient of a function that was traced while another function called it."""
    if is_of_session(graph):
        return False
    return graph.name.startswith(_GRADIENTS) and hasattr(getattr(graph.outer_graph, "outer_graph", None), "outer_graph")


def depth(backward: bool) -> int:
    """In how many name scopes an operation of a gradient is made now; -1 of any other operation, and eagerly.

    TensorFlow does not order the calls of a function's gradient. So the native ops tell these calls apart by the parts
    that inlining puts in front of those scopes.

    Parameters
    ----------
    backward : bool
        Whether it is the gradient of a collective. One that a program's own gradient calls is known by its graph.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or is_of_session(graph):
        return -1
    if not backward and not graph.name.startswith(_GRADIENTS):
        return -1
    scope = graph.get_name_scope()
    return len(scope.split("/")) if scope else 0


@contextmanager
def after_the_last(name: str | None = None) -> Iterator[None]:
    """Operations that are made inside run after the last collective of that name in this graph; None: without one.

    In the graph of a session nothing is ordered: a session runs what it is asked for, and would run all before it, too.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    if is_of_session(graph):
        yield
        return
    last = _lasts(graph).get(name)
    # One that belongs to another branch of an old control flow construct cannot be waited for.
    if last is None or last._control_flow_context is not graph._get_control_flow_context():
        yield
        return
    with tf.control_dependencies([last]):
        yield


def keep_in_order(operation: Any) -> None:
    """Have a collective without a name run, and have the next one that needs an order run after it."""
    _lasts(operation.graph)[None] = operation
    _keep(operation)


def keep_apart(operation: Any, name: str) -> None:
    """Have a collective run, whether or not somebody uses its results, beside all others that are ready."""
    _lasts(operation.graph)[name] = operation
    manager = operation.graph.experimental_acd_manager
    if manager is None:
        _keep(operation)
    else:
        manager.run_independently(operation)


def _lasts(graph: Any) -> dict[str | None, Any]:
    """The last collective of each name in a graph, and by None of those that are in order among themselves."""
    lasts: dict[str | None, Any] | None = getattr(graph, "_engine_last_collectives", None)
    if lasts is None:
        lasts = graph._engine_last_collectives = {}
    return lasts


def _keep(operation: Any) -> None:
    outputs = getattr(operation.graph, "control_outputs", None)
    if outputs is not None and operation.graph.experimental_acd_manager is None:
        outputs.append(operation)
