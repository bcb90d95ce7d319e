"""Elastic training with torch: `engine.torch.elastic.TorchState`, samplers and `run`."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from .. import elastic
from ..elastic import *  # noqa: F403
from ..elastic.copies import ArrayPlace, Memory, NumpyArrays
from ..elastic.state import ObjectState, Parts
from .optimizer_state import load_named_state, named_state, parameter_names
from .state import ties_of

__all__ = ["TorchState"]
__all__ += elastic.__all__


class TorchArrays(NumpyArrays):
    """Copies of dense tensors that require no gradient, on any device; the copies lie in the host's memory."""

    def is_array(self, value: Any) -> bool:
        """Return whether a value is such a tensor."""
        if type(value) is not torch.Tensor or value.requires_grad or value.layout is not torch.strided:
            return False
        return not value.is_quantized and value.device.type != "meta"

    def identify_array(self, tensor: torch.Tensor) -> Hashable:
        """Return a key that is equal for tensors that view the same memory in the same way, such as tied weights."""
        if not tensor.numel():
            return id(tensor)
        signs = tensor.is_neg(), tensor.is_conj()
        return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), signs

    def describe_array(self, tensor: torch.Tensor, start: int) -> ArrayPlace:
        """Describe the copy of a tensor that begins at `start`, in bytes."""
        nbytes = tensor.numel() * tensor.element_size()
        return ArrayPlace(start, nbytes, tensor.dtype, tuple(tensor.shape), "" if tensor.is_cpu else tensor.device.type)

    def allocate_memory(self, nbytes: int) -> Memory:
        """Allocate memory for copies; page-locked if CUDA is in use, so that GPUs copy at full speed."""
        pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        memory: Memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned).numpy()
        return memory

    def copy_into_views(self, tensors: list[torch.Tensor], views: list[torch.Tensor]) -> None:
        """Copy each tensor into the view for its place; copies from GPUs run concurrently, and have ended on return."""
        devices = set()
        for tensor, view in zip(tensors, views, strict=True):
            view.copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def view(self, memory: Memory, place: ArrayPlace) -> torch.Tensor:
        """Return the tensor at a place of memory, as a view."""
        if not place.nbytes:
            return torch.empty(place.shape, dtype=place.dtype, device="cpu")
        count = math.prod(place.shape)
        return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.start).view(place.shape)

    def copy_view(self, view: torch.Tensor, place: ArrayPlace) -> torch.Tensor:
        """Copy such a view to the type of device of the original: of GPUs, to the current one."""
        return view.to(place.origin) if place.origin else view.clone()


class TorchState(ObjectState):
    """State of a training job: a model, an optimizer, and further values.

    Values are restored into the existing parameters and buffers of modules, and as far as possible into the existing
    state of optimizers. So views of them, shared gradients and wrapped optimizers stay valid.

    There are two copies of the state in the host's memory, of which at least one is complete at any time. On a GPU,
    where Horovod keeps its single copy, they would take twice the memory of model and optimizer.

    Parameters
    ----------
    model : torch.nn.Module, optional
    optimizer : torch.optim.Optimizer, optional
        Optimizer, wrapped or not. Commits are deferred while it has accumulated only some of its passes per step.
    **values
        More modules and optimizers; schedulers, gradient scalers, samplers: all with `state_dict` and
        `load_state_dict`. Other values are pickled, except for tensors, which are copied.

    Raises
    ------
    TypeError
        A value cannot be pickled; the error names it.
    ValueError
        A name is reserved by the state.

    Examples
    --------
    >>> state = TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0)
    """

    arrays = TorchArrays()

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        given = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: value for name, value in given.items() if value is not None}, **values)
        self.register_in_hand(self._passes_in_hand)

    def reset(self) -> None:
        """Drop gradients of a step that was not completed."""
        for optimizer in self._list_optimizers():
            optimizer.zero_grad()

    def _list_optimizers(self) -> Iterator[Any]:
        present = (getattr(self, name) for name in self._names)
        return (value for value in present if isinstance(value, torch.optim.Optimizer))

    def _passes_in_hand(self) -> bool:
        wrappings = (getattr(optimizer, "_engine", None) for optimizer in self._list_optimizers())
        return any(wrapping is not None and getattr(wrapping.reducer.group, "touched", False) for wrapping in wrappings)

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of an optimizer's parameters, by group; names in the state's modules are preferred."""
        present = [getattr(self, name) for name in sorted(self._names)]
        return parameter_names(optimizer, [each for each in present if isinstance(each, torch.nn.Module)])

    def _extract_state(self, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            return Parts(named_state(value, self._names_of(value)))
        return super()._extract_state(value)

    def _accepts_views(self, present: Any) -> bool:
        return isinstance(present, torch.nn.Module | torch.optim.Optimizer)

    def _load(self, name: str, present: Any, kept: Any) -> None:
        if isinstance(present, torch.optim.Optimizer):
            names = self._names_of(present)
            load_named_state(present, _copy_into(named_state(present, names), kept), names)
            return
        if isinstance(present, torch.nn.Module):
            # A module may keep its extra state by reference; it copies everything else.
            extra = {key: _copy_into(None, value) for key, value in kept.items() if key.endswith("_extra_state")}
            kept.update(extra)
            _expect_ties(name, present, kept)
            _take_dtypes(present, kept)
        super()._load(name, present, kept)
        if isinstance(present, torch.nn.Module) and _has_taken(present, kept):
            super()._load(name, present, _copy_into(None, kept))
        elif isinstance(stages := getattr(present, "_per_optimizer_states", None), dict):
            stages.clear()  # Otherwise a scaler would treat the gradients of the next step as unscaled already.


def _expect_ties(name: str, module: torch.nn.Module, kept: dict[str, Any]) -> None:
    """Raise ValueError if tensors are tied here, but not in the saved state, or vice versa."""
    here, there = ties_of(module.state_dict().items()), ties_of(kept.items())
    odd = next((each for each in [*here, *there] if here.get(each) != there.get(each)), None)
    if odd is not None:
        raise ValueError(
            f"{odd!r} of {name!r} is{here.get(odd, ' not tied')} here, and was{there.get(odd, ' not tied')} when it "
            "was kept: tie the same parameters on all ranks"
        )


def _take_dtypes(module: torch.nn.Module, kept: dict[str, Any]) -> None:
    """Convert the tensors of a module to the saved dtypes; else loading would cast the values to the present ones."""
    for name, own in module.state_dict(keep_vars=True).items():
        value = kept.get(name)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.dtype != value.dtype:
            if isinstance(own, torch.nn.Parameter):
                own.grad = None
            own.data = own.data.to(value.dtype)


def _has_taken(module: torch.nn.Module, kept: dict[str, Any]) -> bool:
    """Return whether a module has kept loaded tensors by reference, as a custom `load_state_dict` may do."""
    given = {value.data_ptr() for value in kept.values() if isinstance(value, torch.Tensor) and value.numel()}
    return any(isinstance(own, torch.Tensor) and own.data_ptr() in given for own in module.state_dict().values())


def _copy_into(present: Any, kept: Any) -> Any:
    """Copy a saved value, into matching tensors of the present state if there are any, else into new ones."""
    if isinstance(kept, torch.Tensor):
        if not isinstance(present, torch.Tensor) or present.shape != kept.shape or present.dtype != kept.dtype:
            return kept.clone()
        with torch.no_grad():
            return present.copy_(kept)
    if isinstance(kept, dict):
        old = present if isinstance(present, dict) else {}
        return {key: _copy_into(old.get(key), value) for key, value in kept.items()}
    if type(kept) in (list, tuple):
        known = present if isinstance(present, list | tuple) and len(present) == len(kept) else [None] * len(kept)
        return type(kept)(_copy_into(old, value) for old, value in zip(known, kept, strict=True))
    return copy.deepcopy(kept)
