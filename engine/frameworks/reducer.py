"""Reduces the gradients of one optimizer's parameters while backward runs, and is done when backward returns.

This is for frameworks whose backward pass calls a hook for each parameter: a binding derives from `Reducer`, and says
how its framework does what `Reducer` declares. A parameter has the attributes `grad` and `requires_grad`.

A hook on each parameter submits its gradient the moment autograd has accumulated it. The first hook of a backward pass
queues `end_of_pass` behind the whole pass; there the rank announces which parameters got no gradient, waits for the
reductions, and puts things in place. So clipping, gradient scaling and `step` see averaged gradients without ceremony.

**Who contributes.** Every rank contributes the gradients it has. A parameter without one here but with one elsewhere
gets the others' result, to which this rank added zeros; without one anywhere it keeps None.

**Two backwards before a step.** The second pass adds its local gradient L to the average R of the first, and the sum is
reduced again. Ranks hold the same R, so avg(R + L) = R + avg(L): right for Average, at the price of a second reduction,
which `no_sync` saves. For other operations, and an average with factors, it would be wrong, and raises an error.

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
every pass raises an error about what was missed. A gradient that no hook has brought, and which lies in others that are
reduced, has been reduced with them: a program has tied it to them by hand. It is left alone (`_find_tied`).

**Sparse gradients** are gathered, as what they store, and added up here. A rank without a gradient need not know that
the others' is sparse: the coordinator takes what it says for an empty one. They travel as they are.

**Gradients that Python compresses** (`engine.frameworks.scheme_reducer`) are deferred: their hooks only count, and
`finish` reduces them when all others are done, in the same order on every rank.

**A pass that raises** never reaches its end. The next `zero_grad`, `step` or `synchronize` finishes for it, so that
the other ranks, which wait for this one's gradients, can go on.
"""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from .. import runtime
from ..errors import EngineError, UnsupportedTensorError, WorldError
from ..native import gradients
from .once import Once
from .options import Options
from .scheme_reducer import Rounds, scheme_of

Parameter = Any  # a parameter of the framework, with `grad` and `requires_grad`
Tensor = Any

live: weakref.WeakSet[Reducer] = weakref.WeakSet()


class Reducer(ABC):
    """Hooks and state for the parameters of one optimizer. It knows nothing of the optimizer itself.

    Parameters
    ----------
    options : Options
        Of the optimizer. A rank that is not in their process set is given no parameters.
    number : int
        Of the optimizer, among those of the process set: whose step it is that ends.

    Attributes
    ----------
    kind : type
        Of the framework's tensors.
    names : list of str
        Of the parameters, by index.
    wire : str or None
        Dtype to which the engine casts gradients on the way.
    rounds : Rounds
        Has the indices of those that a scheme reduces.
    skipping : bool
        The next step uses gradients as they are.
    copies : list of (tensor, tensor)
        Gradients of the pass, and copies that are reduced in place of them: to be stored there in the end.
    """

    kind: Any

    def __init__(self, options: Options, number: int = 0) -> None:
        process_set, op = options.process_set, options.op
        self.engine = process_set.engine if process_set.included() else runtime.engine()
        self.options = options
        wire, scheme = scheme_of(options.compression, op)
        self.wire = wire
        self.rounds = Rounds(self, scheme, options, wire)
        self.group = gradients.GradientGroup(
            self.engine, self, int(op), options.prescale, options.postscale, wire, number
        )
        self._once = None if options.repeatable else Once(self.group, op, self.version_of)
        self._parameters: list[Parameter] = []
        self.names: list[str] = []
        self._bucket: list[Tensor | None] = []
        self._native: list[gradients.GradientHook] = []
        self._hooks: list[Any] = []
        self._frozen: dict[str, Parameter] = {}
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._pass: Any = None  # the backward pass whose end was queued
        self._due = True  # whether gradients are unreduced: no reduction since step or zero_grad, or no_sync since
        self._announced = False  # whether all gradients of this rank are submitted, and not yet waited for
        self._missing: list[int] = []  # parameters without a gradient on this rank
        self._refused: EngineError | None = None
        self._tied: list[int] = []  # parameters whose gradient is reduced with others, in which it lies
        self._empty: list[int] = []  # parameters without a gradient on any rank
        self._idle: list[int] = []  # parameters that `expect_in_place` looks at when the pass is reduced
        self.skipping = False
        self._unused: str | None = None  # the step whose closure has not been called yet
        live.add(self)

    # Methods that a binding defines for its parameters.

    @abstractmethod
    def check(self, tensor: Tensor, what: str) -> None:
        """Raise UnsupportedTensorError unless the engine can work on a parameter or gradient."""

    @abstractmethod
    def is_hooked(self, parameter: Parameter) -> bool:
        """Whether a `GradientHook` hangs on a parameter."""

    @abstractmethod
    def attach(self, parameter: Parameter, hook: Callable[[Parameter], None]) -> Any:
        """Have `hook(parameter)` called whenever a backward pass has made its gradient.

        What is returned has a method `remove`. The hooks of a parameter are called in the order in which they came.
        """

    @abstractmethod
    def queue(self, callback: Callable[[], None]) -> Any:
        """Have `callback()` called at the end of the backward pass that is running; returns what the pass is known by.

        Raises
        ------
        EngineError
            There is no pass whose end could be told.
        """

    @abstractmethod
    def gradient_in(self, memory: Any, parameter: Parameter) -> Tensor:
        """A gradient for a parameter, which lies in memory of the engine.

        `memory`: as of `GradientGroup.finish`.
        """

    @abstractmethod
    def is_floating(self, parameter: Parameter) -> bool:
        """Whether a parameter has a floating dtype, which a scheme may compress."""

    @abstractmethod
    def full_like(self, parameter: Parameter, value: float) -> Tensor:
        """A gradient that has one value everywhere."""

    @abstractmethod
    def store(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` into a gradient of equal shape, where no gradient is computed of that."""

    def find_idle(self, silent: list[int]) -> list[int]:
        """Which of the parameters whose hooks were not called may have been replaced; called before the reduction."""
        return []

    def expect_in_place(self, indices: Sequence[int]) -> None:  # noqa: B027 (parameters may be there for good)
        """Raise EngineError if other parameters have come into the model for these, whose hooks were not called."""

    def no_gradients(self) -> AbstractContextManager[Any]:
        """A block in which the framework computes no gradients."""
        return nullcontext()

    def version_of(self, gradient: Tensor) -> int | None:
        """A number that changes when the gradient is written to; None if the framework counts no versions of it."""
        return None

    def views(self, named: dict[str, Parameter]) -> dict[str, Tensor]:
        """A tensor in shared memory for the gradient of each parameter. Collective."""
        raise UnsupportedTensorError("this framework's gradients cannot be kept in shared memory")

    def takes_place(self, parameter: Parameter) -> bool:
        """Whether gradients of a parameter that are kept side by side lie on a GPU, and not in shared memory."""
        return False

    def make_places(self, parameters: Sequence[Parameter]) -> None:
        """Allocate memory for the gradients of such parameters, which `place_for` gives out."""
        if parameters:
            raise UnsupportedTensorError("this framework's gradients cannot be kept on a GPU")

    def reduced(self) -> None:  # noqa: B027 (a framework may have no streams)
        """Note that the current stream, if the framework has such, may use the gradients from now on."""

    # Methods that the native hooks call: `engine_ext.bindings.gradients.Binding`, with `begin_pass` below.

    def memory_of(self, parameter: Parameter) -> Tensor:
        """The object that lends a parameter's memory."""
        return parameter

    @abstractmethod
    def replace(self, index: int, parameter: Parameter, gradient: Tensor) -> Any:
        """The tensor, or tensors, to submit in place of a gradient that cannot be submitted as it is."""

    @abstractmethod
    def shares_memory(self, gradient: Tensor) -> bool:
        """Whether anything else looks at a gradient's memory, or it does not lie there as it is."""

    def room_for(self, index: int) -> Tensor:
        """A flat tensor on a GPU for the other ranks' gradient of a parameter, which has none here."""
        raise UnsupportedTensorError("this framework's gradients cannot be reduced on a GPU")

    def rooms_for(self, index: int) -> Any:
        """As `Adapter.room`, for the parts of all ranks' sparse gradients of a parameter that is on a GPU."""
        raise UnsupportedTensorError("this framework's gradients cannot be reduced on a GPU")

    def place_for(self, index: int) -> Tensor:
        """Where the gradient of a parameter that `takes_place` is from now on; it is given the next free place."""
        raise UnsupportedTensorError("this framework's gradients cannot be kept on a GPU")

    def alias_for(self, index: int) -> Tensor:
        """A new tensor over the memory that is kept for the gradient of a parameter."""
        raise UnsupportedTensorError("this framework's gradients cannot be kept in shared memory")

    def held_in(self, rest: Sequence[int], others: Sequence[Tensor]) -> list[bool | None]:
        """Whether the gradients of parameters lie in others, or in those before them; None: a part of one does.

        Those that are copied before they are reduced hold no others.
        """
        return [False] * len(rest)

    @abstractmethod
    def separate(self, parameter: Parameter, gradient: Tensor) -> Tensor:
        """Give a parameter a gradient of its own, with the same values."""

    def add(self, named: dict[str, Parameter], trained: Collection[str] = ()) -> None:
        """Hook parameters. Collective if gradients live in shared memory.

        `trained`: some rank has a gradient for these, so they are hooked also where they require none at the moment.

        Raises
        ------
        ValueError
            Another reducer has one of them: two reductions of one gradient at a time would spoil it.
        """
        if any(map(self.is_hooked, named.values())):
            gc.collect()  # An optimizer that was dropped may live on in a cycle with its scheduler.
        for name, parameter in named.items():
            if self.is_hooked(parameter):
                raise ValueError(
                    f"parameter {name!r} belongs to another DistributedOptimizer, which reduces its gradient already; "
                    "unwrap() that one first"
                )
        active = {name: each for name, each in named.items() if each.requires_grad or name in trained}
        self._frozen.update({name: each for name, each in named.items() if name not in active})
        deferred = {name for name, parameter in active.items() if self.rounds.accepts(name, parameter)}
        views: dict[str, Tensor | None] = dict.fromkeys(active)
        kept = {name: each for name, each in active.items() if self.options.views and name not in deferred}
        placed = {name: each for name, each in kept.items() if self.takes_place(each)}
        for name, parameter in active.items():
            self.check(parameter, f"parameter {name!r}")
        if self.options.views:
            views |= self.views({name: each for name, each in kept.items() if name not in placed})
            self.make_places(list(placed.values()))
        for name, parameter in active.items():
            hook = self.group.add(parameter, name, views[name], name in deferred, name in placed)
            if name in deferred:
                self.rounds.add(hook.index, name, parameter)
            if self._once is not None:
                self._hooks.append(self.attach(parameter, self._once.hook(hook, name)))
            self._hooks.append(self.attach(parameter, hook))
            self._native.append(hook)
            self._parameters.append(parameter)
            self.names.append(name)
            self._bucket.append(views[name])

    def before_step(self, thawed: Sequence[int] = ()) -> None:
        """Reduce what `backward` has not reduced; take over parameters that have been unfrozen since.

        `thawed`: those that have been taken over for this step already.
        """
        self._unused = None
        thawed = [*thawed, *self._thaw()]
        if not self.skipping:
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
        """Note that a step has used the gradients.

        Raises
        ------
        EngineError
            They had not been reduced: the closure, which is followed by that, was never called.
        """
        unused, self._unused = self._unused, None
        unreduced = unused and bool(self._parameters) and (self._due or self.group.touched) and not self.skipping
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
        before, self.skipping = self.skipping, True
        try:
            yield
        finally:
            self.skipping = before

    def remembers(self, gradient: Tensor) -> bool:
        """Whether there is a weak reference to this gradient, which an operation that must not be repeated needs."""
        return self._once is not None and self._once.remembers(gradient)

    def before_zero(self) -> None:
        """Finish what a pass could not, except that old gradients do not matter any more."""
        self.finish(discard=True)
        self._thaw()

    def forget(self) -> None:
        """Note that the gradients have been zeroed."""
        self._due = True
        if self._once is not None:
            self._once.forget()

    def renew(self) -> None:
        """Note that there are no gradients any more: the next pass makes new ones."""
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
            self._set_late(True)
            try:
                self._reduce_all({*thawed, *late})
            finally:
                self._set_late(False)

    def _set_late(self, late: bool) -> None:
        """Have the other ranks compare whether they reduce late gradients, too: their next pass is another one."""
        self.group.mark_late(late)
        self.rounds.late = late

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
        """Reduce the gradients that this pass has not submitted yet, and wait for all. `only`: as for `_announce`."""
        try:
            self._announce(only)
            brought = self._reduce()
            self.reduced()
            with self.no_gradients():
                for gradient, copy in self.copies:
                    self.store(gradient, copy)
                for index, memory in brought:
                    self._bring(index, memory)
            if self._once is not None:
                self._once.settle(self._parameters)
            self._empty = [index for index in self._missing if self._parameters[index].grad is None]
            self._expect_tied_everywhere({index for index, _ in brought})
        finally:
            if not self.group.active:  # else a signal handler has ended the wait, which goes on later
                self.copies.clear()
        refused, self._refused = self._refused, None
        if refused is not None and not discard:
            raise refused
        if self._idle and not discard:
            self.expect_in_place(self._idle)

    def _announce(self, only: set[int] | None = None) -> None:
        """Submit what this pass has not: existing gradients (only those in `only`), and that the others are missing."""
        if self._announced:
            return
        self._refused = self._submit_rest(only)
        self._missing = self.group.missing()
        self.group.announce()
        self._announced = True

    def _reduce(self) -> list[tuple[int, Any]]:
        """Complete what the hooks have submitted, then what they have not. See `GradientGroup.finish`."""
        try:
            brought = self.group.finish()
        except WorldError:
            raise
        except EngineError:
            # It may be an error of this rank alone: the others have gone on to the rounds.
            self.rounds.run(self._missing)
            raise
        finally:
            self._announced = self._due = self.group.active  # A signal may have ended the wait: then it goes on later.
        self.rounds.run(self._missing)
        return brought

    def share_state(self, root: int | None) -> None:
        """Give the ranks of the process set what a scheme remembers on one. Collective.

        `root`: that rank, in the world; None: there is nothing to remember yet.
        """
        if root is not None and self._parameters:
            self.rounds.share_state(root)

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def release(self) -> None:
        """Take the hooks away and let go of the engine, whose world has ended, without waiting for the collector."""
        self.remove()
        live.discard(self)
        self.group.release()
        self._native.clear()
        self._once = None
        del self.group, self.engine

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

    def _find_tied(self, rest: list[int], late: bool) -> tuple[list[int], EngineError | None]:
        """Which gradients of `rest` lie nowhere in others that are reduced; and the error about one that does in part.

        `late`: those have been reduced already; else the pass that is under way has submitted them.
        """
        mine = [self._parameters[index].grad for index in rest]
        if not late and not self.copies and not self.group.may_overlap(rest, mine):
            return rest, None
        own = set(rest)
        others = [each.grad for k, each in enumerate(self._parameters) if k not in own and each.grad is not None]
        if late:  # Others may have another gradient now, or none, and it was reduced all the same.
            others += [kept for k, kept in enumerate(self._bucket) if kept is not None and k not in self._empty]
        held = dict(zip(rest, self.held_in(rest, others), strict=True))
        if late and self._once is not None:
            held |= {index: True for index in rest if self._once.knows(self._parameters[index].grad)}
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
        """Refuse results for gradients that lie in others here."""
        for index in self._tied:
            if index in brought:
                raise EngineError(
                    f"the gradient of {self.names[index]!r} lies in others on rank {self.engine.rank}, with which it "
                    "is reduced, and another rank has one for itself: tie gradients on all ranks, or on none"
                )

    def _thaw(self) -> list[int]:
        """Hook parameters that require a gradient by now; their indices."""
        thawed = {name: parameter for name, parameter in self._frozen.items() if parameter.requires_grad}
        if thawed:
            for name in thawed:
                del self._frozen[name]
            self.add(thawed)
        return list(range(len(self._parameters) - len(thawed), len(self._parameters)))

    def _bring(self, index: int, memory: Any) -> None:
        """Give a parameter a result that does not lie in its gradient: it had none, a sparse one, or one elsewhere."""
        parameter = self._parameters[index]
        # A tensor of its own over the place: a program may let `grad` have other memory.
        if self._bucket[index] is not None and not isinstance(memory, list | tuple):
            parameter.grad = self.alias_for(index)
        else:
            parameter.grad = self.gradient_in(memory, parameter)

    def begin_pass(self) -> None:
        """Queue the end of the pass that is running: its first hook has fired."""
        if self.group.urgent:  # No pass, but a step or the end of one: nothing else fires.
            self.group.fresh = False
            return
        self._pass = self.queue(self.end_of_pass)
        if self.group.watched:
            # At most one gradient is there by now: that of the hook which has just fired.
            self.group.fresh = sum(parameter.grad is not None for parameter in self._parameters) <= 1

    def end_of_pass(self) -> None:
        """Complete the pass. Before this optimizer waits, all that take part in it announce their missing gradients."""
        if not self.group.active:
            return
        for each in list(live):
            if each.group.active and (each.kind, each._pass) == (self.kind, self._pass):
                each._announce()
        self.finish()
