"""Exact test for overlaps of tensors' memory, since strided views of one buffer may interleave without overlap."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch


@dataclass(frozen=True)
class Extent:
    """Range of memory from a tensor's first byte to its last."""

    begin: int
    end: int
    tensor: torch.Tensor

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Extent | None:
        """Return the extent of a tensor, or of the values of a sparse one; None if it has no known memory."""
        stored = tensor._values() if tensor.layout is torch.sparse_coo else tensor
        if stored.layout is not torch.strided or not stored.numel():
            return None
        try:
            begin = stored.data_ptr()
        except RuntimeError:  # as of a fake tensor
            return None
        last = sum((length - 1) * step for length, step in zip(stored.shape, stored.stride(), strict=True))
        return cls(begin, begin + (last + 1) * stored.element_size(), stored) if begin else None

    def bytes_in(self, mask: torch.Tensor, begin: int) -> torch.Tensor:
        """Return a view of the tensor's bytes in a mask of the memory from `begin` on."""
        width, own = self.tensor.element_size(), self.tensor
        steps = [step * width for step in own.stride()]
        return mask.as_strided((*own.shape, width), (*steps, 1), self.begin - begin)


def held_in(tensors: Sequence[tuple[Any, bool]], others: Sequence[torch.Tensor]) -> list[bool | None]:
    """Return for each tensor whether its memory lies in that of `others` or of earlier tensors.

    Each tensor comes with a flag whether later tensors may lie in its memory. The result is True if all bytes do, False
    if none do, and None if some do.
    """
    extents = [Extent.from_tensor(tensor) for tensor, _ in tensors]
    order = sorted((each for each in (*extents, *map(Extent.from_tensor, others)) if each), key=lambda each: each.begin)
    begins = [each.begin for each in order]
    reaches = list(accumulate((each.end for each in order), max))
    later = {id(each) for each in extents}
    held: list[bool | None] = []
    for extent, (_, holds) in zip(extents, tensors, strict=True):
        near = []
        k = bisect_left(begins, extent.end) if extent else 0
        while extent and k > 0 and reaches[k - 1] > extent.begin:
            k -= 1
            if order[k].end > extent.begin and id(order[k]) not in later:
                near.append(order[k])
        held.append(_is_covered(extent, near) if extent and near else False)
        if holds and not held[-1]:
            later.discard(id(extent))  # Later tensors may lie in it.
    return held


def _is_covered(extent: Extent, near: Sequence[Extent]) -> bool | None:
    """Return whether all bytes of a tensor are among those of others (True), none (False), or some (None)."""
    begin = min(extent.begin, *(each.begin for each in near))
    mask = torch.zeros(max(extent.end, *(each.end for each in near)) - begin, dtype=torch.bool, device="cpu")
    for each in near:
        each.bytes_in(mask, begin).fill_(True)
    own = extent.bytes_in(mask, begin)
    return True if bool(own.all()) else None if bool(own.any()) else False
