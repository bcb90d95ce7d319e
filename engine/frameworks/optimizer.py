"""Common part of `DistributedOptimizer` for all frameworks: methods and state of a wrapped optimizer.

A wrapped optimizer stays the same object. Its class becomes a subclass of the same name, with the methods of
`Distributed`, and its `_engine` is a `Wrapping`. A binding derives from both, and calls `Wrapping.before_step` and
`after_step` around the optimizer's own step. A `Reducer`, or an object with its methods, reduces the gradients.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from ..collectives import objects
from ..collectives.process_sets import WAITING
from ..errors import EngineError, NotInitializedError
from ..native import core, gradients
from ..session import optimizers, runtime
from .agreement import claim_name, expect_agreement
from .first_step import FirstStep
from .no_reducer import NoReducer
from .options import ReductionOptions, expect_passes


class Distributed:
    """Methods that wrapping adds to the class of an optimizer. `_engine` is the state of one wrapping."""

    _engine: Any

    def synchronize(self) -> None:
        """Reduce the gradients now, if they were not reduced since the last `step` or `zero_grad`. Collective then.

        `backward` reduces gradients automatically, and `step` reduces the rest. So this is for gradients that were set
        by hand, and for ranks that may have run no backward pass: call it before they are clipped, unscaled or read.
        """
        self._engine.reduction.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the gradients as they are, even if they were never reduced. All ranks must do the same.

        With `op=Adasum` it raises an `EngineError`, since `step` then reduces the changes of the parameters.
        """
        with self._engine.reducer.skip():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes that are accumulated before a reduction.

        Gradients of an incomplete window are reduced first; the call is collective then.
        """
        passes = expect_passes(passes)
        self._engine.reducer.finish()
        self._engine.reducer.group.passes = passes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank. The first backward after the block, or `step`, reduces their sum once.

        All ranks must do the same.
        """
        with self._engine.reduction.pause():
            yield

    def communication(self) -> float:
        """Return the seconds that this rank's callers have waited in the engine since the last call or the wrapping."""
        return float(self._engine.take_wait_seconds())

    def unwrap(self) -> Any:
        """Remove the hooks and restore the optimizer's own class. Returns the optimizer."""
        wrapping: Wrapping = self._engine
        wrapping.end()
        del self._engine
        self.__class__ = wrapping.kind
        return self


class Wrapping(ABC):
    """State of a wrapped optimizer. Invalid `named_parameters` raise TypeError or ValueError."""

    broadcast: ClassVar[str]
    """Call that broadcasts the model of one rank, for a warning; `{root}` stands for that rank."""

    def __init__(self, kind: type, options: ReductionOptions, named_parameters: Any) -> None:
        self.kind = kind  # class of the optimizer before it was wrapped
        self.options = options
        self.process_set = options.process_set
        # Names of parameters that the user has passed; None: none were
        self.names = None if named_parameters is None else ParameterNames(named_parameters)
        self._optimizer: Callable[[], Any] = lambda: None
        self.prefix = ""
        self.moving = False  # whether it is being restarted in another world
        self.reducer: Any
        self.reduction: Any  # what steps call: the reducer, or what a binding puts in its place for a while
        self._engine: core.Engine | None
        self._known: set[int]  # ids of the parameters in `_parameters`, whose gradients are reduced
        self._seen: list[list[Any]]  # the optimizer's groups at the last successful check that all are reduced
        self._parameters: dict[str, Any]
        self._begun: bool  # whether the first step has begun
        self._first: FirstStep | None
        if runtime.is_waiting():
            self._stop_reducing(options.passes, WAITING)
        else:
            self._start_reducing(options.passes)

    def _start_reducing(self, passes: int) -> None:
        """Start in the current world."""
        options = self.options
        number, prefix = claim_name(options)
        self.prefix = f"{prefix}."
        self._forget_parameters()
        self.reducer = self.reduction = self.make(options, prefix, number)
        self.reducer.group.passes = passes
        if options.check_parameters and self.process_set.included():
            self._first = FirstStep(self.prefix, self.process_set, self.broadcast)
        self._engine = self.reducer.engine
        self._waited_ns = self._engine.counters()["wait_ns"]

    def _stop_reducing(self, passes: int, why: str) -> None:
        """Stop reducing, because this process is in no world, or in one without the process set."""
        self._forget_parameters()
        self.reducer = self.reduction = NoReducer(passes, why)
        self._engine, self._waited_ns = None, 0

    def _forget_parameters(self) -> None:
        self._known, self._parameters, self._seen = set(), {}, []
        self._begun, self._first = False, None

    def move_to_world(self, root: int | None) -> None:
        """Restart in the world that this process has just entered. Collective. See `optimizers.MovableOptimizer`.

        Gradients are dropped, since after a failure only some of them may be reduced.
        """
        optimizer, passes = self._optimizer(), self.reducer.group.passes
        if optimizer is None:
            return
        self._leave_world()
        for group in self.parameters_of(optimizer):
            for parameter in group:
                parameter.grad = None
        try:
            self.process_set.included()
        except NotInitializedError as error:
            self._stop_reducing(passes, str(error))
            return
        self._start_reducing(passes)
        self.moving = True
        try:
            self.add_groups(self.parameters_of(optimizer))
        finally:
            self.moving = False
        self.reducer.share_state(root)
        self.after_move(optimizer)

    def leave_behind(self) -> None:
        """Refuse further steps, since some rank of the world does not have this optimizer."""
        passes = self.reducer.group.passes
        self._leave_world()
        self._stop_reducing(
            passes,
            f"this optimizer was wrapped in an earlier world, and some rank of world {runtime.world_number()} has not "
            "wrapped it: call DistributedOptimizer before elastic.run, or anew in each call of what that wraps",
        )

    def _leave_world(self) -> None:
        """Release the resources of the previous world."""
        self.reduction.release()
        self._first = self._engine = None

    def parameters_of(self, optimizer: Any) -> list[Sequence[Any]]:
        """Return the optimizer's parameters, by group."""
        return [group["params"] for group in optimizer.param_groups]

    def after_move(self, optimizer: Any) -> None:  # noqa: B027 (a framework may hang nothing on an optimizer)
        """Update the binding's state after a move, which has replaced the reducer."""

    @abstractmethod
    def make(self, options: ReductionOptions, prefix: str, number: int) -> Any:
        """Make the reducer. `prefix`, of its operations' names, and the optimizer's `number` are equal on all ranks."""

    def describe(self, name: str, parameter: Any) -> tuple[str, int]:
        """Describe a parameter for the comparison of ranks: a text for messages, and a number for other properties."""
        return objects.describe(name, parameter), 0

    def expect_alone(self, named: dict[str, Any]) -> None:  # noqa: B027 (a framework may know of nothing else)
        """Raise an error if another library reduces the gradients of these parameters, too."""

    def add_groups(self, groups: Iterable[Sequence[Any]]) -> None:
        """Start to reduce the gradients of parameters in `groups` that are not reduced yet. Collective."""
        if not self.process_set.included():
            return  # This rank trains by itself.
        waiting = isinstance(self.reducer, NoReducer)
        own: dict[str, Any] = {}
        known = set(self._known)
        for g, group in enumerate(groups):
            for p, parameter in enumerate(group):
                if id(parameter) in known:
                    continue
                name = self._place_name(g, p, own) if self.names is None else self.names.get(parameter)
                if name is None:
                    raise ValueError(
                        f"named_parameters has no name for parameter {p} of group {g}, of shape "
                        f"{list(parameter.shape)}; name all of the optimizer's parameters, or none"
                    )
                known.add(id(parameter))
                own[name] = parameter
        if not own or waiting:
            return
        described = {self.prefix + name: self.describe(name, parameter) for name, parameter in own.items()}
        # From here on parameters have the same order on all ranks, even if their optimizers' orders differ.
        order = [name.removeprefix(self.prefix) for name in expect_agreement(self.options, described)]
        own = {name: own[name] for name in order}
        new = {self.prefix + name: parameter for name, parameter in own.items()}
        self.expect_alone(own)
        self.reducer.add(new, self._find_trained(new) if self.moving else ())
        self._parameters |= own
        self._known = known

    def _place_name(self, group: int, place: int, taken: Container[str]) -> str:
        """Make a unique name for an unnamed parameter, even if its group has replaced a removed one."""
        name = base = f"group{group}.param{place}"
        number = 0
        while name in taken or name in self._parameters:
            number += 1
            name = f"{base}#{number}"
        return name

    def _find_trained(self, named: dict[str, Any]) -> set[str]:
        """Return the names of parameters that require a gradient on some rank. Collective.

        A new rank needs the others' answer, since it has not yet run the code that freezes or unfreezes a layer.
        """
        own = [getattr(parameter, "requires_grad", True) for parameter in named.values()]
        told = objects.allgather_object(own, None, self.process_set)
        return {name for name, required in zip(named, zip(*told, strict=True), strict=True) if any(required)}

    def wrap_optimizer(self, optimizer: Any, distributed: type[Distributed], namespace: dict[str, Any]) -> None:
        """Give an optimizer a class of the same name, with the methods of `distributed` and a namespace of its own."""
        optimizer.__class__ = derive_class(distributed, self.kind, namespace)
        optimizer._engine = self
        self._optimizer = weakref.ref(optimizer)
        optimizers.register_optimizer(self)

    def before_step(self, closure: Any = None) -> Any:
        """Reduce the gradients before a step uses them.

        If the step has a closure, which computes them, the returned closure has to be passed to the step instead.
        """
        self._expect_adopted()
        if not self._begun:
            self._begun = True
            self.expect_alone(self._parameters)
            if self._first is not None:
                self._first.send_checksums(self._parameters)
        if callable(closure):
            return self.reduction.wrap_closure(closure, f"{self.kind.__qualname__}.step()")
        self.reduction.before_step()
        return closure

    def _expect_adopted(self) -> None:
        """Raise EngineError if the optimizer has a parameter that is not reduced, such as one added by hand."""
        optimizer = self._optimizer()
        if optimizer is None or not self._known or self.reducer.skipping:
            return
        groups = self.parameters_of(optimizer)
        if gradients.hold_the_same(groups, self._seen):
            return
        for g, group in enumerate(groups):
            for p, parameter in enumerate(group):
                if id(parameter) not in self._known:
                    raise EngineError(
                        f"parameter {p} of group {g}, of shape {list(parameter.shape)}, has come into the optimizer "
                        "after DistributedOptimizer, and nothing reduces its gradient: add it by add_param_group() on "
                        "all ranks, and not to param_groups by hand; or unwrap() the optimizer and wrap it anew"
                    )
        self._seen = [list(group) for group in groups]

    def after_step(self) -> None:
        """Note that a step has used the gradients."""
        self.reduction.after_step()
        if self._first is not None and self._first.tell():
            self._first = None

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters whose gradients are reduced, by name."""
        return self._parameters

    def take_wait_seconds(self) -> float:
        """Return the seconds that callers have waited in the engine since the last call."""
        if self._engine is None:
            return 0.0
        before, self._waited_ns = self._waited_ns, self._engine.counters()["wait_ns"]
        return float(self._waited_ns - before) / 1e9

    def end(self) -> None:
        """Undo the wrapping, except for the class."""
        optimizers.forget_optimizer(self)
        self.reduction.remove()


def derive_class(methods: type, kind: type, namespace: dict[str, Any] | None = None) -> type:
    """Make a class of the same name as `kind`, with the methods of another class and a namespace of its own."""
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (methods, kind), same | (namespace or {}))


def expect_unwrapped(optimizer: Any, wrapped: type = Distributed) -> None:
    """Raise ValueError if an optimizer is wrapped already, and so of the class `wrapped`."""
    if isinstance(optimizer, wrapped):
        raise ValueError(
            "this optimizer is wrapped in DistributedOptimizer already; wrap it once, or unwrap() it first"
        )


class ParameterNames:
    """Names of parameters, as passed by the user. It keeps the parameters alive, so that their ids are not reused.

    Raises TypeError or ValueError unless it gets pairs of a name and a parameter, with each name once.
    """

    def __init__(self, named_parameters: Any) -> None:
        self._by_id: dict[int, tuple[str, Any]] = {}
        used: set[str] = set()
        for entry in _list_pairs(named_parameters):
            if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
                raise ValueError("named_parameters must give (name, parameter) pairs, as model.named_parameters() does")
            name, parameter = entry
            if name in used:
                raise ValueError(f"named_parameters gives the name {name!r} twice")
            used.add(name)
            self._by_id.setdefault(id(parameter), (name, parameter))

    def get(self, parameter: Any) -> str | None:
        """Return the name of a parameter, if it has one."""
        return self._by_id.get(id(parameter), (None, None))[0]


def _list_pairs(named_parameters: Any) -> list[Any]:
    """Return the user's pairs as a list; raise TypeError for anything that is not iterable."""
    if callable(getattr(named_parameters, "named_parameters", None)):
        raise TypeError(
            f"named_parameters is a {type(named_parameters).__qualname__}, not its parameters: give "
            "model.named_parameters()"
        )
    if not isinstance(named_parameters, Iterable):
        raise TypeError(
            f"named_parameters is of type {type(named_parameters).__qualname__}: give model.named_parameters(), or "
            "leave it out"
        )
    return list(named_parameters)
