"""Control dependencies of collectives in a graph, by which they run in order, and are not pruned.

In functions, TensorFlow adds control dependencies itself: stateful operations run in the order of the program, and none
is pruned. It does not in the graph of a function's gradient, so this module adds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

_GRADIENTS = "__backward_"  # prefix of the names of gradients' graphs


def is_of_session(graph: Any) -> bool:
    """Return whether a graph is one of TensorFlow 1, of which sessions run parts, and not that of a function."""
    return not hasattr(graph, "outer_graph")


def is_called(graph: Any) -> bool:
    """Return whether a graph is that of the gradient of a function that was traced in a call by another function."""
    if is_of_session(graph):
        return False
    return graph.name.startswith(_GRADIENTS) and hasattr(getattr(graph.outer_graph, "outer_graph", None), "outer_graph")


def count_scopes(backward: bool) -> int:
    """Return the number of name scopes around a new operation of a gradient; -1 for others and in eager mode.

    TensorFlow does not order the calls of a function's gradient. So the native ops distinguish these calls by the
    prefixes that inlining adds to these scopes. `backward` says that the operation is the gradient of a collective;
    those in a program's own gradient are recognized by their graph.
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
    """Let operations that are created inside run after the last collective of that name in this graph.

    None: after the last one without a name. In the graph of a session nothing is ordered, since a session runs only
    the requested operations, and would otherwise also run all collectives before them.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    if is_of_session(graph):
        yield
        return
    last = _get_last_collectives(graph).get(name)
    # An operation in another branch of a TensorFlow 1 control flow construct cannot be a control dependency.
    if last is None or last._control_flow_context is not graph._get_control_flow_context():
        yield
        return
    with tf.control_dependencies([last]):
        yield


def keep_in_order(operation: Any) -> None:
    """Make a collective without a name run, and record it as the one behind which the next one without a name runs."""
    _get_last_collectives(operation.graph)[None] = operation
    _add_control_output(operation)


def keep_apart(operation: Any, name: str) -> None:
    """Make sure that a collective runs, even if its results are unused, concurrently with all others."""
    _get_last_collectives(operation.graph)[name] = operation
    manager = operation.graph.experimental_acd_manager
    if manager is None:
        _add_control_output(operation)
    else:
        manager.run_independently(operation)


def _get_last_collectives(graph: Any) -> dict[str | None, Any]:
    """Return the last collective of each name in a graph; None is the key of those without a name."""
    lasts: dict[str | None, Any] | None = getattr(graph, "_engine_last_collectives", None)
    if lasts is None:
        lasts = graph._engine_last_collectives = {}
    return lasts


def _add_control_output(operation: Any) -> None:
    outputs = getattr(operation.graph, "control_outputs", None)
    if outputs is not None and operation.graph.experimental_acd_manager is None:
        outputs.append(operation)
