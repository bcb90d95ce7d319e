"""Collectives on MXNet's arrays, with Horovod's names, argument order and defaults.

No gradients flow through them. `priority` is accepted and has no effect, since the engine's schedule is the same on all
ranks.
"""

from __future__ import annotations

from typing import Any

import mxnet

from ..collectives import collectives
from ..frameworks.surface import Tensors, make_functions
from . import adapter as _adapter  # noqa: F401  (registers mxnet.nd.NDArray)

ORDERS = {
    "allreduce": "tensor average name priority prescale_factor postscale_factor process_set op compression",
    "allreduce_": "tensor average name priority prescale_factor postscale_factor process_set op",
    "grouped_allreduce": "tensors average name priority prescale_factor postscale_factor process_set op compression",
    "grouped_allreduce_": "tensors average name priority prescale_factor postscale_factor process_set op",
    "allgather": "tensor name priority process_set",
    "grouped_allgather": "tensors name priority process_set",
    "broadcast": "tensor root_rank name priority process_set",
    "broadcast_": "tensor root_rank name priority process_set",
    "alltoall": "tensor splits name priority process_set",
    "reducescatter": "tensor op=Average name priority prescale_factor postscale_factor process_set compression",
    "grouped_reducescatter": (
        "tensors op=Average name priority prescale_factor postscale_factor process_set compression"
    ),
}


def _alltoall(tensor: Any, splits: Any, *arguments: Any) -> Any:
    """Call `engine.alltoall`, after converting splits in an array of MXNet, whose elements are not integers."""
    if isinstance(splits, mxnet.nd.NDArray):
        splits = splits.asnumpy()
    return collectives.alltoall(tensor, splits, *arguments)


_TENSORS = Tensors(mxnet.nd.NDArray, "mxnet.nd.NDArray", {"alltoall": _alltoall}, gradients=False)
globals().update(make_functions(__name__, _TENSORS, ORDERS))
