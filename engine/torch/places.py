"""Memory for gradients on a GPU that are stored side by side, so that they are sent together without packing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .adapter import tensor_over

ALIGNMENT = (
    16  # bytes; the same in the slab (engine_ext/control/device_entries.pyx): else neighbours would not be as far apart
)


class GradientPlaces:
    """Buffers for gradients, one for each dtype and device of the parameters, filled in the order of requests.

    Each parameter takes one place.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        for each in parameters:
            sizes[each.device, each.dtype] = sizes.get((each.device, each.dtype), 0) + aligned_length(each)
        self._buffers = {kind: torch.zeros(size, dtype=kind[1], device=kind[0]) for kind, size in sizes.items()}
        self._taken = dict.fromkeys(sizes, 0)
        for device in {device for device, _ in sizes if device.type == "cuda"}:
            # Gradients may be computed on any stream, while the memory's former user may still be at work.
            torch.cuda.current_stream(device).synchronize()

    def assign_place(self, parameter: torch.Tensor) -> torch.Tensor:
        """Assign the next place to the gradient of a parameter, with its shape and its memory format or row-major."""
        kind = parameter.device, parameter.dtype
        begin = self._taken[kind]
        self._taken[kind] += aligned_length(parameter)
        return tensor_over(self._buffers[kind][begin : begin + parameter.numel()], parameter)

    def keep_for_current_stream(self) -> None:
        """Delay the reuse of the memory until the current stream has finished its work at the time of the release."""
        for (device, _), buffer in self._buffers.items():
            if device.type == "cuda":
                buffer.record_stream(torch.cuda.current_stream(device))


def aligned_length(parameter: torch.Tensor) -> int:
    """Return the number of elements in the place of a gradient, including alignment."""
    return -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT // parameter.element_size()
