"""Exact comparison of the memory of tensors: strided views of one buffer may interleave and share nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch


@dataclass(frozen=True)
class Extent:
    """The memory from a tensor's first byte to its last."""

    begin: int
    end: int
    tensor: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent | None:
        """The extent of a tensor, or of the values of a sparse one; None: it has no memory that can be told."""
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
        """The tensor's bytes in a mask of the memory from `begin` on."""
        width, own = self.tensor.element_size(), self.tensor
        steps = [step * width for step in own.stride()]
        return mask.as_strided((*own.shape, width), (*steps, 1), self.begin - begin)


def held_in(tensors: Sequence[tuple[Any, bool]], others: Sequence[torch.Tensor]) -> list[bool | None]:
    """Whether the memory of each tensor is that of others, or of tensors before it.

    Parameters
    ----------
    tensors : sequence of (torch.Tensor, bool)
        The flag says whether tensors after it may lie in its memory.
    others : sequence of torch.Tensor

    Returns
    -------
    list of (bool or None)
        True: every byte is; False: none; None: some are.
    """
    extents = [Extent.of(tensor) for tensor, _ in tensors]
    order = sorted((each for each in (*extents, *map(Extent.of, others)) if each), key=lambda each: each.begin)
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
            later.discard(id(extent))  # it is reduced itself
    return held


def _is_covered(extent: Extent, near: Sequence[Extent]) -> bool | None:
    """Whether the bytes of a tensor are all among those of others, or none of them (False), or some (None)."""
    begin = min(extent.begin, *(each.begin for each in near))
    mask = torch.zeros(max(extent.end, *(each.end for each in near)) - begin, dtype=torch.bool, device="cpu")
    for each in near:
        each.bytes_in(mask, begin).fill_(True)
    own = extent.bytes_in(mask, begin)
    return True if bool(own.all()) else None if bool(own.any()) else False
