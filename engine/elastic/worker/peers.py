"""The ranks of the present world, as states see them: collectives of the default engine, under names of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import collectives, objects, place
from ...types import Max

_PREFIX = "engine.elastic."


class WorldPeers:
    """`engine.elastic.state.Peers` of whatever world the default engine is in at the time of a call."""

    @property
    def rank(self) -> int:
        """This process's rank. No collective."""
        return place.rank()

    def gather(self, value: Any) -> Sequence[Any]:
        """The values of all ranks, by rank."""
        return objects.allgather_object(value, f"{_PREFIX}gather")

    def broadcast(self, value: Any, root: int) -> Any:
        """The value of one rank."""
        return objects.broadcast_object(value, root, f"{_PREFIX}broadcast")

    def fill(self, memory: npt.NDArray[np.uint8], root: int) -> None:
        """Give memory the bytes that it has on one rank."""
        collectives.broadcast_(memory, root, f"{_PREFIX}fill")

    def maximum(self, values: Sequence[int]) -> Sequence[int]:
        """Of each of some numbers, the largest of all ranks."""
        largest = np.array(values, np.int64)
        collectives.allreduce_(largest, op=Max, name=f"{_PREFIX}maximum")
        return [int(value) for value in largest]
