"""Adapter of `torch.Tensor`, through which the collectives read, write and create such tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..collectives.adapters import register
from ..errors import UnsupportedTensorError
from ..native import memory


def check(tensor: torch.Tensor, what: str = "a tensor") -> None:
    """Raise UnsupportedTensorError unless the engine supports the tensor's layout and device."""
    if tensor.layout is not torch.strided:
        raise UnsupportedTensorError(
            f"{what} has layout {tensor.layout}; the engine takes dense tensors: use to_dense(), or sparse_allreduce"
        )
    check_device(tensor, what)
    memory.expect_memory(tensor.detach())  # torch would copy from a tensor without memory unchecked, and crash


def check_device(tensor: torch.Tensor, what: str = "a tensor") -> None:
    """Raise UnsupportedTensorError unless the engine supports the tensor's device."""
    if not tensor.is_cpu and not tensor.is_cuda:
        raise UnsupportedTensorError(
            f"{what} is on {tensor.device}; the engine takes tensors of the CPU and of CUDA: use cpu()"
        )


class TorchAdapter:
    """Adapter for `torch.Tensor` and its subclasses."""

    def as_input(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or not tensor.is_cpu:
            check(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        # A view that is negated or conjugated lazily has memory with other signs.
        if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            return tensor
        check(tensor)
        return tensor.resolve_conj().resolve_neg().contiguous()

    as_target = as_input

    def make_empty(self, source: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(source)

    def store(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        if tensor.data_ptr() != result.data_ptr() or tensor.is_neg() or tensor.is_conj():
            with torch.no_grad():
                tensor.copy_(result)

    def as_framework_tensor(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return `output`, which `make_empty` has allocated as a tensor of PyTorch."""
        return output

    def as_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        source = self.as_input(tensor)
        return source if source.dim() else source.view(1)

    def make_allocator(self, tensor: torch.Tensor) -> DeviceAllocator | None:
        return DeviceAllocator(tensor.device) if tensor.is_cuda else None

    def make_gathered(self, tensor: torch.Tensor, data: Any, rows: int) -> torch.Tensor:
        shape = (rows, *tensor.shape[1:])
        flat = flat_over(data, tensor.dtype)
        if not flat.numel():
            return flat.new_empty(shape)
        return flat.view(shape) if len(shape) > 1 else flat  # A view costs more than the rest.

    def make_counts(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32, device="cpu")

    def cast(self, tensor: torch.Tensor, dtype: Any) -> tuple[torch.Tensor, Any]:
        if not tensor.is_floating_point():
            return tensor, None
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype), tensor.dtype


class DeviceAllocator:
    """Allocator of flat byte tensors on a GPU, for the stream that is current at its construction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device)

    def __call__(self, sizes: list[int]) -> list[torch.Tensor]:
        """Allocate tensors of these sizes in bytes; called by a thread of the engine."""
        torch.cuda.set_device(self.device)  # for this thread; else leaving the stream would make a context on device 0
        with torch.cuda.stream(self.stream):
            return [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]


def flat_over(memory: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return gathered bytes as a flat tensor.

    `memory` is a buffer, or a tensor of a `DeviceAllocator` on the current stream.
    """
    if isinstance(memory, torch.Tensor):
        # The current stream may differ from the allocator's, so torch has to delay the memory's reuse.
        if memory.is_cuda:
            memory.record_stream(torch.cuda.current_stream(memory.device))
        return memory.view(dtype)
    if not memory.nbytes:  # frombuffer refuses it.
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype)


def tensor_over(memory: Any, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor over `memory`, a flat tensor or a buffer, with the dtype, shape and memory format of `like`."""
    if not like.numel():
        return torch.empty_like(like)
    flat = (
        memory if isinstance(memory, torch.Tensor) else torch.frombuffer(memory, dtype=like.dtype, count=like.numel())
    )
    # The native engine reduces these layouts unchanged, and converts all others to row-major.
    for dims, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if like.dim() == dims and not like.is_contiguous() and like.is_contiguous(memory_format=form):
            return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat.view(like.shape)


register(torch.Tensor, TorchAdapter())
for kind in (torch.Tensor, torch.nn.Parameter):
    memory.lend_directly(kind, torch.Tensor.is_neg)
