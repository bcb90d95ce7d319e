"""Reduction of one optimizer's gradients during the backward pass, complete when `backward` returns.

This is for frameworks whose backward pass calls a hook for each parameter. A binding derives from `Reducer` and
implements its abstract methods. A parameter has the attributes `grad` and `requires_grad`.

A hook on each parameter submits its gradient as soon as autograd has accumulated it. The first hook of a backward pass
queues `end_of_pass` for the end of the pass. There the rank announces which parameters got no gradient, waits for the
reductions, and stores the results. So clipping, gradient scaling and `step` see averaged gradients.

**Contributions.** Every rank contributes the gradients that it has. A parameter without a gradient on this rank gets
the others' result, with zeros from this rank; without a gradient on any rank it keeps None.

**Two backward passes before a step.** The second pass adds its local gradient L to the average R of the first, and the
sum is reduced again. All ranks have the same R, so avg(R + L) = R + avg(L). This is right for Average, at the price of
a second reduction, which `no_sync` saves. For other operations, and averages with factors, it raises an error.

**Several passes before a reduction** (`backward_passes_per_step`): each hook counts, and submits its gradient in the
last pass. `step` reduces the gradients of an incomplete window.

**Every step is preceded by a reduction.** If there was none since the last `step` or `zero_grad`, `step` reduces all
existing gradients, including those that were set by hand. A rank without any announces that, because the others may
wait for it in their `backward`. After its reduction a gradient belongs to the program, which may clip or replace it; it
is not reduced again. With a closure, a reduction follows each of its calls.

**Several optimizers in one pass.** Each announces its missing gradients before any of them waits, since the ranks'
passes may end in different orders.

**Gradients that share memory.** Gradients are reduced in place, so shared memory would be reduced twice. In the first
passes, and when hooks fire in a new order, gradients that share memory get permanent copies of their own. A comparison
at the end of every pass raises an error about missed ones. A gradient that no hook has submitted, and that lies in
others that are reduced, was tied to them by the program. It is reduced with them, and left alone (`_find_tied`).

**Sparse gradients** are gathered entry by entry, and added up on this rank, without compression. A rank without a
gradient need not know that the others' is sparse: the coordinator counts its announcement as an empty one.

**Gradients that Python compresses** (`engine.frameworks.scheme_reducer`) are deferred: their hooks only count, and
`finish` reduces them after all others, in the same order on every rank.

**A pass that raises** never reaches its end. The next `zero_grad`, `step` or `synchronize` completes it, so that the
other ranks, which wait for this one's gradients, can continue.
"""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..errors import EngineError, UnsupportedTensorError, WorldError
from ..native import gradients
from ..session import runtime
from .once import Once
from .options import ReductionOptions
from .scheme_reducer import Rounds, scheme_of

Parameter = Any  # a parameter of the framework, with `grad` and `requires_grad`
Tensor = Any

live: weakref.WeakSet[Reducer] = weakref.WeakSet()


class Reducer(ABC):
    """Hooks and state for the parameters of one optimizer, independent of the optimizer itself.

    A rank outside of the options' process set gets no parameters. `number` is that of the optimizer in the process set,
    which identifies its steps.
    """

    kind: Any  # class of the framework's tensors

    def __init__(self, options: ReductionOptions, number: int = 0) -> None:
        process_set, op = options.process_set, options.op
        self.engine = process_set.engine if process_set.included() else runtime.current_engine()
        self.options = options
        wire, scheme = scheme_of(options.compression, op)
        self.wire = wire  # dtype to which the engine casts gradients while they are sent
        self.rounds = Rounds(self, scheme, options, wire)  # gradients that a scheme reduces; contains their indices
        self.group = gradients.GradientGroup(
            self.engine, self, int(op), options.prescale, options.postscale, wire, number
        )
        self._once = None if options.repeatable else Once(self.group, op, self.version_of)
        self._parameters: list[Parameter] = []
        self.names: list[str] = []  # names of the parameters, by index
        self._bucket: list[Tensor | None] = []
        self._native: list[gradients.GradientHook] = []
        self._hooks: list[Any] = []
        self._frozen: dict[str, Parameter] = {}
        # Pairs of a gradient of the pass and the copy that is reduced instead, and stored in the gradient at the end
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._pass: Any = None  # the backward pass for whose end a callback was queued
        self._due = True  # whether gradients are unreduced: no reduction since step or zero_grad, or no_sync since
        self._announced = False  # whether all gradients of this rank are submitted, and not yet waited for
        self._missing: list[int] = []  # parameters without a gradient on this rank
        self._refused: EngineError | None = None
        self._tied: list[int] = []  # parameters whose gradient lies in others, and is reduced with them
        self._empty: list[int] = []  # parameters without a gradient on any rank
        self._idle: list[int] = []  # parameters that `expect_in_place` checks when the pass is reduced
        self.skipping = False  # whether the next step uses gradients as they are
        self._unused: str | None = None  # the step whose closure has not been called yet
        live.add(self)

    # Methods that a binding defines for its parameters.

    @abstractmethod
    def check(self, tensor: Tensor, what: str) -> None:
        """Raise UnsupportedTensorError unless the engine supports a parameter or gradient."""

    @abstractmethod
    def is_hooked(self, parameter: Parameter) -> bool:
        """Return whether a parameter has a `GradientHook`."""

    @abstractmethod
    def attach(self, parameter: Parameter, hook: Callable[[Parameter], None]) -> Any:
        """Register `hook(parameter)` to be called whenever a backward pass has computed its gradient.

        The returned object has a method `remove`. The hooks of a parameter are called in the order of registration.
        """

    @abstractmethod
    def queue(self, callback: Callable[[], None]) -> Any:
        """Queue `callback()` for the end of the running backward pass; return an object that identifies the pass.

        Raises EngineError if no backward pass is running, or its end cannot be observed.
        """

    @abstractmethod
    def gradient_in(self, memory: Any, parameter: Parameter) -> Tensor:
        """Make a gradient for a parameter from memory of the engine, which `GradientGroup.finish` has returned."""

    @abstractmethod
    def is_floating(self, parameter: Parameter) -> bool:
        """Return whether a parameter has a floating dtype, which a scheme may compress."""

    @abstractmethod
    def full_like(self, parameter: Parameter, value: float) -> Tensor:
        """Make a gradient with the same value everywhere."""

    @abstractmethod
    def store(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` into a gradient of equal shape; called inside `no_gradients`."""

    def find_idle(self, silent: list[int]) -> list[int]:
        """Return those of the `silent` parameters that the model may no longer use, before the reduction; here none."""
        return []

    def expect_in_place(self, indices: Sequence[int]) -> None:  # noqa: B027 (parameters may be there for good)
        """Raise EngineError if other parameters have replaced these, whose hooks were not called, in the model."""

    def no_gradients(self) -> AbstractContextManager[Any]:
        """Return a context in which the framework records no gradients."""
        return nullcontext()

    def version_of(self, gradient: Tensor) -> int | None:
        """Return a number that changes when the gradient is written to; None if the framework has no such counter."""
        return None

    def make_views(self, named: dict[str, Parameter]) -> dict[str, Tensor]:
        """Allocate a tensor in shared memory for the gradient of each parameter. Collective."""
        raise UnsupportedTensorError("this framework's gradients cannot be kept in shared memory")

    def takes_place(self, parameter: Parameter) -> bool:
        """Return whether a parameter's gradient, if it is kept beside others, lies on a GPU, not in shared memory."""
        return False

    def make_places(self, parameters: Sequence[Parameter]) -> None:
        """Allocate memory on a GPU for the gradients of parameters, which `place_for` assigns."""
        if parameters:
            raise UnsupportedTensorError("this framework's gradients cannot be kept on a GPU")

    def hand_to_current_stream(self) -> None:  # noqa: B027 (a framework may have no streams)
        """Let the current stream, if the framework has streams, use the gradients from now on."""

    # Methods that the native hooks call: `engine_ext.bindings.gradients.Binding`, with `begin_pass` below.

    def memory_of(self, parameter: Parameter) -> Tensor:
        """Return the object that exports a parameter's memory."""
        return parameter

    @abstractmethod
    def replace(self, index: int, parameter: Parameter, gradient: Tensor) -> Any:
        """Return the tensor, or tensors, to submit instead of a gradient that cannot be submitted unchanged."""

    @abstractmethod
    def shares_memory(self, gradient: Tensor) -> bool:
        """Return whether another tensor uses a gradient's memory, or the memory does not hold it unchanged."""

    def room_for(self, index: int) -> Tensor:
        """Allocate a flat tensor on a GPU for the other ranks' gradient of a parameter that has none here."""
        raise UnsupportedTensorError("this framework's gradients cannot be reduced on a GPU")

    def rooms_for(self, index: int) -> Any:
        """Return an allocator like `Adapter.make_allocator`, for the parts of all ranks' sparse gradients on a GPU."""
        raise UnsupportedTensorError("this framework's gradients cannot be reduced on a GPU")

    def place_for(self, index: int) -> Tensor:
        """Assign the next free memory of `make_places` to the gradient of a parameter, and return it."""
        raise UnsupportedTensorError("this framework's gradients cannot be kept on a GPU")

    def alias_for(self, index: int) -> Tensor:
        """Make a new tensor over the memory that is reserved for the gradient of a parameter."""
        raise UnsupportedTensorError("this framework's gradients cannot be kept in shared memory")

    def held_in(self, rest: Sequence[int], others: Sequence[Tensor]) -> list[bool | None]:
        """Return for each parameter of `rest` whether its gradient lies in `others` or an earlier one; None: in part.

        Gradients that are copied before their reduction do not count as containing others.
        """
        return [False] * len(rest)

    @abstractmethod
    def separate(self, parameter: Parameter, gradient: Tensor) -> Tensor:
        """Replace a parameter's gradient by a copy with memory of its own."""

    def add(self, named: dict[str, Parameter], trained: Collection[str] = ()) -> None:
        """Hook parameters. Collective if gradients are kept in shared memory.

        `trained`: names of parameters that some rank trains; they are hooked even if they require no gradient here.
        Raises ValueError if another reducer has one of them: two reductions of one gradient at a time would corrupt it.
        """
        if any(map(self.is_hooked, named.values())):
            gc.collect()  # A dropped optimizer may still be alive in a reference cycle with its scheduler.
        for name, parameter in named.items():
            if self.is_hooked(parameter):
                raise ValueError(
                    f"parameter {name!r} belongs to another DistributedOptimizer, which reduces its gradient already; "
                    "unwrap() that one first"
                )
        active = {name: each for name, each in named.items() if each.requires_grad or name in trained}
        self._frozen.update({name: each for name, each in named.items() if name not in active})
        deferred = {name for name, parameter in active.items() if self.rounds.accepts_parameter(name, parameter)}
        views: dict[str, Tensor | None] = dict.fromkeys(active)
        kept = {name: each for name, each in active.items() if self.options.views and name not in deferred}
        placed = {name: each for name, each in kept.items() if self.takes_place(each)}
        for name, parameter in active.items():
            self.check(parameter, f"parameter {name!r}")
        if self.options.views:
            views |= self.make_views({name: each for name, each in kept.items() if name not in placed})
            self.make_places(list(placed.values()))
        for name, parameter in active.items():
            hook = self.group.add(parameter, name, views[name], name in deferred, name in placed)
            if name in deferred:
                self.rounds.add(hook.index, name, parameter)
            if self._once is not None:
                self._hooks.append(self.attach(parameter, self._once.make_hook(hook, name)))
            self._hooks.append(self.attach(parameter, hook))
            self._native.append(hook)
            self._parameters.append(parameter)
            self.names.append(name)
            self._bucket.append(views[name])

    def before_step(self, thawed: Sequence[int] = ()) -> None:
        """Reduce the gradients that `backward` has not reduced, and hook parameters that were unfrozen since.

        `thawed`: indices of parameters that were hooked for this step already.
        """
        self._unused = None
        thawed = [*thawed, *self._hook_unfrozen()]
        if not self.skipping:
            self._complete_reduction(thawed)
        elif self.group.active:
            self.finish()
        else:
            self.group.restart()

    def wrap_closure(self, closure: Callable[[], Any], step: str) -> Callable[[], Any]:
        """Wrap the closure of a step that begins, so that gradients are reduced in each of its calls."""
        thawed = self._hook_unfrozen()
        if self.group.active:
            self.finish()  # An exception has interrupted the pass, and the other ranks wait for its end.

        def reduced_closure() -> Any:
            result = closure()
            self.before_step(thawed)
            thawed.clear()
            return result

        self._unused = step
        return reduced_closure

    def after_step(self) -> None:
        """Note that a step has used the gradients.

        Raises EngineError if these had not been reduced, since the step has never called its closure.
        """
        unused, self._unused = self._unused, None
        unreduced = unused and bool(self._parameters) and (self._due or self.group.touched) and not self.skipping
        self._due = True
        if self._once is not None:
            self._once.record_step(self._parameters)
        if unreduced:
            raise EngineError(
                f"{unused} was given a closure and has not called it, so it has used gradients of this rank alone: "
                "call step() without a closure, which then reduces them before"
            )

    @contextmanager
    def skip(self) -> Iterator[None]:
        """Let `step` use the gradients as they are, reduced or not; only a pass that is under way is completed."""
        before, self.skipping = self.skipping, True
        try:
            yield
        finally:
            self.skipping = before

    def has_reference_to(self, gradient: Tensor) -> bool:
        """Return whether the guard against repeated reductions has a weak reference to this gradient."""
        return self._once is not None and self._once.has_reference_to(gradient)

    def before_zero(self) -> None:
        """Complete an interrupted pass before gradients are zeroed; its gradients are discarded."""
        self.finish(discard=True)
        self._hook_unfrozen()

    def mark_zeroed(self) -> None:
        """Note that the gradients have been zeroed."""
        self._due = True
        if self._once is not None:
            self._once.mark_zeroed()

    def mark_dropped(self) -> None:
        """Note that all gradients were dropped, so that the next pass makes new ones."""
        self.group.fresh = True

    def synchronize(self) -> None:
        """Reduce the gradients that were not reduced since the last step or `zero_grad`, if any."""
        self._complete_reduction(self._hook_unfrozen())

    def _complete_reduction(self, thawed: list[int]) -> None:
        """Make sure that all gradients are reduced. Collective if there was no reduction since the last step.

        After a reduction, only parameters that had no gradient on any rank, or no hook, may be left.
        """
        if not self._parameters:
            return
        if self._due:
            self._reduce_all()
            return
        self.finish()
        late = [index for index in self._empty if self._parameters[index].grad is not None]
        if thawed or late:
            self._set_late(True)
            try:
                self._reduce_all({*thawed, *late})
            finally:
                self._set_late(False)

    def _set_late(self, late: bool) -> None:
        """Mark the reduction as late, so that a rank that is already in its next pass causes a mismatch."""
        self.group.mark_late(late)
        self.rounds.late = late

    def finish(self, discard: bool = False) -> None:
        """Complete the pass that is under way on this rank, if any.

        A gradient that cannot be reduced counts as missing, so that the other ranks can continue. It raises an error,
        unless gradients are discarded: then `backward` has raised it already.
        """
        if not self.group.active and (discard or not self.group.touched):
            self.group.restart()
            return
        self._reduce_all(discard=discard)

    def _reduce_all(self, only: set[int] | None = None, discard: bool = False) -> None:
        """Submit the remaining gradients of this pass, and wait for all. `only`: same as in `_announce_missing`."""
        try:
            self._announce_missing(only)
            brought = self._reduce()
            self.hand_to_current_stream()
            with self.no_gradients():
                for gradient, copy in self.copies:
                    self.store(gradient, copy)
                for index, memory in brought:
                    self._store_result(index, memory)
            if self._once is not None:
                self._once.record_pass(self._parameters)
            self._empty = [index for index in self._missing if self._parameters[index].grad is None]
            self._expect_tied_everywhere({index for index, _ in brought})
        finally:
            if not self.group.active:  # Else a signal handler has interrupted the wait, which continues later.
                self.copies.clear()
        refused, self._refused = self._refused, None
        if refused is not None and not discard:
            raise refused
        if self._idle and not discard:
            self.expect_in_place(self._idle)

    def _announce_missing(self, only: set[int] | None = None) -> None:
        """Submit the remaining gradients of this pass (only those in `only`), and announce the missing ones."""
        if self._announced:
            return
        self._refused = self._submit_rest(only)
        self._missing = self.group.missing()
        self.group.announce()
        self._announced = True

    def _reduce(self) -> list[tuple[int, Any]]:
        """Complete the submitted gradients, then the deferred ones. See `GradientGroup.finish`."""
        try:
            brought = self.group.finish()
        except WorldError:
            raise
        except EngineError:
            # The error may concern this rank alone; the others have begun the rounds.
            self.rounds.run(self._missing)
            raise
        finally:
            self._announced = self._due = self.group.active  # A signal may interrupt the wait, which continues later.
        self.rounds.run(self._missing)
        return brought

    def share_state(self, root: int | None) -> None:
        """Broadcast the state of the scheme from one rank of the process set. Collective.

        `root`: world rank of the sender; None: there is no state yet.
        """
        if root is not None and self._parameters:
            self.rounds.share_state(root)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def release(self) -> None:
        """Remove the hooks and release the engine, whose world has ended, without waiting for the garbage collector."""
        self.remove()
        live.discard(self)
        self.group.release()
        self._native.clear()
        self._once = None
        del self.group, self.engine

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Accumulate gradients on this rank, without reductions, inside the block."""
        before = self.group.paused
        self.group.paused = self._due = True
        try:
            yield
        finally:
            self.group.paused = before

    def _submit_rest(self, only: set[int] | None) -> EngineError | None:
        """Submit gradients that this pass did not touch: accumulated in `no_sync`, by an earlier pass, or set by hand.

        If one rank adds to an earlier result R, every rank must contribute R; else R would lose this rank's share.
        Returns the first error about a gradient that cannot be reduced.
        """
        missing = [index for index in self.group.missing() if only is None or index in only]
        self._idle = self.find_idle(missing) if missing else []
        rest = [index for index in missing if self._parameters[index].grad is not None]
        self._tied = []
        if not rest:
            return None
        rest, refused = self._find_tied(rest, late=only is not None)
        paused, self.group.paused, self.group.urgent = self.group.paused, False, True
        try:
            for index in rest:
                parameter = self._parameters[index]
                if self._once is not None:
                    refused = refused or self._once.take_error(index)
                    if not self._once.admit_rest(index, parameter):
                        continue
                try:
                    self._native[index](parameter)
                except UnsupportedTensorError as error:
                    refused = refused or error
        finally:
            self.group.paused, self.group.urgent = paused, False
        return refused

    def _find_tied(self, rest: list[int], late: bool) -> tuple[list[int], EngineError | None]:
        """Return the gradients of `rest` that lie in no others that are reduced; and an error if one does in part.

        `late`: the others were reduced already; else the running pass has submitted them.
        """
        mine = [self._parameters[index].grad for index in rest]
        if not late and not self.copies and not self.group.may_overlap(rest, mine):
            return rest, None
        own = set(rest)
        others = [each.grad for k, each in enumerate(self._parameters) if k not in own and each.grad is not None]
        if late:  # The others' gradients may have been replaced or dropped since, but were reduced all the same.
            others += [kept for k, kept in enumerate(self._bucket) if kept is not None and k not in self._empty]
        held = dict(zip(rest, self.held_in(rest, others), strict=True))
        if late and self._once is not None:
            held |= {index: True for index in rest if self._once.was_reduced(self._parameters[index].grad)}
        self._tied = [index for index, there in held.items() if there]
        apart = [index for index, there in held.items() if there is False]
        partly = [self.names[index] for index, there in held.items() if there is None]
        if not partly:
            return apart, None
        return apart, EngineError(
            f"the gradient of {partly[0]!r} lies in part where other gradients do, which are reduced there: give it "
            "memory of its own, as gradient.clone() does"
        )

    def _expect_tied_everywhere(self, brought: set[int]) -> None:
        """Raise EngineError if another rank has sent a separate result for a gradient that lies in others here."""
        for index in self._tied:
            if index in brought:
                raise EngineError(
                    f"the gradient of {self.names[index]!r} lies in others on rank {self.engine.rank}, with which it "
                    "is reduced, and another rank has one for itself: tie gradients on all ranks, or on none"
                )

    def _hook_unfrozen(self) -> list[int]:
        """Hook the parameters that have come to require a gradient, and return their indices."""
        thawed = {name: parameter for name, parameter in self._frozen.items() if parameter.requires_grad}
        if thawed:
            for name in thawed:
                del self._frozen[name]
            self.add(thawed)
        return list(range(len(self._parameters) - len(thawed), len(self._parameters)))

    def _store_result(self, index: int, memory: Any) -> None:
        """Store a result that was not reduced in place: the gradient was missing, sparse, or in other memory."""
        parameter = self._parameters[index]
        # A new tensor over the reserved memory, since a program may change the memory of `grad`.
        if self._bucket[index] is not None and not isinstance(memory, list | tuple):
            parameter.grad = self.alias_for(index)
        else:
            parameter.grad = self.gradient_in(memory, parameter)

    def begin_pass(self) -> None:
        """Queue `end_of_pass` for the running pass, whose first hook has fired."""
        if self.group.urgent:  # Called from a step or the end of a pass, so no other hook fires.
            self.group.fresh = False
            return
        self._pass = self.queue(self.end_of_pass)
        if self.group.watched:
            # If gradients are fresh, at most one exists by now: that of the hook that has just fired.
            self.group.fresh = sum(parameter.grad is not None for parameter in self._parameters) <= 1

    def end_of_pass(self) -> None:
        """Complete the pass. First, all optimizers in the pass announce their missing gradients, before any waits."""
        if not self.group.active:
            return
        for each in list(live):
            if each.group.active and (each.kind, each._pass) == (self.kind, self._pass):
                each._announce_missing()
        self.finish()
