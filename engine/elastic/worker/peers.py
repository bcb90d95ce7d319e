"""Ranks of the present world, as states see them: collectives of the default engine under reserved names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...collectives import collectives, objects
from ...collectives.reduce_ops import Max
from ...session import topology

_PREFIX = "engine.elastic."


class WorldPeers:
    """`engine.elastic.state.Peers` of the world that the default engine is in at the time of a call."""

    @property
    def rank(self) -> int:
        """This process's rank. Not a collective."""
        return topology.rank()

    def gather_values(self, value: Any) -> Sequence[Any]:
        """Return the values of all ranks, by rank."""
        return objects.allgather_object(value, f"{_PREFIX}gather")

    def broadcast(self, value: Any, root: int) -> Any:
        """Return the value of rank `root`."""
        return objects.broadcast_object(value, root, f"{_PREFIX}broadcast")

    def broadcast_memory(self, memory: npt.NDArray[np.uint8], root: int) -> None:
        """Overwrite memory with the bytes that it has on rank `root`."""
        collectives.broadcast_(memory, root, f"{_PREFIX}fill")

    def reduce_maximum(self, values: Sequence[int]) -> Sequence[int]:
        """Return the elementwise maximum over all ranks."""
        largest = np.array(values, np.int64)
        collectives.allreduce_(largest, op=Max, name=f"{_PREFIX}maximum")
        return [int(value) for value in largest]
