"""Operations on the stand-ins' device, each with the same in host memory to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .allreduce_programs import OPS, compare, core, values
from .device_tensors import DeviceTensor, Room
from .plane_programs import Rank

Results = list[np.ndarray]


def seen(tensor: Any, dtype: Any) -> np.ndarray:
    """Return a result's bytes on the device, or in host memory, as numbers."""
    data = tensor.numpy() if isinstance(tensor, DeviceTensor) else np.frombuffer(tensor, np.uint8)
    return data.view(dtype)


def drawn(rank: int, rows: int, dtype: Any, *more: int) -> np.ndarray:
    """Return rows that only this rank has."""
    return values(rank, rows * int(np.prod(more, initial=1)), str(dtype)).reshape(rows, *more)


class Submitted:
    """An operation on the device, and the same in host memory to compare with.

    `submit(place, name)` submits tensors that `place` has put on the device or host, and returns what to compare after
    the wait for the handle.
    """

    def __init__(
        self, name: str, submit: Callable[[Callable[..., Any], str], tuple[Any, Callable[[], Results]]]
    ) -> None:
        self.name = name
        self.handle, self.results = submit(lambda array: DeviceTensor(array, late=1.0 if array.nbytes else 0.0), name)
        self.host, self.wanted = submit(lambda array: array, f"{name} on the host")

    def check(self, op: str = "sum", wire: str | None = None) -> None:
        """Wait for both operations, and compare them."""
        self.host.wait()
        self.handle.wait()
        for got, wanted in zip(self.results(), self.wanted(), strict=True):
            if op == "average" and wire == "bfloat16":  # divided after the transfer, and so not rounded again
                np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-2, err_msg=self.name)
            else:
                compare(got, wanted, self.name, op, wire)


def gather(name: str, mine: np.ndarray) -> Submitted:
    """Submit an allgather of one tensor."""

    def submit(place: Any, name: str) -> Any:
        handle = core().allgather(place(mine), name, False, Room())
        return handle, lambda: [seen(handle.gathered[0], mine.dtype), np.array(handle.gathered[1])]

    return Submitted(name, submit)


def gather_group(name: str, mine: list[np.ndarray]) -> Submitted:
    """Submit an allgather of a group."""

    def submit(place: Any, name: str) -> Any:
        handle = core().allgather_group([place(each) for each in mine], name, False, None, Room())

        def results() -> Results:
            parts = handle.gathered_group
            found = [seen(part, each.dtype) for (part, _, _), each in zip(parts, mine, strict=True)]
            return [*found, *(np.array(rows) for _, rows, _ in parts)]

        return handle, results

    return Submitted(name, submit)


def exchange(name: str, mine: np.ndarray, splits: list[int]) -> Submitted:
    """Submit an all-to-all."""

    def submit(place: Any, name: str) -> Any:
        handle = core().alltoall(place(mine), splits, name, False, Room())
        return handle, lambda: [seen(handle.gathered[0], mine.dtype), np.array(handle.gathered[1])]

    return Submitted(name, submit)


def own_rows(me: Rank, rows: int) -> int:
    """Return the number of rows that a reduce-scatter of this many rows gives to this rank."""
    return rows // me.size + (me.rank < rows % me.size)


def scatter(me: Rank, name: str, mine: list[np.ndarray], op: str, **how: Any) -> Submitted:
    """Submit a reduce-scatter, of a group if there are several tensors."""
    factors = how.get("prescale", 1.0), how.get("postscale", 1.0), False, how.get("wire")

    def submit(place: Any, name: str) -> Any:
        given = [place(each) for each in mine]
        outputs = [place(np.zeros((own_rows(me, len(each)), *each.shape[1:]), each.dtype)) for each in mine]
        if len(mine) == 1:
            handle = core().reducescatter(given[0], outputs[0], name, OPS[op], *factors)
        else:
            handle = core().reducescatter_group(given, outputs, name, OPS[op], *factors)
        return handle, lambda: [each.numpy() if isinstance(each, DeviceTensor) else each for each in outputs]

    return Submitted(name, submit)
