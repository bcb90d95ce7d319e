"""`OuterOptimizer` for torch: ranks train by themselves for many steps, and then average what these have changed.

Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2020 (post-local SGD). Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023, and "Streaming DiLoCo with overlapping communication", 2025, which
has fragments, delay and mix. Zhou et al., "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training
Using Delayed Averaging", 2020, where a rank keeps the steps that it makes during a delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..collectives import objects
from ..collectives.collectives import allreduce_async, broadcast_async_
from ..collectives.compression import Compression, Scheme, resolve
from ..collectives.handles import Handle
from ..collectives.process_sets import WAITING, ProcessSet, global_process_set
from ..collectives.reduce_ops import Average
from ..config.forms import whole_number
from ..errors import EngineError, NotInitializedError
from ..frameworks.fragments import split_parameters
from ..frameworks.optimizer import ParameterNames
from ..frameworks.options import describe_compression
from ..native import gradients
from ..session import optimizers, runtime
from .optimizer_state import parameter_names
from .outer_check import SharedCheck
from .outer_shared import SharedParameters
from .state import broadcast_optimizer_state

LEARNING_RATE, MOMENTUM = 0.7, 0.9  # DiLoCo's outer optimizer
_UNEQUAL = (
    ". Call engine.torch.broadcast_parameters(model.state_dict(), root_rank=0) before the first step; in an elastic "
    "job, give model and OuterOptimizer to the TorchState"
)


@dataclass
class _Synchronization:
    """Synchronisation of some parameters, from its submission to its outer step."""

    due: int  # number of the inner step after which it is applied
    changes: dict[str, torch.Tensor]  # outer gradients of this rank, by name
    # Operations in flight by name; empty if they are still to be submitted, as after loading a state
    handles: dict[str, Handle]


class OuterOptimizer(torch.optim.Optimizer):
    """Optimizer that makes inner steps on each rank alone, and averages their changes now and then.

    Ranks hold *shared parameters*, which have equal bits on all of them. After `every` inner steps the ranks average
    the differences between the shared parameters and their own. This average is the gradient of a step of the *outer
    optimizer* on the shared parameters, which then replace each rank's own. So a rank sends `1 / every` of the bytes
    that it would send to average gradients.

    All ranks make equally many steps; `join` is for ranks with fewer batches. A step that a gradient scaler skips
    counts. `docs/how-to/local-steps.md` says when not to use this.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Inner optimizer, which keeps its state, hooks and schedulers; with `DistributedOptimizer` and the set of
        `host_process_set()` it reduces gradients within a host in each step.
    named_parameters : iterable of (str, torch.Tensor), optional
        `model.named_parameters()`: names for messages, by which ranks match their parameters. By default the names that
        the inner optimizer has, or else positions.
    every : int
        Inner steps between two synchronisations of a parameter.
    outer : callable, optional
        Makes the outer optimizer of a list of tensors, such as `lambda shared: torch.optim.Adam(shared, lr=0.01)`. By
        default SGD with the following arguments.
    lr, momentum : float, optional
        Learning rate and Nesterov momentum of the outer SGD: 0.7 and 0.9 as in DiLoCo. With 1 and 0 parameters are
        averaged, which is post-local SGD.
    fragments : int
        Number of parts of the model that are synchronised at different steps, `every / fragments` apart, so that
        traffic is even.
    delay : int
        Inner steps between the start of a synchronisation and its outer step, less than `every`. Meanwhile it travels,
        and ranks compute.
    mix : float, optional
        Weight of a rank's own parameters when it takes shared ones, from 0 up to but without 1; Streaming DiLoCo has
        0.5. By default a rank takes the shared ones and, with a delay, adds what its inner steps have changed since it
        sent its own, as DaSGD does; a weight of 0 would undo these steps.
    compression : optional
        `Compression.none`, `fp16`, `bf16`, `fp8`, `tuned`, `tuned8` or a compressor of one's own, for the differences
        that travel.
    process_set : ProcessSet
        Process set whose ranks share parameters. A rank that is not in it trains by itself.
    check_parameters : bool
        Whether to compare the bits of the shared parameters over ranks in the first step and after each outer step. It
        reads them once and exchanges 8 bytes for each.

    Attributes
    ----------
    inner : torch.optim.Optimizer
        Inner optimizer.
    steps : int
        Number of inner steps so far.

    Raises
    ------
    TypeError
        `optimizer` or the result of `outer` is not an optimizer; `compression` is a scheme, or not a compression.
    ValueError
        A number is out of range; `outer` is given together with `lr` or `momentum`; names are missing or occur twice.
    MismatchError
        Ranks have different options or parameters.
    UnsupportedTensorError
        A parameter is not a dense tensor of a floating dtype, on the CPU or a GPU.

    Examples
    --------
    >>> optimizer = engine.torch.OuterOptimizer(torch.optim.AdamW(model.parameters()), model.named_parameters())
    """

    _step_supports_amp_scaling = True  # A gradient scaler then calls `step` also where it skips one, so that it counts.

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        *,
        every: int = 100,
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        lr: float | None = None,
        momentum: float | None = None,
        fragments: int = 1,
        delay: int = 0,
        mix: float | None = None,
        compression: Any = Compression.none,
        process_set: ProcessSet = global_process_set,
        check_parameters: bool = True,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, not {type(optimizer).__qualname__}")
        if isinstance(optimizer, OuterOptimizer):
            raise ValueError(
                "this optimizer is an OuterOptimizer already: give its inner optimizer, or use it as it is"
            )
        self.inner = optimizer
        self.__setstate__({})  # Makes torch's hooks; groups and state are those of the inner optimizer.
        named = _name_parameters(optimizer, named_parameters)
        self.every = whole_number("every", every, 1)
        self.delay = _expect_most("delay", whole_number("delay", delay, 0), self.every - 1, "every - 1")
        self.mix = _expect_mix(mix, self.delay)
        self.compression = _expect_compression(compression)
        self.process_set = process_set
        self.steps = 0
        fragments = _expect_most("fragments", whole_number("fragments", fragments, 1), self.every, "every")
        _expect_most("fragments", fragments, len(named), "the number of parameters")
        self._shared = SharedParameters(named, _choose_outer(outer, lr, momentum))
        self._fragments = split_parameters({name: each.numel() for name, each in named.items()}, fragments, self.every)
        self._pending: list[_Synchronization] = []
        self._seen = [list(group["params"]) for group in optimizer.param_groups]
        self._checks = check_parameters
        self._compared = False  # whether ranks have compared their shared parameters in this world
        self._check: SharedCheck | None = None
        self._prefix = ""
        self._why = ""  # reason why no step can be made
        self._equal_at = -1  # number of steps at the last `synchronize_all`, after which parameters are the shared ones
        self._joined = False  # whether ranks may have changes of before a `join` that they have not sent
        if runtime.is_waiting():
            self._why = WAITING
        else:
            self._enter_world()
        optimizers.register_optimizer(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of the inner optimizer, for schedulers and gradient scalers."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the inner optimizer, by parameter."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default options of the inner optimizer's groups."""
        return self.inner.defaults

    @property
    def outer(self) -> torch.optim.Optimizer:
        """Outer optimizer, for schedulers of its learning rate; all ranks must set the same."""
        return self._shared.optimizer

    @property
    def _engine(self) -> Any:
        """Wrapping of the inner optimizer, if it is a distributed one, by which elastic states ask for its names."""
        return getattr(self.inner, "_engine", None)

    def __repr__(self) -> str:
        return f"OuterOptimizer({self._describe_options()}, inner={self.inner!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copied or unpickled optimizer is a copy of the inner one, since ranks have not agreed on another.
        return self.inner.__reduce_ex__(protocol)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients like the inner optimizer's own method."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further parameters, since fragments are made once.

        Raises
        ------
        EngineError
            In every call.
        """
        raise EngineError(
            "add_param_group(): OuterOptimizer has divided the parameters into fragments: add the group to the inner "
            "optimizer before OuterOptimizer is made"
        )

    def step(self, closure: Any = None) -> Any:
        """Make an inner step, and synchronise what is due after it. Collective where something is due.

        Parameters
        ----------
        closure : callable, optional
            Closure of the inner optimizer.

        Returns
        -------
        object
            Result of the inner optimizer's `step`.

        Raises
        ------
        MismatchError
            The shared parameters have other bits on another rank, or ranks have made different numbers of steps.
        EngineError
            Parameters were added to the inner optimizer, or same as for `engine.allreduce`.
        NotInitializedError
            This process is in no world, or in one without the process set.
        """
        taking_part = self._prepare_step()
        result = self._step_inner(closure)
        if taking_part:
            self._count_step()
        return result

    def _prepare_step(self) -> bool:
        """Begin or go on in this world, and return whether this rank shares parameters."""
        if self._why:
            raise NotInitializedError(self._why)
        if not self.process_set.included():
            return False
        self._expect_groups()
        if not self._shared.begun:
            self._shared.take_values()
        if not self._compared:
            self._compared = True
            if self._check is not None:
                self._check.send(self._shared.tensors, self.steps)
                self._check.complete_comparison(_UNEQUAL)
        for each in self._pending:
            if not each.handles:
                self._send_changes(each)
        return True

    def _expect_groups(self) -> None:
        """Raise EngineError if the inner optimizer has other parameters than this was made with."""
        groups = [group["params"] for group in self.inner.param_groups]
        if not gradients.hold_the_same(groups, self._seen):
            raise EngineError(
                "the inner optimizer has other parameters than when OuterOptimizer was made, and nothing would "
                "synchronise the new ones: make an OuterOptimizer when all parameters are there"
            )

    def _step_inner(self, closure: Any) -> Any:
        """Make the inner step, unless a gradient scaler has found infinities.

        A scaler sets `grad_scale` and `found_inf` for the time of the call, as for torch's fused optimizers.
        """
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        inner: Any = self.inner
        if found is not None and getattr(inner, "_step_supports_amp_scaling", False):
            inner.grad_scale, inner.found_inf = scale, found
            try:
                return inner.step()
            finally:
                del inner.grad_scale, inner.found_inf
        if found is not None and found.item():
            return None
        if scale is not None:
            self._unscale_gradients(scale)
        return inner.step() if closure is None else inner.step(closure)

    def _unscale_gradients(self, scale: torch.Tensor) -> None:
        inverse = scale.double().reciprocal().float()  # rounded as by torch's scaler
        with torch.no_grad():
            for group in self.inner.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))

    @torch.no_grad()
    def _count_step(self) -> None:
        """Count an inner step, and apply and start the synchronisations that are due."""
        self.steps += 1
        self._apply_pending(self.steps - 1)  # what an interrupt has left, so that no fragment is in flight twice
        for fragment in self._fragments:
            if fragment.is_due(self.steps, self.every):
                self._pending.append(self._start(fragment.names, self.steps + self.delay))
        self._apply_pending(self.steps)

    def _apply_pending(self, steps: int | None = None) -> None:
        """Apply what is due after so many steps; without a number, all that is in flight, ahead of its step."""
        while self._pending and (steps is None or self._pending[0].due <= steps):
            self._apply_changes(self._pending[0], self.mix)
            del self._pending[0]  # Not before: a signal handler may interrupt the wait, and the next step goes on.

    def _start(self, names: Iterable[str], due: int) -> _Synchronization:
        """Start to average the changes of some parameters."""
        started = _Synchronization(due, self._shared.measure_changes(names), {})
        self._send_changes(started)
        return started

    def _send_changes(self, started: _Synchronization) -> None:
        for name, change in started.changes.items():
            started.handles[name] = allreduce_async(
                change, Average, self._prefix + name, process_set=self.process_set, compression=self.compression
            )

    def _apply_changes(self, arriving: _Synchronization, mix: float | None) -> None:
        """Wait for a synchronisation, make the outer step, and take its result; without a mix, keep later steps."""
        if self._check is not None:
            self._check.complete_comparison()
        averages = {name: handle.wait() for name, handle in arriving.handles.items()}
        if mix is None:
            later = self._shared.measure_later_changes(arriving.changes)
            self._shared.apply_averages(averages)
            self._shared.take_shared_with(later)
        else:
            self._shared.apply_averages(averages)
            self._shared.mix_in(averages, mix)
        if self._check is not None:
            self._check.send({name: self._shared.tensors[name] for name in averages}, arriving.due)

    @torch.no_grad()
    def synchronize_all(self) -> None:
        """Synchronise all parameters now, so that each rank's own are the shared ones. Collective.

        For the end of the training, and before a model is evaluated or saved. Fragments that have changed since their
        last synchronisation make an outer step.

        Raises
        ------
        EngineError
            Same as for `step`.
        """
        if not self._prepare_step():
            return
        self._apply_pending()
        if self._equal_at != self.steps:
            started = [
                self._start(each.names, self.steps)
                for each in self._fragments
                if self._joined or self.mix or not self.steps or not each.is_due(self.steps, self.every)
            ]
            for each in started:
                self._apply_changes(each, 0.0)
            self._shared.mix_in(self._shared.tensors, 0.0)
            self._equal_at, self._joined = self.steps, False
        if self._check is not None:
            self._check.complete_comparison()

    @torch.no_grad()
    def join(self) -> int:
        """Wait until all ranks have run out of batches, and take the shared parameters of the last. Collective.

        Until then this rank contributes no changes to those of the others; the divisor of the average stays the number
        of ranks. Its own changes since its last synchronisation are kept: its parameters differ from the shared ones
        afterwards by as much as before. All ranks call it, and then may go on, or call `synchronize_all`.

        Returns
        -------
        int
            Rank that joined last; equal on all ranks.

        Raises
        ------
        EngineError
            Same as for `engine.join`.
        """
        if not self._prepare_step():
            raise EngineError(f"join(): rank {runtime.current_session().world.rank} is not in {self.process_set}")
        self._apply_pending()
        if self._check is not None:
            self._check.complete_comparison()
        last = int(self.process_set.engine.join())
        before = {name: each.clone() for name, each in self._shared.tensors.items()}
        self.steps = objects.broadcast_object(self.steps, last, None, self.process_set)
        handles = [broadcast_async_(each, last, None, self.process_set) for each in self._shared.tensors.values()]
        for handle in handles:
            handle.wait()
        broadcast_optimizer_state(self._shared.optimizer, last, None, self.process_set)
        for name, local in self._shared.local.items():
            local.detach().add_((self._shared.tensors[name] - before[name]).to(local.dtype))
        self._equal_at, self._joined = -1, True
        return last

    def shared_parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of the shared parameters, by name; this rank's own before the first step. Not a collective."""
        source = self._shared.tensors if self._shared.begun else self._shared.local
        return {name: each.detach().clone() for name, each in source.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, and under `outer` all that this one needs to go on.

        The latter has the shared parameters, the outer optimizer's state, the number of steps, and this rank's part of
        what is in flight, which is sent again after the state is loaded.
        """
        pending = [{"due": each.due, "changes": dict(each.changes)} for each in self._pending]
        own = self._shared.state_dict() | {"steps": self.steps, "equal_at": self._equal_at, "pending": pending}
        return self.inner.state_dict() | {"outer": own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` has returned; all ranks do so after equally many steps.

        With the state of an inner optimizer alone, the shared parameters are those that the model has in the next step.

        Raises
        ------
        ValueError
            The state is that of other parameters.
        """
        state = dict(state_dict)
        own = state.pop("outer", None) or {"shared": {}, "optimizer": self._shared.optimizer.state_dict()}
        self.renew_pending()
        self._shared.load_state_dict(own)
        with torch.enable_grad():
            self.inner.load_state_dict(state)
        self.steps, self._equal_at = own.get("steps", 0), own.get("equal_at", -1)
        self._pending = [
            _Synchronization(each["due"], self._shared.copy_to_devices(each["changes"]), {})
            for each in own.get("pending", [])
        ]

    def renew_pending(self) -> None:
        """Send again in the next step what is in flight, as ranks do that load the state of this one."""
        for each in self._pending:
            for handle in each.handles.values():
                with suppress(EngineError):  # The world has ended or failed, and this is to be restored.
                    handle.wait()  # Its name is free then.
            each.handles.clear()

    def _enter_world(self) -> None:
        """Agree with the other ranks on options and parameters. Collective."""
        self._why, self._check, self._compared = "", None, False
        if not self.process_set.included():
            return
        number = self.process_set.numbers.next("outer optimizer")
        self._prefix = f"outer{number or ''}."
        options = {"options": (self._describe_options(), 0)}
        objects.compare_descriptions(
            options, "OuterOptimizer: the ranks give different options", None, self.process_set
        )
        described = {name: (objects.describe(name, each), 0) for name, each in self._shared.local.items()}
        title = "OuterOptimizer: the ranks' inner optimizers have different parameters"
        objects.compare_descriptions(described, title, None, self.process_set)
        if self._checks:
            self._check = SharedCheck(f"{self._prefix}shared bits", self.process_set)

    def _describe_options(self) -> str:
        """Return the options that must be equal on all ranks, as text."""
        numbers = {key: value for key, value in self.outer.defaults.items() if isinstance(value, bool | int | float)}
        outer = ", ".join(f"{key}={value}" for key, value in numbers.items())
        return (
            f"every={self.every} fragments={len(self._fragments)} delay={self.delay} mix={self.mix} "
            f"compression={describe_compression(self.compression)} outer={type(self.outer).__name__}({outer}) "
            f"check_parameters={self._checks}"
        )

    def move_to_world(self, root: int | None) -> None:
        """Go on in the world that this process has just entered. Collective. See `optimizers.MovableOptimizer`.

        What was in flight is dropped; the state of the elastic job has it as of its last commit.
        """
        self._pending = []
        try:
            self.process_set.included()
        except NotInitializedError as error:
            self._why, self._check = str(error), None
            return
        self._enter_world()

    def leave_behind(self) -> None:
        """Refuse further steps, since some rank of the world does not have this optimizer."""
        self._pending, self._check = [], None
        self._why = (
            f"this OuterOptimizer was made in an earlier world, and some rank of world {runtime.world_number()} has "
            "not made it: make it before elastic.run, or anew in each call of what that wraps"
        )


def _choose_outer(
    outer: Callable[[list[torch.Tensor]], Any] | None, lr: float | None, momentum: float | None
) -> Callable[[list[torch.Tensor]], Any]:
    """Return the function that makes the outer optimizer; raise TypeError or ValueError for bad arguments."""
    if outer is not None:
        if lr is not None or momentum is not None:
            raise ValueError("give outer, or lr and momentum of the default one: not both")
        if not callable(outer):
            raise TypeError(
                "outer is a function that makes the outer optimizer of a list of tensors, such as lambda shared: "
                f"torch.optim.SGD(shared, lr=0.7), and not {type(outer).__qualname__}"
            )
        return outer
    lr, momentum = LEARNING_RATE if lr is None else lr, MOMENTUM if momentum is None else momentum
    if not 0 < lr < float("inf"):
        raise ValueError(f"lr is {lr}; the outer optimizer needs a positive number")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum}; expected a number from 0 up to but without 1")
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


def _expect_most(name: str, value: int, most: int, what: str) -> int:
    """Return a number; raise ValueError if it is larger than `most`, which `what` names."""
    if value > most:
        raise ValueError(f"{name} is at most {what}, which is {most}, and not {value}")
    return value


def _expect_mix(mix: float | None, delay: int) -> float | None:
    """Return the weight of a rank's own parameters, checked; None if later steps are to be kept."""
    if mix is None:
        return None if delay else 0.0  # Without a delay there are no later steps, and the ranks' bits stay equal.
    if not 0 <= mix < 1:
        raise ValueError(f"mix is {mix}; expected a number from 0 up to but without 1")
    return float(mix)


def _expect_compression(compression: Any) -> Any:
    """Return a compression that an allreduce accepts; raise TypeError for others."""
    if isinstance(compression, Scheme):
        raise TypeError(
            f"{type(compression).__name__} is a scheme for gradients, and OuterOptimizer sends differences of "
            "parameters: give it Compression.none, fp16, bf16, fp8 or tuned, and the scheme to DistributedOptimizer"
        )
    resolve(compression, Average)
    return compression


def _name_parameters(optimizer: torch.optim.Optimizer, named_parameters: Any) -> dict[str, torch.Tensor]:
    """Return the parameters of an optimizer by name; raise ValueError if a name is missing or there are none."""
    groups = [group["params"] for group in optimizer.param_groups]
    given = None if named_parameters is None else ParameterNames(named_parameters)
    named: dict[str, torch.Tensor] = {}
    for g, (group, own) in enumerate(zip(groups, parameter_names(optimizer), strict=True)):
        for p, (parameter, name) in enumerate(zip(group, own, strict=True)):
            chosen = name if given is None else given.get(parameter)
            if chosen is None:
                raise ValueError(
                    f"named_parameters has no name for parameter {p} of group {g}, of shape {list(parameter.shape)}; "
                    "name all of the inner optimizer's parameters, or none"
                )
            named[chosen] = parameter
    if not named:
        raise ValueError("the inner optimizer has no parameters")
    return named
