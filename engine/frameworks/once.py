"""A record of reduced gradients, for operations by which a second reduction would give a wrong result."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..errors import EngineError
from ..native import gradients
from ..types import Average, Op


class Once:
    """Refuses the second reduction of a gradient, where repeating is not harmless. A hook beside the native one."""

    def __init__(self, group: gradients.GradientGroup, op: Op, version_of: Callable[[Any], int | None]) -> None:
        self._group = group
        self._op = op
        self._version_of = version_of
        # The gradient each parameter had when it was reduced: a new tensor there is a new gradient.
        self._reduced: dict[int, weakref.ref[Any]] = {}
        # Those that a step has used since, with their versions: unchanged ones are not reduced again.
        self._used: dict[int, tuple[weakref.ref[Any], int]] = {}
        # The names of reduced gradients to which a backward in `no_sync` has added.
        self._mixed: dict[int, str] = {}

    def hook(self, native: gradients.GradientHook, name: str) -> Callable[[Any], None]:
        """The hook for one parameter."""
        index = native.index

        def check_once(parameter: Any) -> None:
            if self._group.paused:
                if self._is_reduced(index, parameter):
                    self._mixed[index] = name
            elif native.due and not self.admit(index, parameter):
                raise self._error(name)

        return check_once

    def admit(self, index: int, parameter: Any) -> bool:
        """Note that a gradient is being reduced; False if that has happened to it before."""
        if parameter.grad is None or self._is_reduced(index, parameter):
            return False
        self._reduced[index] = weakref.ref(parameter.grad)
        return True

    def admit_rest(self, index: int, parameter: Any) -> bool:
        """As `admit`, for a gradient whose hook has not fired: it may be what an earlier step has left behind."""
        gradient, version = self._used.get(index, (None, 0))
        if (
            gradient is not None
            and gradient() is parameter.grad is not None
            and version == self._version_of(parameter.grad)
        ):
            return False
        return self.admit(index, parameter)

    def knows(self, gradient: Any) -> bool:
        """Whether a gradient was reduced as that of any parameter, itself or with what it is a view of."""
        base = getattr(gradient, "_base", None)
        reduced = (each() for each in self._reduced.values())
        return any(each is not None and (each is gradient or each is base) for each in reduced)

    def remembers(self, gradient: Any) -> bool:
        """Whether there is a weak reference to this gradient."""
        return any(each() is gradient for each in (*self._reduced.values(), *(own for own, _ in self._used.values())))

    def fault(self, index: int) -> EngineError | None:
        """The error about a gradient to which a backward in `no_sync` has added after it was reduced."""
        name = self._mixed.pop(index, None)
        return None if name is None else self._error(name)

    def settle(self, parameters: list[Any]) -> None:
        """Record the gradients after a pass: views in place of gradients, and results that came from other ranks."""
        gradients = ((index, parameter.grad) for index, parameter in enumerate(parameters))
        self._reduced = {index: weakref.ref(gradient) for index, gradient in gradients if gradient is not None}

    def use(self, parameters: list[Any]) -> None:
        """Note that a step has used the gradients."""
        gradients = ((index, parameter.grad) for index, parameter in enumerate(parameters))
        self._used = {
            index: (weakref.ref(gradient), version)
            for index, gradient in gradients
            if gradient is not None and (version := self._version_of(gradient)) is not None
        }
        self._reduced.clear()
        self._mixed.clear()

    def forget(self) -> None:
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
