"""Broadcast of one rank's variables or object: in eager mode, in a graph, and in a session of TensorFlow 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ..collectives import objects
from ..collectives.failures import announce_failure
from ..collectives.process_sets import ProcessSet, global_process_set
from ..errors import EngineError, UnsupportedTensorError
from ..frameworks.agreement import unique_names
from ..session import runtime, topology
from .names import name_of, once_in_graph
from .ops import allgather, broadcast

_TITLE = "the ranks do not hold the same variables"


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Copy the variables of one rank to every rank. Collective.

    Parameters
    ----------
    variables : iterable of tf.Variable or of keras.Variable
        Variables, such as `model.variables` or `optimizer.variables`, of any dtype but strings. Names, dtypes and
        shapes are equal on every rank, in any order; variables of the same name are matched by their order.
    root_rank : int
        World rank whose values are sent.
    process_set : ProcessSet, optional
        Process set whose ranks take part, including the root.
    inplace : bool
        Accepted for existing scripts. TensorFlow assigns to variables with either value.

    Returns
    -------
    tf.Operation or None
        Operation to run, in a graph; None in eager mode, after the broadcast.

    Raises
    ------
    MismatchError
        The variables' names, dtypes or shapes differ; all ranks raise it, before anything is changed. In a graph the
        operation fails with the same text.
    UnsupportedTensorError
        An entry is not a variable, or holds strings.
    """
    if runtime.is_waiting() or not process_set.included():  # A world begins with a broadcast of the elastic state.
        return None if tf.executing_eagerly() else tf.no_op()
    if tf.executing_eagerly():
        _broadcast_now(variables, root_rank, process_set, "broadcast_variables")
        return None
    return tf.group(
        *(each.op if hasattr(each, "op") else each for each in _make_assignments(variables, root_rank, process_set))
    )


@tf.autograph.experimental.do_not_convert
def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Broadcast variables like `broadcast_variables`, and return their new values. `name`: equal on all ranks."""
    variables = list(variables)
    if runtime.is_waiting() or not process_set.included():
        return [tf.convert_to_tensor(each) for each in variables]
    if tf.executing_eagerly():
        _broadcast_now(variables, root_rank, process_set, "broadcast_")
        return [tf.convert_to_tensor(each) for each in variables]
    assigned = _make_assignments(variables, root_rank, process_set, name)
    with tf.control_dependencies(assigned):
        return [tf.identity(each) for each in variables]


def broadcast_global_variables(root_rank: int, process_set: ProcessSet = global_process_set) -> Any:
    """Return the operation that broadcasts all global variables of one rank, in a graph of TensorFlow 1.

    Raises
    ------
    EngineError
        It was called in eager mode, which has no global variables.
    """
    if tf.executing_eagerly():
        raise EngineError(
            "broadcast_global_variables needs a graph of TensorFlow 1: in eager mode there are no global variables; "
            "call broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank, process_set)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Hook that broadcasts all global variables of one rank, once they are initialised or restored. Collective.

    It is for `tf.compat.v1.train.MonitoredTrainingSession` and similar sessions. Only the root needs a checkpoint.

    Parameters
    ----------
    root_rank : int
        World rank whose values are sent.
    device : str
        Accepted for existing scripts, and without effect.
    process_set : ProcessSet, optional
        Process set whose ranks take part.

    Raises
    ------
    EngineError
        A session begins in eager mode.
    """

    def __init__(self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._process_set = process_set
        self._operation: Any = None

    def begin(self) -> None:
        """Add the broadcast to the graph before it is finalized."""
        if tf.executing_eagerly():
            raise EngineError(
                "BroadcastGlobalVariablesHook needs sessions of TensorFlow 1, and does not work in eager mode: call "
                "broadcast_variables(model.variables, root_rank) after the first step"
            )
        if self._operation is None or self._operation.graph is not tf.compat.v1.get_default_graph():
            self._operation = broadcast_global_variables(self._root_rank, self._process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast, also in a session that was recreated after a failure."""
        session.run(self._operation)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the object of one rank to every rank. Collective. See `engine.broadcast_object`; `session` has no effect."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that calls `broadcast_object` with these arguments, and can be called repeatedly."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collect one object of each rank. Collective. See `engine.allgather_object`; `session` has no effect."""
    return objects.allgather_object(obj, name, process_set)


def _broadcast_now(variables: Iterable[Any], root: int, process_set: ProcessSet, what: str) -> None:
    """Assign the root's values to variables in eager mode."""
    try:
        named = _name_variables(variables)
        arrays = [np.require(each.numpy(), requirements=["C", "W"]) for each in named.values()]
        described = {name: (f"{each.dtype}{list(each.shape)}", 0) for name, each in zip(named, arrays, strict=True)}
    except Exception as error:
        announce_failure(process_set, "allgather", None, error)  # The others submit an allgather here.
        raise
    by_name = dict(zip(named, arrays, strict=True))
    objects.broadcast_arrays(by_name, described, root, f"{what}: {_TITLE}", process_set)
    if topology.rank() != root:
        for name, variable in named.items():
            variable.assign(by_name[name])


def _make_assignments(
    variables: Iterable[Any], root: int, process_set: ProcessSet, name: str | None = None
) -> list[Any]:
    """Make graph operations that compare variables between ranks, and then assign the root's values to them."""
    named = _name_variables(variables)
    prefix = name or "broadcast"
    assigned: dict[str, Any] = {}
    done: Any = [_make_comparison(named, f"{prefix} all variables", process_set)]
    for each in sorted(named):  # in the same order on all ranks, since each may hold a thread
        with tf.control_dependencies(done):
            value = broadcast(tf.identity(named[each]), root, name=f"{prefix}.{each}", process_set=process_set)
        assigned[each] = named[each].assign(value)
        done = [assigned[each]]
    return [assigned[each] for each in named]


def _make_comparison(named: dict[str, Any], name: str, process_set: ProcessSet) -> Any:
    """Make a graph tensor whose computation fails if the ranks' variables differ. It blocks no thread."""
    described = {
        each: f"{tf.as_dtype(variable.dtype).base_dtype.name}{list(variable.shape)}" for each, variable in named.items()
    }
    line = np.frombuffer(json.dumps(described).encode() + b"\n", np.uint8)

    def check(lines: Any) -> Any:
        told = [json.loads(each) for each in lines.tobytes().splitlines()]
        everyone: list[objects.Described] = [{each: (text, 0) for each, text in rank.items()} for rank in told]
        objects.expect_equal(everyone, f"broadcast_variables: {_TITLE}", process_set.ranks)
        return np.int32(len(everyone))

    everyone = allgather(tf.constant(line), name=once_in_graph(name), process_set=process_set)
    return tf.numpy_function(check, [everyone], tf.int32)


def _name_variables(variables: Iterable[Any]) -> dict[str, Any]:
    """Return variables by unique names; raise UnsupportedTensorError for other objects and for strings."""
    variables = list(variables)
    for variable in variables:
        if not callable(getattr(variable, "assign", None)):
            raise UnsupportedTensorError(
                f"a {type(variable).__qualname__} is no variable: tensors have broadcast, objects broadcast_object"
            )
        if tf.as_dtype(variable.dtype).base_dtype == tf.string:
            raise UnsupportedTensorError(
                f"the variable {name_of(variable)!r} holds strings, which are not broadcast; use broadcast_object"
            )
    return dict(zip(unique_names(map(name_of, variables)), variables, strict=True))
