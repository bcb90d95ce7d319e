"""Adasum for `DistributedOptimizer`: it combines what the ranks' own steps change, not their gradients.

Each rank's optimizer takes its step on the gradients of that rank alone. The changes of the parameters travel as one
group, are combined with Adasum, each parameter by itself, and every rank sets its parameters to what they were plus
the result (Maleki et al., arXiv 2006.02924). So momentum and other state stay those of the rank's own gradients, and
the engine has nothing to do during backward. Changes of parameters on a GPU travel through the host's memory.

`Deltas` takes the place of `engine.frameworks.reducer.Reducer`, whose methods it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from .. import groups, runtime
from ..errors import EngineError, MismatchError
from ..frameworks.agreement import columns_of_absent
from ..frameworks.options import Options
from ..types import Adasum
from .adapter import check
from .overlaps import held_in


class Deltas:
    """The parameters of one optimizer, and what they were before its step. It knows nothing of the optimizer itself.

    Takes as much memory as the parameters, from the first step on.

    Parameters
    ----------
    options : Options
        Of the optimizer. A rank that is not in their process set is given no parameters.
    name : str
        Of the operation that reduces the changes; equal on all ranks, unique to the optimizer.
    number : int
        Of the optimizer, among those of the process set: whose step it is that ends.

    Raises
    ------
    ValueError
        The number of ranks is no power of two.
    """

    def __init__(self, options: Options, name: str, number: int) -> None:
        process_set = options.process_set
        size = process_set.size()
        if size & (size - 1):
            raise ValueError(
                f"Adasum combines ranks in pairs of pairs: it takes 1, 2, 4, 8 .. ranks, and these are {size}; "
                "use op=Average"
            )
        self.engine = process_set.engine if process_set.included() else runtime.engine()
        self._name = name
        self._number = number
        self._settings = options.prescale, options.postscale, process_set
        self._alone = size == 1 and options.prescale == options.postscale == 1.0
        self._parameters: dict[str, torch.Tensor] = {}  # in one order on all ranks
        self._names: list[str] | None = None  # of those that the step in progress may change, if that leaves out some
        self._stepped: list[torch.Tensor] = []  # parameters that the step in progress may change
        self._picked: tuple[dict[str, int], list[str]] = {}, []  # addresses, and the names that `_pick` has chosen
        self._starts: dict[torch.Tensor, torch.Tensor] = {}  # their values before it
        self.skipping = False
        self.group = SimpleNamespace(passes=1)  # passes only add to the gradients: nobody has to count them

    def add(self, named: dict[str, torch.Tensor], trained: Collection[str] = ()) -> None:
        """Reduce the changes of these parameters, too."""
        for name, parameter in named.items():
            check(parameter, f"parameter {name!r}")
        self._parameters |= named

    def remove(self) -> None:
        """Nothing hangs on the parameters."""

    def release(self) -> None:
        """Let go of the engine, whose world has ended."""
        del self.engine

    def share_state(self, root: int | None) -> None:
        """Nothing has to be equal on all ranks but the parameters."""

    def before_step(self) -> None:
        """Remember the parameters. Those that are frozen stay at home: all ranks must freeze the same."""
        stepped = self._pick()
        self._stepped = list(stepped.values())
        self._names = list(stepped) if len(stepped) < len(self._parameters) else None
        with torch.no_grad():
            for parameter in self._stepped:
                start = self._starts.get(parameter)
                if start is None:
                    self._starts[parameter] = parameter.detach().clone()
                else:
                    start.copy_(parameter)

    def _pick(self) -> dict[str, torch.Tensor]:
        """Parameters that the step may change. Of those that are one memory, which changes once, the first one.

        Raises
        ------
        EngineError
            Two of them have a part of their memory in common.
        """
        present = self._parameters.items()  # A step also changes what is frozen and still has a gradient.
        stepped = {name: each for name, each in present if each.requires_grad or each.grad is not None}
        addresses = {name: each.data_ptr() for name, each in stepped.items()}
        if addresses != self._picked[0]:
            self._picked = addresses, self._expect_apart(stepped)
        return {name: stepped[name] for name in self._picked[1]}

    def _expect_apart(self, stepped: dict[str, torch.Tensor]) -> list[str]:
        """The names of parameters but for those whose memory is in others'; see `_pick` for the error."""
        order = sorted(stepped, key=lambda name: -stepped[name].numel())
        held = dict(zip(order, held_in([(stepped[name].detach(), True) for name in order], []), strict=True))
        for name in stepped:
            if held[name] is None:
                raise EngineError(
                    f"parameter {name!r} has a part of its memory in common with another one, and Adasum combines what "
                    "changes in each: give it memory of its own, as parameter.data = parameter.data.clone() does"
                )
        return [name for name in stepped if not held[name]]

    def around(self, closure: Callable[[], Any], step: str) -> Callable[[], Any]:
        """As `before_step`; each rank calls the closure for itself."""
        self.before_step()
        return closure

    def after_step(self) -> None:
        """Put the combined changes in place of this rank's own. Collective.

        Raises
        ------
        EngineError
            As for `engine.allreduce`. The parameters are then what they were before the step, as after any exception.
        """
        stepped, self._stepped = self._stepped, []
        if not self._parameters or self._alone:
            return
        starts = [self._starts[parameter] for parameter in stepped]
        with torch.no_grad():
            try:
                for parameter, start in zip(stepped, starts, strict=True):
                    parameter.sub_(start)
                changes = [each.detach().cpu() for each in stepped]  # what is in the host's memory is not copied
                if self._names is not None:  # Ranks that have frozen others, of equal shapes, do not pair what is left.
                    changes.append(torch.empty(0, columns_of_absent(self._names), device="cpu"))
                groups.grouped_allreduce_(changes, Adasum, self._name, *self._settings)
            except MismatchError as error:
                self._put_back(stepped, starts)
                raise MismatchError(f"{error}. {self._left_out()}") from error
            except EngineError:
                self._put_back(stepped, starts)
                raise
            except BaseException:
                # A signal handler has ended the wait: the operation goes on, and will write where it was told to.
                for parameter in stepped:
                    parameter.data = self._starts.pop(parameter)
                raise
            for parameter, change, start in zip(stepped, changes[: len(stepped)], starts, strict=True):
                (parameter if parameter.is_cpu else parameter.copy_(change)).add_(start)
        self.engine.mark_step(self._number)

    def _put_back(self, stepped: list[torch.Tensor], starts: list[torch.Tensor]) -> None:
        """Give parameters the values from before the step."""
        for parameter, start in zip(stepped, starts, strict=True):
            parameter.copy_(start)

    def _left_out(self) -> str:
        """Which parameters stay at home on this rank, as a sentence."""
        absent = [name for name in self._parameters if self._names is not None and name not in self._names]
        some = ", ".join(map(repr, absent[:5])) + (" and more" if len(absent) > 5 else "")
        which = f"leaves out {some}, frozen or in the memory of others" if absent else "leaves out no parameter"
        return f"Rank {self.engine.rank} {which}; all ranks must leave out the same"

    def before_zero(self) -> None:
        """Gradients belong to the rank."""

    def forget(self) -> None:
        """Gradients belong to the rank."""

    def renew(self) -> None:
        """Gradients belong to the rank."""

    def finish(self) -> None:
        """Nothing is in flight but in `after_step`."""

    def synchronize(self) -> None:
        """Gradients belong to the rank."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Passes accumulate on this rank in any case."""
        yield

    def skip(self) -> AbstractContextManager[None]:
        """Refuse a step that would not be reduced.

        Raises
        ------
        EngineError
            Always.
        """
        raise EngineError(
            "with op=Adasum step() reduces what it has changed, and cannot skip that. Gradients are each rank's own: "
            "clip them before step(), without synchronize() and skip_synchronize()"
        )
