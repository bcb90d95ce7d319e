"""Reduces the gradients of one optimizer's parameters while backward runs, and is done when backward returns.

A hook on each parameter submits its gradient the moment autograd has accumulated it. The first hook of a backward pass
queues `finish` behind the whole pass; there the rank announces which parameters got no gradient, waits for the
reductions, and puts things in place. So clipping, gradient scaling and `step` see averaged gradients without ceremony.

**Who contributes.** Every rank contributes the gradients it has. A parameter without one here but with one elsewhere
gets the others' result, to which this rank added zeros; without one anywhere it keeps None.

**Two backwards before a step.** The second pass adds its local gradient L to the average R of the first, and the sum is
reduced again. Ranks hold the same R, so avg(R + L) = R + avg(L): right for Average, at the price of a second reduction,
which `no_sync` saves. For every other operation it would be wrong, and raises an error.

**Nested passes.** Reentrant activation checkpointing runs a backward inside a backward. If the outer pass met a hooked
parameter first, `finish` is queued behind the outer pass and the inner ones join it. If not, the inner pass is finished
by itself, and what follows begins anew, as with two backwards. `use_reentrant=False` has no nested passes.

**Several passes before a reduction** (`backward_passes_per_step`): each hook counts, and brings its gradient in the
last of them. `step` reduces what fewer passes have left.

**Gradients that share memory.** Each is reduced in place, so shared memory would be reduced twice. In the first passes,
and when hooks fire in a new order, what shares memory gets a copy of its own, for good; a comparison at the end of
every pass raises an error about what was missed.

**Sparse gradients** are gathered, as what they store, and added up here. A rank without a gradient need not know that
the others' is sparse: the coordinator takes what it says for an empty one. They travel as they are.

**Gradients that Python compresses** (`engine.torch.rounds`) are deferred: their hooks only count and take note, and
`finish` reduces them when all others are done, in the same order on every rank.

**A pass that raises** never reaches `finish`. The next `zero_grad`, `step` or `synchronize` finishes for it, so that
the other ranks, which wait for this one's gradients, can go on.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import runtime
from ..errors import EngineError, UnsupportedTensorError, WorldError
from ..native import core, gradients
from ..process_sets import ProcessSet
from ..types import Average, Op
from . import sparse
from .adapter import check, tensor_over
from .rounds import Rounds, scheme_of

ALIGNMENT = 64  # bytes: a cache line, so that no two gradients share one


class Once:
    """Refuses the second reduction of a gradient, where repeating is not harmless. A hook beside the native one."""

    def __init__(self, group: gradients.GradientGroup, op: Op) -> None:
        self._group = group
        self._op = op
        # The gradient each parameter had when it was reduced: a new tensor there is a new gradient.
        self._reduced: dict[int, weakref.ref[torch.Tensor]] = {}

    def hook(self, native: gradients.GradientHook, name: str) -> Callable[[torch.Tensor], None]:
        """The hook for one parameter."""
        index = native.index

        def check_once(parameter: torch.Tensor) -> None:
            if not self._group.paused and native.due and not self.admit(index, parameter):
                raise EngineError(
                    f"the gradient of {name!r} was reduced already since the last step() or zero_grad(). With op="
                    f"{self._op.name.title()} a second backward would count it twice: run all but the last backward "
                    "in optimizer.no_sync(), or use op=Average"
                )

        return check_once

    def admit(self, index: int, parameter: torch.Tensor) -> bool:
        """Note that a gradient is being reduced; False if that has happened to it before."""
        gradient = parameter.grad
        before = self._reduced.get(index)
        if gradient is None or (before is not None and before() is gradient):
            return False
        self._reduced[index] = weakref.ref(gradient)
        return True

    def settle(self, parameters: list[torch.Tensor]) -> None:
        """Note what the parameters have after a pass: views in place of gradients, and what came from other ranks."""
        gradients = ((index, parameter.grad) for index, parameter in enumerate(parameters))
        self._reduced = {index: weakref.ref(gradient) for index, gradient in gradients if gradient is not None}

    def forget(self) -> None:
        """The gradients have been used, or zeroed."""
        self._reduced.clear()


class Reducer:
    """Hooks and state for the parameters of one optimizer. It knows nothing of the optimizer itself.

    Parameters
    ----------
    process_set : ProcessSet
        Whose ranks reduce with each other. A rank that is not in it is given no parameters.
    op : Op
    prescale, postscale : float
        Multiply the local gradients, and the result.
    views : bool
        Keep gradients in shared memory.
    sparse_as_dense : bool
        Make sparse gradients dense, instead of gathering what they store.
    compression : optional
        A compressor or a `Scheme`.
    number : int
        Of the optimizer, among those of the process set: whose step it is that ends.
    """

    def __init__(
        self,
        process_set: ProcessSet,
        op: Op,
        prescale: float,
        postscale: float,
        views: bool,
        sparse_as_dense: bool = False,
        compression: Any = None,
        number: int = 0,
    ) -> None:
        self.engine = process_set.engine if process_set.included() else runtime.engine()
        self._op = op
        self._scales = prescale, postscale
        self._views = views
        self._sparse_as_dense = sparse_as_dense
        self._wire, scheme = scheme_of(compression, op)
        self._rounds = Rounds(scheme, op, prescale, postscale, process_set, self._wire)
        self.group = gradients.GradientGroup(
            self.engine,
            int(op),
            prescale,
            postscale,
            self._on_first,
            self._on_slow,
            _shares,
            _apart,
            self._wire,
            number,
        )
        self._once = None if op is Average else Once(self.group, op)
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        self._bucket: list[torch.Tensor | None] = []
        self._native: list[gradients.GradientHook] = []
        self._hooks: list[Any] = []
        self._frozen: dict[str, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, named: dict[str, torch.Tensor]) -> None:
        """Hook parameters. Collective if gradients live in shared memory.

        Raises
        ------
        ValueError
            Another reducer has one of them: two reductions of one gradient at a time would spoil it.
        """
        if any(map(_is_hooked, named.values())):
            gc.collect()  # An optimizer that was dropped may live on in a cycle with its scheduler.
        for name, parameter in named.items():
            if _is_hooked(parameter):
                raise ValueError(
                    f"parameter {name!r} belongs to another DistributedOptimizer, which reduces its gradient already; "
                    "unwrap() that one first"
                )
        active = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._frozen.update({name: parameter for name, parameter in named.items() if not parameter.requires_grad})
        deferred = {name for name, parameter in active.items() if self._rounds.accepts(name, parameter)}
        views: dict[str, torch.Tensor | None] = dict.fromkeys(active)
        for name, parameter in active.items():
            check(parameter, f"parameter {name!r}")
        if self._views:
            views |= share(self.engine, {name: each for name, each in active.items() if name not in deferred})
        for name, parameter in active.items():
            hook = self.group.add(parameter, name, views[name], name in deferred)
            if name in deferred:
                self._rounds.add(hook.index, name, parameter)
            if self._once is not None:
                self._hooks.append(_hook(parameter, self._once.hook(hook, name)))
            self._hooks.append(_hook(parameter, hook))
            hook.found_in(parameter._post_accumulate_grad_hooks)
            self._native.append(hook)
            self._parameters.append(parameter)
            self._names.append(name)
            self._bucket.append(views[name])

    def before_step(self) -> None:
        """Finish what a pass could not; take over parameters that have been unfrozen since."""
        self.finish()
        for name, parameter in self._thaw().items():
            if parameter.grad is not None:  # From passes before there was a hook.
                self._reduce_now(f"{name}.thawed", parameter, parameter.grad)

    def after_step(self) -> None:
        """The gradients have been used."""
        self.forget()

    def skip(self) -> None:
        """Nothing has to be skipped: `step` reduces nothing that `backward` has reduced."""

    def before_zero(self) -> None:
        """As `before_step`, except that old gradients do not matter any more."""
        self.finish(discard=True)
        self._thaw()

    def forget(self) -> None:
        """The gradients have been used, or zeroed."""
        if self._once is not None:
            self._once.forget()

    def renew(self) -> None:
        """There are no gradients any more: the next pass makes new ones."""
        self.group.fresh = True

    def finish(self, discard: bool = False) -> None:
        """Complete the pass that is under way on this rank, if any.

        A gradient that cannot be reduced counts as none, so that the other ranks can go on. It is an error, unless
        gradients are to be discarded: then `backward` has raised it.
        """
        if not self.group.active and (discard or not self.group.touched):
            self.group.restart()
            return
        try:
            refused = self._submit_rest()
            brought = self._reduce()
            with torch.no_grad():
                for gradient, copy in self._copies:
                    gradient.copy_(copy)
                for index, memory in brought:
                    self._bring(index, memory)
            if self._once is not None:
                self._once.settle(self._parameters)
        finally:
            self._copies.clear()
        if refused is not None and not discard:
            raise refused

    def _reduce(self) -> list[tuple[int, Any]]:
        """Complete what the hooks have brought, then what they have left. See `GradientGroup.finish`."""
        missing = self.group.missing()
        try:
            brought = self.group.finish()
        except WorldError:
            raise
        except EngineError:
            self._rounds.run(missing)  # It may be an error of this rank alone: the others have gone on to the rounds.
            raise
        self._rounds.run(missing)
        return brought

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Accumulate locally."""
        before = self.group.paused
        self.group.paused = True
        try:
            yield
        finally:
            self.group.paused = before

    def _submit_rest(self) -> UnsupportedTensorError | None:
        """Submit gradients that this pass did not touch: accumulated in `no_sync`, or by an earlier pass.

        The earlier result R must be contributed by every rank when one adds to it; else R would lose this rank's share.
        Returns the error of the first that cannot be reduced.
        """
        rest = self.group.missing()
        if not rest:
            return None
        refused = None
        paused, self.group.paused, self.group.urgent = self.group.paused, False, True
        try:
            for index in rest:
                parameter = self._parameters[index]
                if parameter.grad is not None and (self._once is None or self._once.admit(index, parameter)):
                    try:
                        self._native[index](parameter)
                    except UnsupportedTensorError as error:
                        refused = refused or error
        finally:
            self.group.paused, self.group.urgent = paused, False
        return refused

    def _thaw(self) -> dict[str, torch.Tensor]:
        """Hook parameters that require a gradient by now."""
        thawed = {name: parameter for name, parameter in self._frozen.items() if parameter.requires_grad}
        if thawed:
            for name in thawed:
                del self._frozen[name]
            self.add(thawed)
        return thawed

    def _bring(self, index: int, memory: Any) -> None:
        """Give a parameter a result that does not lie in its gradient: it had none here, or a sparse one."""
        parameter, view = self._parameters[index], self._bucket[index]
        if isinstance(memory, list):  # Gathered indices and values.
            gradient = parameter if parameter.grad is None else parameter.grad
            parameter.grad = sparse.add_up(memory, gradient.dtype, parameter.shape, self._op, *self._scales)
        else:
            parameter.grad = tensor_over(memory, parameter) if view is None else view

    def _on_first(self) -> None:
        """Queue `finish` behind the pass that is running."""
        if self.group.watched:
            # At most one gradient is there by now: that of the hook which has just fired.
            self.group.fresh = sum(parameter.grad is not None for parameter in self._parameters) <= 1
        # Compiled autograd runs hooks outside any pass and takes no callbacks; `before_step` finishes then.
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _on_slow(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | sparse.Brought:
        """A contiguous copy of a gradient that cannot be reduced where it is, or what is sent of a sparse one."""
        if gradient.layout is not torch.strided:
            fault = sparse.fault_of(gradient) if self._sparse_as_dense and gradient.layout is torch.sparse_coo else None
            if fault is not None and index in self._rounds:
                raise UnsupportedTensorError(
                    f"the gradient of {self._names[index]!r} is sparse, and its indices are not in order or not in its "
                    f"shape, {list(gradient.shape)}"
                )
            if not self._sparse_as_dense and index in self._rounds:
                raise UnsupportedTensorError(
                    f"the gradient of {self._names[index]!r} is sparse, and this compression is made for dense ones: "
                    "construct DistributedOptimizer with sparse_as_dense=True, or with Compression.none, fp16 or bf16, "
                    "which leave sparse gradients as they are"
                )
            if not self._sparse_as_dense or fault is not None:
                return sparse.bring(gradient, self._op, f"the gradient of {self._names[index]!r}")
            gradient = gradient.to_dense()
            parameter.grad = gradient
        check(gradient, f"the gradient of {self._names[index]!r}")
        gradient = gradient.detach()
        if index in self._rounds:
            return gradient
        copy = gradient.contiguous()
        if copy.data_ptr() != gradient.data_ptr():
            self._copies.append((gradient, copy))
        return copy

    def _reduce_now(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            if not self._sparse_as_dense or (gradient.layout is torch.sparse_coo and sparse.fault_of(gradient)):
                handle = sparse.start(self.engine, gradient, name, self._op, *self._scales, blocking=True)
                parameter.grad = handle.wait()
                return
            gradient = parameter.grad = gradient.to_dense()
        check(gradient, f"{name!r}")
        flat = gradient.detach().contiguous()
        self.engine.allreduce(flat, flat, name, int(self._op), *self._scales, True, self._wire).wait()
        if flat.data_ptr() != gradient.data_ptr():
            gradient.copy_(flat)


def _shares(gradient: torch.Tensor) -> bool:
    """Whether anything else looks at a gradient's memory, or it does not lie there as it is.

    Autograd may give several parameters views of one buffer: `(a.view(-1) + b.view(-1)).backward()` does. Before the
    first of them is reduced the buffer has more users than the gradient and the storage object made here to count.
    """
    if gradient.layout is not torch.strided:
        return False
    return gradient.is_neg() or torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > 2


def _apart(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Give a parameter a gradient of its own, with the same values."""
    check(gradient, "a gradient")
    gradient = gradient.resolve_neg().clone()
    parameter.grad = gradient
    return gradient


def _is_hooked(parameter: torch.Tensor) -> bool:
    """Whether some reducer has hooked this parameter."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, gradients.GradientHook) for hook in hooks.values())


def _hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def share(engine: core.Engine, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor in shared memory for each parameter, zeroed, with its dtype, shape and memory format. Collective.

    Parameters that are neither row-major nor channels_last get a row-major gradient.
    """
    places, total = {}, 0
    for name, parameter in named.items():
        places[name] = total
        total += -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT
    if not total:
        return {name: torch.empty_like(parameter) for name, parameter in named.items()}
    memory = torch.frombuffer(engine.share(total), dtype=torch.uint8)
    views = {}
    for name, parameter in named.items():
        start, nbytes = places[name], parameter.numel() * parameter.element_size()
        views[name] = tensor_over(memory[start : start + nbytes].view(parameter.dtype), parameter)
    return views
