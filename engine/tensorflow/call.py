"""What a collective on TensorFlow's tensors is called with, beside its tensors."""

from __future__ import annotations

from typing import NamedTuple

from ..process_sets import ProcessSet
from ..types import Op, Sum

WIRES = {None: 0, "float16": 1, "bfloat16": 2, "tuned": 255}
"""Numbers of the dtypes in which float32 and float64 travel: `WIRE_*` of the native engine."""


class Call(NamedTuple):
    """One call of a collective, as a traced function keeps it: every field is an attribute of the native op.

    Attributes
    ----------
    kind : str
        `allreduce`, `broadcast`, `allgather`, `barrier`, `alltoall` or `reducescatter`.
    name : str or None
        None: the next operation of its kind without a name.
    set : int
        Number of the process set.
    op : Op
    wire : int
        One of `WIRES`.
    prescale, postscale : float
    root : int
        Of a broadcast: a rank of the world.
    group : bool
        Whether the tensors make one operation, also if there is one of them.
    mathematical : bool
        Whether its gradient is the mathematical one (`engine.frameworks.backward`).
    overlaps : bool
        Whether others like it are submitted beside it, with which it may be fused: nothing waits for it alone.
    optimizer : int
        Number of the optimizer of whose step its end is the end; -1: it ends no step.
    backward : bool
        Whether it is the gradient of another call.
    """

    kind: str
    name: str | None = None
    set: int = 0
    op: Op = Sum
    wire: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    group: bool = False
    mathematical: bool = False
    overlaps: bool = False
    optimizer: int = -1
    backward: bool = False


def number_of(process_set: ProcessSet) -> int:
    """The number of a process set in graphs.

    Raises
    ------
    NotInitializedError
        It is not there.
    """
    return process_set.call_number
