"""Comparison of the bits of shared parameters between ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ..collectives.collectives import allgather_async
from ..collectives.handles import Handle
from ..collectives.process_sets import ProcessSet
from ..errors import MismatchError
from ..frameworks.first_step import compute_checksum
from ..text import readable


class SharedCheck:
    """Comparison of shared parameters by checksums, of which one at a time is in flight.

    A rank that has joined does not take part. This rank is one of the process set, whose ranks share the parameters.
    """

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name = name  # name of the operation, equal on all ranks
        self._process_set = process_set
        self._handle: Handle | None = None
        self._names: list[str] = []

    def send(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        """Send checksums of tensors and the number of the step, after the previous comparison was completed."""
        self.complete_comparison()
        if self._process_set.size() == 1:
            return
        self._names = list(tensors)
        sums = [compute_checksum(tensor.cpu()) for tensor in tensors.values()]
        told = np.array([step, *sums], np.uint64).view(np.int64)
        self._handle = allgather_async(told, self._name, self._process_set)

    def complete_comparison(self, hint: str = "") -> None:
        """Wait for the comparison in flight, if any.

        If ranks have different bits or have made different numbers of steps, all ranks raise MismatchError, with `hint`
        added to the text.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return
        everything = handle.wait()
        by_rank = np.split(everything, np.cumsum(handle.rows)[:-1])
        told = [(rank, sums) for rank, sums in zip(self._process_set.ranks, by_rank, strict=True) if len(sums)]
        first, expected = told[0]
        if steps := [f"rank {rank} has made {sums[0]}" for rank, sums in told if sums[0] != expected[0]]:
            raise MismatchError(
                f"OuterOptimizer: rank {first} has made {expected[0]} inner steps, {_list_some(steps)}. All ranks step "
                f"equally often, and those with fewer batches call join(){hint}"
            )
        odd = sorted({int(place) for _, sums in told for place in np.flatnonzero(sums != expected)})
        if odd:
            name = self._names[odd[0] - 1]
            ranks = [rank for rank, sums in told if sums[odd[0]] != expected[odd[0]]]
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            raise MismatchError(
                f"OuterOptimizer: the shared parameters differ at step {expected[0]}: {name!r}{more}; "
                f"{readable.format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} not the bits of rank {first}"
                f"{hint or _LATER}"
            )


_LATER = (
    ". Something has written to them on some rank, or the hosts' processors or builds of torch round the outer step "
    "differently: check_parameters=False goes on with that"
)


def _list_some(texts: Iterable[str]) -> str:
    """Return the first of several texts in one line."""
    texts = list(texts)
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")
