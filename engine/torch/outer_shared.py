"""Parameters that `OuterOptimizer` keeps equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import UnsupportedTensorError
from .adapter import check


class SharedParameters:
    """Copy of the parameters that is equal on all ranks, and the outer optimizer that changes it.

    `make` makes the outer optimizer of a list of tensors; any other result raises TypeError or ValueError. A parameter
    that is not a dense tensor of a floating dtype, on the CPU or a GPU, raises UnsupportedTensorError.
    """

    def __init__(self, local: dict[str, torch.Tensor], make: Callable[[list[torch.Tensor]], Any]) -> None:
        for name, parameter in local.items():
            check(parameter, f"parameter {name!r}")
            if not parameter.is_floating_point():
                raise UnsupportedTensorError(
                    f"parameter {name!r} is {parameter.dtype}; OuterOptimizer averages parameters of floating dtypes: "
                    "leave it out of the inner optimizer"
                )
        self.local = {name: local[name] for name in sorted(local)}  # this rank's own parameters
        # Shared ones by ascending name: float32 for parameters of less precision, else of their dtype
        self.tensors = {name: _copy_in_precision(parameter) for name, parameter in self.local.items()}
        self.optimizer: torch.optim.Optimizer = make(list(self.tensors.values()))  # outer optimizer of `tensors`
        self.begun = False  # whether the tensors have a value; before the first step they have none
        self._expect_optimizer()

    def _expect_optimizer(self) -> None:
        optimizer = self.optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "outer is a function that makes a torch.optim.Optimizer of a list of tensors, such as lambda shared: "
                f"torch.optim.SGD(shared, lr=0.7); it has returned {type(optimizer).__qualname__}"
            )
        held = [each for group in optimizer.param_groups for each in group["params"]]
        if {id(each) for each in held} != {id(each) for each in self.tensors.values()}:
            raise ValueError(
                f"outer has returned an optimizer of {len(held)} tensors, which are not the {len(self.tensors)} shared "
                "parameters that it was given: make it of all of them"
            )

    def take_values(self) -> None:
        """Take the values of this rank's parameters, which are equal on all ranks before the first step."""
        for name, tensor in self.tensors.items():
            tensor.data = _copy_in_precision(self.local[name])
        self.begun = True

    def measure_changes(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return outer gradients of this rank: what its inner steps have taken off the shared parameters."""
        return {name: self.tensors[name] - self.local[name].detach() for name in names}

    def measure_later_changes(self, changes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what this rank's inner steps have added to its parameters since it measured `changes`.

        The shared parameters of these names have not changed since then.
        """
        return {name: self.local[name].detach() - self.tensors[name] + change for name, change in changes.items()}

    def apply_averages(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Make an outer step with averaged outer gradients."""
        for name, average in averages.items():
            self.tensors[name].grad = average
        try:
            self.optimizer.step()
        finally:
            for name in averages:
                self.tensors[name].grad = None

    def mix_in(self, names: Iterable[str], mix: float) -> None:
        """Replace this rank's parameters by shared ones, of which `mix` is the weight of their own values."""
        for name in names:
            local, shared = self.local[name].detach(), self.tensors[name]
            local.copy_(torch.lerp(shared, local.to(shared.dtype), mix) if mix else shared)

    def copy_to_devices(self, changes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of changes where the shared parameters lie."""
        return {name: each.to(self.tensors[name].device, copy=True) for name, each in changes.items()}

    def take_shared_with(self, later: Mapping[str, torch.Tensor]) -> None:
        """Replace this rank's parameters by shared ones and the changes that it has made later."""
        for name, change in later.items():
            self.local[name].detach().copy_(self.tensors[name] + change)

    def state_dict(self) -> dict[str, Any]:
        """Return the shared parameters, if they have values, and the state of the outer optimizer."""
        return {"shared": dict(self.tensors) if self.begun else {}, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, on this rank or another.

        Raises ValueError and changes nothing if the state is that of other parameters.
        """
        kept: dict[str, torch.Tensor] = state["shared"]
        if kept:
            odd = sorted(kept.keys() ^ self.tensors.keys()) or [
                name for name, each in kept.items() if each.shape != self.tensors[name].shape
            ]
            if odd:
                raise ValueError(
                    "the state has other shared parameters than this optimizer, or other shapes of them: "
                    f"{', '.join(map(repr, odd[:5]))}{' and more' if len(odd) > 5 else ''}"
                )
        self.optimizer.load_state_dict(state["optimizer"])
        self.begun = bool(kept)
        for name, each in kept.items():
            local, tensor = self.local[name], self.tensors[name]
            if tensor.device != local.device:  # The model has been moved since the optimizer was made.
                tensor.data = _copy_in_precision(local)
            tensor.copy_(each)


def _copy_in_precision(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy in which small outer steps are not lost to rounding."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(dtype, copy=True)
