"""Arguments of a collective on TensorFlow's tensors, except for its tensors."""

from __future__ import annotations

from typing import NamedTuple

from ..collectives.process_sets import ProcessSet
from ..collectives.reduce_ops import Op, Sum

WIRES = {None: 0, "float16": 1, "bfloat16": 2, "float8": 3, "tuned8": 254, "tuned": 255}
"""Numbers of what floats are sent as: `WIRE_*` of the native engine."""


class Call(NamedTuple):
    """Call of a collective in a traced function; its fields are attributes of the native op.

    Attributes
    ----------
    kind : str
        `allreduce`, `broadcast`, `allgather`, `barrier`, `alltoall` or `reducescatter`.
    name : str or None
        Name of the operation; None: the next unnamed operation of its kind.
    set : int
        Number of the process set.
    op : Op
    wire : int
        Number of the wire dtype, one of `WIRES`.
    prescale, postscale : float
    root : int
        World rank of the root of a broadcast.
    group : bool
        Whether the tensors form one grouped operation, even if there is only one.
    mathematical : bool
        Whether its gradient is the mathematical one (`engine.frameworks.backward`).
    overlaps : bool
        Whether similar calls are submitted at the same time, with which it may be fused: no thread waits for it alone.
    optimizer : int
        Number of the optimizer whose step this call completes; -1: it completes none.
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
    """Return the number of a process set in graphs.

    Raises
    ------
    NotInitializedError
        The set was not added, or has been removed.
    """
    return process_set.call_number
