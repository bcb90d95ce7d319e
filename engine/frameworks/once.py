"""Record of reduced gradients, for operations with which a second reduction would give a wrong result."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..collectives.reduce_ops import Average, Op
from ..errors import EngineError
from ..native import gradients


class Once:
    """Guard against a second reduction of a gradient, for operations that must not be repeated.

    It has a hook beside the native one.
    """

    def __init__(self, group: gradients.GradientGroup, op: Op, version_of: Callable[[Any], int | None]) -> None:
        self._group = group
        self._op = op
        self._version_of = version_of
        # Gradient of each parameter when it was reduced: another tensor is a new gradient.
        self._reduced: dict[int, weakref.ref[Any]] = {}
        # Gradients that a step has used since, with their versions: unchanged ones are not reduced again.
        self._used: dict[int, tuple[weakref.ref[Any], int]] = {}
        # Names of reduced gradients to which a backward pass in `no_sync` has added.
        self._mixed: dict[int, str] = {}

    def make_hook(self, native: gradients.GradientHook, name: str) -> Callable[[Any], None]:
        """Return the hook for one parameter."""
        index = native.index

        def check_once(parameter: Any) -> None:
            if self._group.paused:
                if self._is_reduced(index, parameter):
                    self._mixed[index] = name
            elif native.due and not self.admit_gradient(index, parameter):
                raise self._error(name)

        return check_once

    def admit_gradient(self, index: int, parameter: Any) -> bool:
        """Note that a gradient is being reduced; return False if there is none, or if it was reduced before."""
        if parameter.grad is None or self._is_reduced(index, parameter):
            return False
        self._reduced[index] = weakref.ref(parameter.grad)
        return True

    def admit_rest(self, index: int, parameter: Any) -> bool:
        """Do the same as `admit` for a gradient whose hook has not fired; refuse an unchanged one of an old step."""
        gradient, version = self._used.get(index, (None, 0))
        if (
            gradient is not None
            and gradient() is parameter.grad is not None
            and version == self._version_of(parameter.grad)
        ):
            return False
        return self.admit_gradient(index, parameter)

    def was_reduced(self, gradient: Any) -> bool:
        """Return whether a gradient, or the tensor that it is a view of, was reduced for any parameter."""
        base = getattr(gradient, "_base", None)
        reduced = (each() for each in self._reduced.values())
        return any(each is not None and (each is gradient or each is base) for each in reduced)

    def has_reference_to(self, gradient: Any) -> bool:
        """Return whether this object has a weak reference to the gradient."""
        return any(each() is gradient for each in (*self._reduced.values(), *(own for own, _ in self._used.values())))

    def take_error(self, index: int) -> EngineError | None:
        """Return the error, if any, about a gradient to which a backward in `no_sync` has added after its reduction."""
        name = self._mixed.pop(index, None)
        return None if name is None else self._error(name)

    def record_pass(self, parameters: list[Any]) -> None:
        """Record all gradients after a pass, including views in their place and results from other ranks."""
        gradients = ((index, parameter.grad) for index, parameter in enumerate(parameters))
        self._reduced = {index: weakref.ref(gradient) for index, gradient in gradients if gradient is not None}

    def record_step(self, parameters: list[Any]) -> None:
        """Note that a step has used the gradients."""
        gradients = ((index, parameter.grad) for index, parameter in enumerate(parameters))
        self._used = {
            index: (weakref.ref(gradient), version)
            for index, gradient in gradients
            if gradient is not None and (version := self._version_of(gradient)) is not None
        }
        self._reduced.clear()
        self._mixed.clear()

    def mark_zeroed(self) -> None:
        """Note that the gradients have been zeroed."""
        self._reduced.clear()
        self._used.clear()
        self._mixed.clear()

    def _is_reduced(self, index: int, parameter: Any) -> bool:
        before = self._reduced.get(index)
        return before is not None and before() is parameter.grad

    def _error(self, name: str) -> EngineError:
        return EngineError(
            f"the gradient of {name!r} was reduced already since the last step() or zero_grad(). With op="
            f"{self._op.name.title()} {'and factors ' if self._op is Average else ''}a second backward would count it "
            "twice: run all but the last backward in optimizer.no_sync(), or use op=Average without factors"
        )
