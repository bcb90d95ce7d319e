"""Adasum for `DistributedOptimizer`, which combines the parameter changes of the ranks' own steps, not gradients.

Each rank's optimizer takes its step with the gradients of that rank alone. The changes of the parameters are sent as
one group, and combined with Adasum for each parameter separately. Every rank adds the result to its former parameters
(Maleki et al., arXiv 2006.02924). So momentum and other state depend on the rank's own gradients, and nothing is
reduced during the backward pass. Changes of parameters on a GPU are sent through the host's memory.

`Deltas` replaces `engine.frameworks.reducer.Reducer`, and has its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from ..collectives import groups
from ..collectives.reduce_ops import Adasum
from ..errors import EngineError, MismatchError
from ..frameworks.agreement import columns_of_absent
from ..frameworks.no_reducer import IdleReducer
from ..frameworks.options import ReductionOptions
from ..session import runtime
from .adapter import check
from .overlaps import held_in


class Deltas(IdleReducer):
    """Parameters of one optimizer with copies from before its step, independent of the optimizer itself.

    The copies take as much memory as the parameters, from the first step on. A rank outside of the options' process set
    gets no parameters. Raises ValueError unless the number of ranks is a power of two.
    """

    def __init__(self, options: ReductionOptions, name: str, number: int) -> None:
        process_set = options.process_set
        size = process_set.size()
        if size & (size - 1):
            raise ValueError(
                f"Adasum needs 1, 2, 4, 8 or another power of two of ranks, and these are {size}; use op=Average"
            )
        self.engine = process_set.engine if process_set.included() else runtime.current_engine()
        self._name = name  # operation that reduces the changes; equal on all ranks, unique to the optimizer
        self._number = number  # number of the optimizer in the process set, which identifies its steps
        self._settings = options.prescale, options.postscale, process_set
        self._alone = size == 1 and options.prescale == options.postscale == 1.0
        self._parameters: dict[str, torch.Tensor] = {}  # in the same order on all ranks
        self._names: list[str] | None = None  # names of `_stepped`; None: all parameters
        self._stepped: list[torch.Tensor] = []  # parameters that the step in progress may change
        # Addresses, and the names that `_pick_parameters` has chosen.
        self._picked: tuple[dict[str, int], list[str]] = {}, []
        self._starts: dict[torch.Tensor, torch.Tensor] = {}  # values of parameters before the step
        self.skipping = False
        self.group = SimpleNamespace(passes=1)  # Passes only add to the gradients, and need not be counted.

    def add(self, named: dict[str, torch.Tensor], trained: Collection[str] = ()) -> None:
        """Add parameters whose changes are to be reduced."""
        for name, parameter in named.items():
            check(parameter, f"parameter {name!r}")
        self._parameters |= named

    def release(self) -> None:
        """Release the engine, whose world has ended."""
        del self.engine

    def before_step(self) -> None:
        """Copy the parameters that the step may change. Frozen ones are not sent: all ranks must freeze the same."""
        stepped = self._pick_parameters()
        self._stepped = list(stepped.values())
        self._names = list(stepped) if len(stepped) < len(self._parameters) else None
        with torch.no_grad():
            for parameter in self._stepped:
                start = self._starts.get(parameter)
                if start is None:
                    self._starts[parameter] = parameter.detach().clone()
                else:
                    start.copy_(parameter)

    def _pick_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that the step may change; only the first one of those that share all their memory.

        Raises EngineError if two of them have a part of their memory in common.
        """
        present = self._parameters.items()  # A step also changes what is frozen and still has a gradient.
        stepped = {name: each for name, each in present if each.requires_grad or each.grad is not None}
        addresses = {name: each.data_ptr() for name, each in stepped.items()}
        if addresses != self._picked[0]:
            self._picked = addresses, self._expect_apart(stepped)
        return {name: stepped[name] for name in self._picked[1]}

    def _expect_apart(self, stepped: dict[str, torch.Tensor]) -> list[str]:
        """Return names of parameters whose memory does not lie in that of others, or raise like `_pick_parameters`."""
        order = sorted(stepped, key=lambda name: -stepped[name].numel())
        held = dict(zip(order, held_in([(stepped[name].detach(), True) for name in order], []), strict=True))
        for name in stepped:
            if held[name] is None:
                raise EngineError(
                    f"parameter {name!r} has a part of its memory in common with another one, and Adasum combines what "
                    "changes in each: give it memory of its own, as parameter.data = parameter.data.clone() does"
                )
        return [name for name in stepped if not held[name]]

    def wrap_closure(self, closure: Callable[[], Any], step: str) -> Callable[[], Any]:
        """Do the same as `before_step`; the closure is returned unchanged, since gradients are not reduced."""
        self.before_step()
        return closure

    def after_step(self) -> None:
        """Replace this rank's changes of the parameters by the combined ones. Collective.

        Errors are those of `engine.allreduce`. After any exception, the parameters have their values from before the
        step.
        """
        stepped, self._stepped = self._stepped, []
        if not self._parameters or self._alone:
            return
        starts = [self._starts[parameter] for parameter in stepped]
        with torch.no_grad():
            try:
                for parameter, start in zip(stepped, starts, strict=True):
                    parameter.sub_(start)
                changes = [each.detach().cpu() for each in stepped]  # no copy if it is in the host's memory
                if self._names is not None:  # Ranks that have frozen other parameters must not match, even in shape.
                    changes.append(torch.empty(0, columns_of_absent(self._names), device="cpu"))
                groups.grouped_allreduce_(changes, Adasum, self._name, *self._settings)
            except MismatchError as error:
                self._put_back(stepped, starts)
                raise MismatchError(f"{error}. {self._left_out()}") from error
            except EngineError:
                self._put_back(stepped, starts)
                raise
            except BaseException:
                # A signal handler has interrupted the wait. The operation still runs, and will write to its tensors.
                for parameter in stepped:
                    parameter.data = self._starts.pop(parameter)
                raise
            for parameter, change, start in zip(stepped, changes[: len(stepped)], starts, strict=True):
                (parameter if parameter.is_cpu else parameter.copy_(change)).add_(start)
        self.engine.mark_step(self._number)

    def _put_back(self, stepped: list[torch.Tensor], starts: list[torch.Tensor]) -> None:
        """Restore the values of parameters from before the step."""
        for parameter, start in zip(stepped, starts, strict=True):
            parameter.copy_(start)

    def _left_out(self) -> str:
        """Return a sentence about the parameters that this rank leaves out."""
        absent = [name for name in self._parameters if self._names is not None and name not in self._names]
        some = ", ".join(map(repr, absent[:5])) + (" and more" if len(absent) > 5 else "")
        which = f"leaves out {some}, frozen or in the memory of others" if absent else "leaves out no parameter"
        return f"Rank {self.engine.rank} {which}; all ranks must leave out the same"

    def skip(self) -> AbstractContextManager[None]:
        """Refuse to skip the reduction of a step: every call raises EngineError."""
        raise EngineError(
            "with op=Adasum step() reduces what it has changed, and cannot skip that. Gradients are each rank's own: "
            "clip them before step(), without synchronize() and skip_synchronize()"
        )
