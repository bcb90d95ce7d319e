"""A framework of arrays with its binding: everything that a framework with gradient hooks has to provide.

The framework comes first: a parameter is a NumPy array with a gradient and hooks, `backward` takes gradients from the
last parameter to the first, and `SGD` takes steps. Its binding follows, from `FakeReducer` on, like `engine.torch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.errors import EngineError, UnsupportedTensorError
from engine.frameworks.optimizer import Distributed, Wrapping, expect_unwrapped
from engine.frameworks.options import ReductionOptions
from engine.frameworks.reducer import Reducer
from engine.frameworks.surface import Tensors, make_functions
from engine.native import gradients


class Parameter(np.ndarray):
    """A trainable array."""

    grad: np.ndarray | None
    requires_grad: bool
    hooks: list[Callable[[Parameter], None]]

    def __new__(cls, values: Any) -> Parameter:
        made = np.array(values, np.float64).view(cls)
        made.grad, made.requires_grad, made.hooks = None, True, []
        return made


_passes: list[list[Callable[[], None]]] = []  # running passes, each with its callbacks for the end


def backward(found: Iterable[tuple[Parameter, np.ndarray]]) -> None:
    """Add gradients to those of their parameters, and call hooks."""
    _passes.append([])
    try:
        for parameter, gradient in reversed(list(found)):
            grad = parameter.grad
            parameter.grad = gradient if grad is None else np.add(grad, gradient, out=grad)
            for hook in parameter.hooks:
                hook(parameter)
        for callback in _passes[-1]:
            callback()
    finally:
        _passes.pop()


class SGD:
    """Gradient descent."""

    def __init__(self, parameters: Iterable[Parameter], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.param_groups = [{"params": self.parameters}]

    def zero_grad(self) -> None:
        """Remove the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Apply the gradients."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter -= self.lr * parameter.grad


class FakeReducer(Reducer):
    """Reducer of the gradients that `backward` makes."""

    kind = np.ndarray

    def check(self, tensor: np.ndarray, what: str) -> None:
        if tensor.dtype.kind not in "fiub":
            raise UnsupportedTensorError(f"{what} is {tensor.dtype}, which is not reduced")

    def is_hooked(self, parameter: Parameter) -> bool:
        return any(isinstance(hook, gradients.GradientHook) for hook in parameter.hooks)

    def attach(self, parameter: Parameter, hook: Callable[[Parameter], None]) -> Any:
        parameter.hooks.append(hook)
        return SimpleNamespace(remove=lambda: parameter.hooks.remove(hook))

    def queue(self, callback: Callable[[], None]) -> int:
        if not _passes:
            raise EngineError("a hook was called outside of backward()")
        _passes[-1].append(callback)
        return id(_passes[-1])

    def gradient_in(self, memory: Any, parameter: Parameter) -> np.ndarray:
        return np.frombuffer(memory[0], memory[1], parameter.size).reshape(parameter.shape)

    def is_floating(self, parameter: Parameter) -> bool:
        return parameter.dtype.kind == "f"

    def full_like(self, parameter: Parameter, value: float) -> np.ndarray:
        return np.full(parameter.shape, value, parameter.dtype)

    def store(self, target: np.ndarray, source: np.ndarray) -> None:
        target[...] = source

    def replace(self, index: int, parameter: Parameter, gradient: np.ndarray) -> np.ndarray:
        self.check(gradient, f"the gradient of {self.names[index]!r}")
        parameter.grad = np.ascontiguousarray(gradient)
        return parameter.grad

    def shares_memory(self, gradient: np.ndarray) -> bool:
        return gradient.base is not None

    def separate(self, parameter: Parameter, gradient: np.ndarray) -> np.ndarray:
        parameter.grad = gradient.copy()
        return parameter.grad


class _Distributed(Distributed):
    def zero_grad(self) -> None:
        self._engine.reducer.before_zero()
        super().zero_grad()  # type: ignore[misc]
        self._engine.reducer.mark_zeroed()
        self._engine.reducer.mark_dropped()

    def step(self) -> None:
        self._engine.before_step()
        super().step()  # type: ignore[misc]
        self._engine.after_step()


class _Wrapping(Wrapping):
    broadcast = "fake_framework.broadcast_(parameter, {root}) for each parameter"

    def make(self, options: ReductionOptions, prefix: str, number: int) -> FakeReducer:
        return FakeReducer(options, number)


def DistributedOptimizer(optimizer: SGD, named_parameters: Any = None, **options: Any) -> Any:
    """Make an optimizer reduce its gradients over all ranks; options are as in `engine.torch.DistributedOptimizer`."""
    expect_unwrapped(optimizer)
    wrapping = _Wrapping(type(optimizer), ReductionOptions.from_arguments(**options), named_parameters)
    wrapping.add_groups([optimizer.parameters])
    wrapping.wrap_optimizer(optimizer, _Distributed, {})
    return optimizer


globals().update(make_functions(__name__, Tensors(np.ndarray, "numpy.ndarray")))
