"""Arguments of a collective on TensorFlow's tensors, except for its tensors."""

from __future__ import annotations

from typing import NamedTuple

from ..collectives.reduce_ops import Op, Sum

WIRES = {None: 0, "float16": 1, "bfloat16": 2, "float8": 3, "tuned8": 254, "tuned": 255}
"""Numbers of what floats are sent as: `WIRE_*` of the native engine."""


class Call(NamedTuple):
    """Call of a collective in a traced function; its fields are attributes of the native op."""

    kind: str  # `allreduce`, `broadcast`, `allgather`, `barrier`, `alltoall` or `reducescatter`
    name: str | None = None  # None: the next unnamed operation of its kind
    set: int = 0  # `call_number` of the process set
    op: Op = Sum
    wire: int = 0  # number of the wire dtype, one of `WIRES`
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0  # world rank of the root of a broadcast
    group: bool = False  # whether the tensors form one grouped operation, even if there is only one
    mathematical: bool = False  # whether its gradient is the mathematical one (`engine.frameworks.backward`)
    # Whether similar calls, with which it may fuse, are submitted at the same time: no thread waits for it alone
    overlaps: bool = False
    optimizer: int = -1  # number of the optimizer whose step this call completes; -1: none
    backward: bool = False  # whether it is the gradient of another call
