"""Reduces the gradients of one optimizer's parameters while backward runs, and is done when backward returns.

A hook on each parameter submits its gradient the moment autograd has accumulated it. The first hook of a backward pass
queues `_end_of_pass` behind the whole pass; there the rank announces which parameters got no gradient, waits for the
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

**Every step is preceded by a reduction.** If none has taken place since the last `step` or `zero_grad`, `step` makes
one of the gradients that there are, by whomever they were set; a rank without any announces that, because the others
may wait for it in their `backward`. A gradient that was reduced since then belongs to the program, which may clip or
replace it: it is not reduced again. With a closure the reduction follows each of its calls.

**Several optimizers in one pass.** Each announces what it has not before any of them waits: the ranks' passes may end
in different orders.

**Gradients that share memory.** Each is reduced in place, so shared memory would be reduced twice. In the first passes,
and when hooks fire in a new order, what shares memory gets a copy of its own, for good; a comparison at the end of
every pass raises an error about what was missed.

**Sparse gradients** are gathered, as what they store, and added up here. A rank without a gradient need not know that
the others' is sparse: the coordinator takes what it says for an empty one. They travel as they are.

**Gradients that Python compresses** (`engine.torch.scheme_reducer`) are deferred: their hooks only count and take note,
and `finish` reduces them when all others are done, in the same order on every rank.

**A pass that raises** never reaches its end. The next `zero_grad`, `step` or `synchronize` finishes for it, so that
the other ranks, which wait for this one's gradients, can go on.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from .once import Once
from .scheme_reducer import Rounds, scheme_of

ALIGNMENT = 64  # bytes: a cache line, so that no two gradients share one
NO_PASS = -1  # what torch calls the pass that is running when there is none
COMPILER = "torch._dynamo.compiled_autograd"
COMPILING = "in_compiled_autograd_region", "compiled_autograd_enabled"  # of that module, by the version of torch
COMPILED = (
    "DistributedOptimizer does not go with compiled autograd, which calls gradient hooks outside of a pass and "
    "goes on before gradients are reduced: leave out torch._dynamo.config.compiled_autograd and "
    "compiled_autograd._enable. torch.compile of the model works without them"
)

_live: weakref.WeakSet[Reducer] = weakref.WeakSet()


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
        self._pass = NO_PASS  # the one whose end was queued
        self._due = True  # Nothing was reduced since the last step or zero_grad, or no_sync has accumulated since.
        self._announced = False  # This rank has brought everything that it has, and still waits for it.
        self._missing: list[int] = []  # what it had no gradient for
        self._refused: EngineError | None = None
        self._empty: list[int] = []  # parameters that no rank had a gradient for
        self._skipping = False
        self._unused: str | None = None  # the step whose closure was not called yet
        _live.add(self)

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

    def before_step(self, thawed: Sequence[int] = ()) -> None:
        """Reduce what `backward` has not reduced; take over parameters that have been unfrozen since.

        `thawed`: those that have been taken over for this step already.
        """
        self._unused = None
        thawed = [*thawed, *self._thaw()]
        if not self._skipping:
            self._complete(thawed)
        elif self.group.active:
            self.finish()
        else:
            self.group.restart()

    def around(self, closure: Callable[[], Any], step: str) -> Callable[[], Any]:
        """A closure in whose every call gradients are reduced, for a step that begins."""
        thawed = self._thaw()
        if self.group.active:
            self.finish()  # The others wait for a pass that an exception has cut short.

        def reduced() -> Any:
            result = closure()
            self.before_step(thawed)
            thawed.clear()
            return result

        self._unused = step
        return reduced

    def after_step(self) -> None:
        """The gradients have been used.

        Raises
        ------
        EngineError
            They had not been reduced: the closure, which is followed by that, was never called.
        """
        unused, self._unused = self._unused, None
        unreduced = unused and bool(self._parameters) and (self._due or self.group.touched) and not self._skipping
        self._due = True
        if self._once is not None:
            self._once.use(self._parameters)
        if unreduced:
            raise EngineError(
                f"{unused} was given a closure and has not called it, so it has used gradients of this rank alone: "
                "call step() without a closure, which then reduces them before"
            )

    @contextmanager
    def skip(self) -> Iterator[None]:
        """`step` uses the gradients that are there, reduced or not; only a pass that is under way is completed."""
        before, self._skipping = self._skipping, True
        try:
            yield
        finally:
            self._skipping = before

    def before_zero(self) -> None:
        """Finish what a pass could not, except that old gradients do not matter any more."""
        self.finish(discard=True)
        self._thaw()

    def forget(self) -> None:
        """The gradients have been zeroed."""
        self._due = True
        if self._once is not None:
            self._once.forget()

    def renew(self) -> None:
        """There are no gradients any more: the next pass makes new ones."""
        self.group.fresh = True

    def synchronize(self) -> None:
        """Reduce what was not reduced since the last step or `zero_grad`, if there is anything."""
        self._complete(self._thaw())

    def _complete(self, thawed: list[int]) -> None:
        """Make sure that all gradients are reduced. Collective if nothing was since the last step or `zero_grad`.

        After a reduction there is nothing left but what no rank had a gradient for then, and parameters without a hook.
        """
        if not self._parameters:
            return
        if self._due:
            self._reduce_all()
            return
        self.finish()
        late = [index for index in self._empty if self._parameters[index].grad is not None]
        if thawed or late:
            self._reduce_all({*thawed, *late})

    def finish(self, discard: bool = False) -> None:
        """Complete the pass that is under way on this rank, if any.

        A gradient that cannot be reduced counts as none, so that the other ranks can go on. It is an error, unless
        gradients are to be discarded: then `backward` has raised it.
        """
        if not self.group.active and (discard or not self.group.touched):
            self.group.restart()
            return
        self._reduce_all(discard=discard)

    def _reduce_all(self, only: set[int] | None = None, discard: bool = False) -> None:
        """Reduce the gradients that this pass has not brought yet, and wait for all. `only`: as for `_announce`."""
        try:
            self._announce(only)
            brought = self._reduce()
            with torch.no_grad():
                for gradient, copy in self._copies:
                    gradient.copy_(copy)
                for index, memory in brought:
                    self._bring(index, memory)
            if self._once is not None:
                self._once.settle(self._parameters)
            self._empty = [index for index in self._missing if self._parameters[index].grad is None]
        finally:
            if not self.group.active:  # else a signal handler has ended the wait, which goes on later
                self._copies.clear()
        refused, self._refused = self._refused, None
        if refused is not None and not discard:
            raise refused

    def _announce(self, only: set[int] | None = None) -> None:
        """Bring what this pass has not: gradients that there are (of `only` these), and word of those that are not."""
        if self._announced:
            return
        self._refused = self._submit_rest(only)
        self._missing = self.group.missing()
        self.group.announce()
        self._announced = True

    def _reduce(self) -> list[tuple[int, Any]]:
        """Complete what the hooks have brought, then what they have left. See `GradientGroup.finish`."""
        try:
            brought = self.group.finish()
        except WorldError:
            raise
        except EngineError:
            # It may be an error of this rank alone: the others have gone on to the rounds.
            self._rounds.run(self._missing)
            raise
        finally:
            self._announced = self._due = self.group.active  # A signal may have ended the wait: then it goes on later.
        self._rounds.run(self._missing)
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
        self.group.paused = self._due = True
        try:
            yield
        finally:
            self.group.paused = before

    def _submit_rest(self, only: set[int] | None) -> EngineError | None:
        """Submit gradients that this pass did not touch: accumulated in `no_sync`, by an earlier pass, or set by hand.

        The earlier result R must be contributed by every rank when one adds to it; else R would lose this rank's share.
        Returns the error of the first that cannot be reduced.
        """
        rest = [index for index in self.group.missing() if only is None or index in only]
        if not rest:
            return None
        refused: EngineError | None = None
        paused, self.group.paused, self.group.urgent = self.group.paused, False, True
        try:
            for index in rest:
                parameter = self._parameters[index]
                if parameter.grad is None:
                    continue
                if self._once is not None:
                    refused = refused or self._once.fault(index)
                    if not self._once.admit_rest(index, parameter):
                        continue
                try:
                    self._native[index](parameter)
                except UnsupportedTensorError as error:
                    refused = refused or error
        finally:
            self.group.paused, self.group.urgent = paused, False
        return refused

    def _thaw(self) -> list[int]:
        """Hook parameters that require a gradient by now; their indices."""
        thawed = {name: parameter for name, parameter in self._frozen.items() if parameter.requires_grad}
        if thawed:
            for name in thawed:
                del self._frozen[name]
            self.add(thawed)
        return list(range(len(self._parameters) - len(thawed), len(self._parameters)))

    def _bring(self, index: int, memory: Any) -> None:
        """Give a parameter a result that does not lie in its gradient: it had none here, or a sparse one."""
        parameter, view = self._parameters[index], self._bucket[index]
        if isinstance(memory, list):  # Gathered indices and values.
            gradient = parameter if parameter.grad is None else parameter.grad
            parameter.grad = sparse.add_up(memory, gradient.dtype, parameter.shape, self._op, *self._scales)
        else:
            parameter.grad = tensor_over(memory, parameter) if view is None else view

    def _on_first(self) -> None:
        """Queue the end of the pass that is running."""
        running = torch._C._current_graph_task_id()
        if self.group.urgent:  # No pass, but a step or the end of one: nothing else fires.
            self.group.fresh = False
            return
        compiler = sys.modules.get(COMPILER)
        if running == NO_PASS or any(getattr(compiler, state, False) for state in COMPILING):
            raise EngineError(COMPILED)
        if self.group.watched:
            # At most one gradient is there by now: that of the hook which has just fired.
            self.group.fresh = sum(parameter.grad is not None for parameter in self._parameters) <= 1
        self._pass = running
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_pass)

    def _end_of_pass(self) -> None:
        """Complete the pass. Before this optimizer waits, all that take part in it announce what they have not."""
        if not self.group.active:
            return
        for each in list(_live):
            if each.group.active and each._pass == self._pass:
                each._announce()
        self.finish()

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
        if any(stride == 0 and length > 1 for stride, length in zip(gradient.stride(), gradient.shape, strict=True)):
            parameter.grad = copy  # Elements that share memory, as of an expanded tensor, cannot be written to.
        elif copy.data_ptr() != gradient.data_ptr():
            self._copies.append((gradient, copy))
        return copy


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
