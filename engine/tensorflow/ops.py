"""Collectives of `engine.tensorflow`, and queries that are evaluated while a program runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ..collectives import collectives
from ..collectives.process_sets import ProcessSet, global_process_set
from ..session import runtime, topology
from . import op as _op
from .call import Call
from .collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]


@tf.autograph.experimental.do_not_convert
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called `barrier`. Collective. In a graph it adds an operation."""
    _op.reduce(Call("barrier", set=process_set.call_number), [])


@tf.autograph.experimental.do_not_convert
def join(process_set: ProcessSet = global_process_set) -> Any:
    """Wait until every rank has joined, and return the last one as int32. Collective.

    See `engine.join`.
    """
    number = process_set.call_number
    return _evaluate_in_program(lambda: collectives.join(runtime.called_set(number)))


def _evaluate_in_program(question: Any) -> Any:
    """Return the result of a function as an int32 scalar, evaluated when the program runs."""
    if tf.executing_eagerly():
        return tf.constant(question(), tf.int32)
    answer = tf.numpy_function(lambda: np.int32(question()), [], tf.int32)
    answer.set_shape([])
    return answer


def rank_op(name: str | None = None) -> Any:
    """Return the rank when the program runs, as int32. `name` has no effect."""
    return _op.read_rank_and_size(0)[0]


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks in a process set when the program runs, as int32. `name` has no effect."""
    if process_set_id == 0:
        return _op.read_rank_and_size(0)[1]
    return _evaluate_in_program(lambda: runtime.process_set(process_set_id).size())


def local_rank_op(name: str | None = None) -> Any:
    """Return the rank among those of this host when the program runs, as int32. `name` has no effect."""
    return _evaluate_in_program(topology.local_rank)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks of this host when the program runs, as int32. `name` has no effect."""
    return _evaluate_in_program(topology.local_size)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is in a process set when the program runs, else 0, as int32. `name` has no effect."""
    return _evaluate_in_program(lambda: int(runtime.process_set(process_set_id).included()))
