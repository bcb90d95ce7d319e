"""Accumulation of the gradients of several passes on a rank before a reduction: `backward_passes_per_step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from .names import key_of, name_of

Reduce = Callable[[list[Any]], list[Any]]


class Accumulation:
    """Sums of gradients and a count of passes in variables of TensorFlow, for graphs and eager mode.

    In a graph of TensorFlow 1 they are local variables: `tf.compat.v1.local_variables_initializer()` initializes them,
    and checkpoints and broadcasts do not include them.
    """

    def __init__(self, passes: int, average: bool, dense: bool) -> None:
        self._passes = passes  # number of passes in a step; 2 or more
        self._average = average  # whether to divide the sums by the number of passes
        self._dense = dense  # whether to convert sparse gradients to dense ones
        self._made: dict[Any, _Sums] = {}  # by graph of TensorFlow 1; None: for eager mode and all functions

    def add(self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Reduce) -> list[Any]:
        """Add the gradients of a pass. In the last pass of a step, reduce the sums and reset them.

        The result has reduced gradients in the last pass of a step, else the incomplete sums, which must not be used.
        Raises ValueError for a sparse gradient unless these are converted to dense ones.
        """
        members = [k for k, each in enumerate(gradients) if each is not None]
        added = [self._as_dense(gradients[k], variables[k]) for k in members]
        made = self._get_sums()
        sums, count = [made.sum_of(variables[k]) for k in members], made.get_count()
        with tf.control_dependencies([total.assign_add(each) for total, each in zip(sums, added, strict=True)]):
            reached = tf.identity(count.assign_add(1))

        def finish_step() -> list[Any]:
            totals = [each.read_value() for each in sums]
            reduced = reduce([each / self._passes for each in totals] if self._average else totals)
            with tf.control_dependencies(reduced):
                restarted = [each.assign(tf.zeros_like(each)) for each in sums] + [count.assign(0)]
            with tf.control_dependencies(restarted):
                return [tf.identity(each) for each in reduced]

        def read_sums() -> list[Any]:
            return [each.read_value() for each in sums]

        results: list[Any] = [None] * len(gradients)
        for k, result in zip(members, _run_either(reached >= self._passes, finish_step, read_sums), strict=True):
            results[k] = result
        return results

    def when_due(self, gradients: Sequence[Any], apply: Callable[[], Any]) -> Any:
        """Call `apply` after the last pass of a step, which has reset the count; otherwise do nothing."""
        with tf.control_dependencies([each for each in gradients if each is not None]):
            due = tf.equal(self._get_sums().get_count().read_value(), 0)

        def apply_step() -> list[Any]:
            operation = apply()
            with tf.control_dependencies([] if tf.executing_eagerly() else [operation]):
                return [tf.constant(True)]

        done = _run_either(due, apply_step, lambda: [tf.constant(False)])
        return None if tf.executing_eagerly() else tf.group(*done)

    def _as_dense(self, gradient: Any, variable: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if self._dense:
            return tf.convert_to_tensor(gradient)
        raise ValueError(
            f"the gradient of {name_of(variable)!r} is sparse, and backward_passes_per_step={self._passes} adds up "
            "dense ones: give sparse_as_dense=True"
        )

    def _get_sums(self) -> _Sums:
        with tf.init_scope():
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        return self._made.setdefault(graph, _Sums())


class _Sums:
    """Variables that are created at their first use."""

    def __init__(self) -> None:
        self._count: Any = None
        self._sums: dict[int, tuple[Any, Any]] = {}  # by key: the variable, kept so that its key stays unique; its sum

    def get_count(self) -> Any:
        """Return the variable that counts the passes since the last step."""
        if self._count is None:
            self._count = _make_variable("passes", [], tf.int64)
        return self._count

    def sum_of(self, variable: Any) -> Any:
        """Return the variable with the sum of a variable's gradients."""
        key = key_of(variable)
        if key not in self._sums:
            self._sums[key] = variable, _make_variable("sum", variable.shape, tf.as_dtype(variable.dtype).base_dtype)
        return self._sums[key][1]


def _run_either(condition: Any, one: Callable[[], list[Any]], other: Callable[[], list[Any]]) -> list[Any]:
    """Return the list of one of two functions, also if `tf.cond` returns a tensor instead of a list of one."""
    found = tf.cond(condition, one, other)
    return found if isinstance(found, list) else [found]


def _make_variable(name: str, shape: Any, dtype: Any) -> Any:
    """Create a variable of zeros outside of the graph that is being traced."""
    with tf.init_scope():
        return tf.compat.v1.Variable(
            tf.zeros(shape, dtype),
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name=f"engine/{name}",
            use_resource=True,
        )
