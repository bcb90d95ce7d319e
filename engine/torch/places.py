"""Memory for gradients on a GPU that live side by side, so that those which travel together need not be packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .adapter import tensor_over

ALIGNMENT = (
    16  # bytes; the same in the slab (engine_ext/control/handover.pyx): else neighbours would not be as far apart
)


class Places:
    """Buffers, one for each dtype and device of some parameters: gradients lie in them in the order in which they come.

    Parameters
    ----------
    parameters : sequence of torch.Tensor
        Of which each takes one place.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        for each in parameters:
            sizes[each.device, each.dtype] = sizes.get((each.device, each.dtype), 0) + extent(each)
        self._buffers = {kind: torch.zeros(size, dtype=kind[1], device=kind[0]) for kind, size in sizes.items()}
        self._taken = dict.fromkeys(sizes, 0)
        for device in {device for device, _ in sizes if device.type == "cuda"}:
            # Gradients may come on any stream, and who had this memory before may be at work there still.
            torch.cuda.current_stream(device).synchronize()

    def take(self, parameter: torch.Tensor) -> torch.Tensor:
        """The next place, for the gradient of a parameter: with its shape, and its memory format or row-major."""
        kind = parameter.device, parameter.dtype
        begin = self._taken[kind]
        self._taken[kind] += extent(parameter)
        return tensor_over(self._buffers[kind][begin : begin + parameter.numel()], parameter)

    def keep_for_current_stream(self) -> None:
        """Let the allocator give the memory out again only behind what the current stream has been given by then."""
        for (device, _), buffer in self._buffers.items():
            if device.type == "cuda":
                buffer.record_stream(torch.cuda.current_stream(device))


def extent(parameter: torch.Tensor) -> int:
    """How many elements the place of a gradient takes."""
    return -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT // parameter.element_size()
