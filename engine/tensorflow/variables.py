"""Give every rank the variables, or an object, of one: in eager mode, in a graph, and in a session of TensorFlow 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from .. import objects, place, runtime
from ..errors import EngineError, UnsupportedTensorError
from ..failures import announce
from ..frameworks.agreement import unique_names
from ..process_sets import ProcessSet, global_process_set
from .names import name_of, once_in_graph
from .ops import allgather, broadcast

_TITLE = "the ranks do not hold the same variables"


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Give every rank the variables of one. Collective.

    Parameters
    ----------
    variables : iterable of tf.Variable or of keras.Variable
        Of equal names, dtypes and shapes on every rank, in any order; those of one name are paired by their order.
        `model.variables`, `optimizer.variables`. Of any dtype but strings.
    root_rank : int
        Whose values; a rank of the world.
    process_set : ProcessSet, optional
        Whose ranks take part; the root is one of them.
    inplace : bool
        Accepted for scripts that have it. TensorFlow writes to a variable by assigning to it, with either value.

    Returns
    -------
    tf.Operation or None
        In a graph the operation to run; in eager mode nothing, and it is done.

    Raises
    ------
    MismatchError
        Before anything is changed, on all ranks: the variables' names, dtypes or shapes differ. In a graph the
        operation fails with that text.
    UnsupportedTensorError
        An entry that is no variable, or one of strings.
    """
    if runtime.is_waiting() or not process_set.included():  # The first thing in a world is that all take over a state.
        return None if tf.executing_eagerly() else tf.no_op()
    if tf.executing_eagerly():
        _broadcast_now(variables, root_rank, process_set, "broadcast_variables")
        return None
    return tf.group(
        *(each.op if hasattr(each, "op") else each for each in _assigned(variables, root_rank, process_set))
    )


@tf.autograph.experimental.do_not_convert
def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """As `broadcast_variables`. Returns the values that the variables have then. `name`: equal on all ranks."""
    variables = list(variables)
    if runtime.is_waiting() or not process_set.included():
        return [tf.convert_to_tensor(each) for each in variables]
    if tf.executing_eagerly():
        _broadcast_now(variables, root_rank, process_set, "broadcast_")
        return [tf.convert_to_tensor(each) for each in variables]
    assigned = _assigned(variables, root_rank, process_set, name)
    with tf.control_dependencies(assigned):
        return [tf.identity(each) for each in variables]


def broadcast_global_variables(root_rank: int, process_set: ProcessSet = global_process_set) -> Any:
    """The operation that gives every rank all global variables of one, in a graph of TensorFlow 1.

    Raises
    ------
    EngineError
        In eager mode, which has no global variables.
    """
    if tf.executing_eagerly():
        raise EngineError(
            "broadcast_global_variables needs a graph of TensorFlow 1: in eager mode there are no global variables; "
            "call broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank, process_set)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank the object of one. Collective. See `engine.broadcast_object`; no `session` is needed."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """`broadcast_object` with all but the object: a function that is called with it, as often as one likes."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collect one object of each rank. Collective. See `engine.allgather_object`; no `session` is needed."""
    return objects.allgather_object(obj, name, process_set)


def _broadcast_now(variables: Iterable[Any], root: int, process_set: ProcessSet, what: str) -> None:
    """Assign the root's values to variables, in eager mode."""
    try:
        named = _named(variables)
        arrays = [np.require(each.numpy(), requirements=["C", "W"]) for each in named.values()]
        described = {name: (f"{each.dtype}{list(each.shape)}", 0) for name, each in zip(named, arrays, strict=True)}
    except Exception as error:
        announce(process_set, "allgather", None, error)  # The others submit an allgather here.
        raise
    by_name = dict(zip(named, arrays, strict=True))
    objects.broadcast_arrays(by_name, described, root, f"{what}: {_TITLE}", process_set)
    if place.rank() != root:
        for name, variable in named.items():
            variable.assign(by_name[name])


def _assigned(variables: Iterable[Any], root: int, process_set: ProcessSet, name: str | None = None) -> list[Any]:
    """In a graph: assignments of the root's values to variables, after a comparison of these over the ranks."""
    named = _named(variables)
    prefix = name or "broadcast"
    assigned: dict[str, Any] = {}
    done: Any = [_compared(named, f"{prefix} all variables", process_set)]
    for each in sorted(named):  # in one order on all ranks, also where each holds a thread
        with tf.control_dependencies(done):
            value = broadcast(tf.identity(named[each]), root, name=f"{prefix}.{each}", process_set=process_set)
        assigned[each] = named[each].assign(value)
        done = [assigned[each]]
    return [assigned[each] for each in named]


def _compared(named: dict[str, Any], name: str, process_set: ProcessSet) -> Any:
    """In a graph: a tensor whose computation fails if the ranks' variables differ. No thread waits for the others."""
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


def _named(variables: Iterable[Any]) -> dict[str, Any]:
    """Variables by their names, of which each is there once; raises UnsupportedTensorError for what is no variable."""
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
