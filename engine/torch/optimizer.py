"""`DistributedOptimizer` for torch, which makes an existing optimizer reduce its gradients over all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..collectives.compression import Compression
from ..collectives.freezing import agree_on_freeze
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Adasum, Average
from ..errors import EngineError
from ..frameworks.no_reducer import NoReducer
from ..frameworks.optimizer import Distributed, ParameterNames, Wrapping, expect_unwrapped
from ..frameworks.options import ReductionOptions
from ..session import runtime
from .adasum import Deltas
from .freezing import FrozenReduction, Plan, expect_all_ranks
from .hooks import TorchReducer
from .input import time_loaders
from .optimizer_state import has_order
from .outer_optimizer import OuterOptimizer
from .rivals import expect_no_rival, warn_of_lone_library


class _DistributedTorchOptimizer(Distributed):
    """Methods that wrapping adds to the class of an optimizer of torch."""

    _engine: _TorchWrapping

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names by parameter, as scripts and tests for Horovod expect them."""
        return {parameter: name for name, parameter in self._engine.parameters.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients like the optimizer's own method, after completing a pass that an exception interrupted."""
        self._engine.reduction.before_zero()
        set_to_none = set_to_none and not self._engine.is_frozen
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._engine.reducer.mark_zeroed()
        if set_to_none:
            self._engine.reducer.mark_dropped()

    def freeze(self) -> None:
        """Declare that from now on each backward pass computes the same gradients at the same addresses. Collective.

        Ranks then need no agreement. A backward pass enqueues its reductions after itself on the current stream, and
        may be captured into a CUDA graph with them. `zero_grad()` keeps gradients in their memory, and `step()` reduces
        only gradients that `no_sync()` has left. A second call has no effect. See `docs/how-to/cuda-graphs.md`.

        Raises
        ------
        EngineError
            No step has been run yet, the optimizer's options cannot be frozen, or this was called within `no_sync()`.
            If one rank refuses, all ranks raise an error with its number and reason. So they do if only some ranks have
            frozen the optimizer already.
        NotInitializedError
            This process is in no world.
        UnsupportedTensorError
            A gradient is sparse, in the host's memory, or not of a floating dtype.
        MismatchError
            The ranks have different gradients.
        DeviceError, WorldError
            A GPU, or a rank, has failed.
        """
        self._engine.freeze()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes that are accumulated before a reduction; always 1 if frozen.

        Raises
        ------
        EngineError
            The optimizer is frozen, and `passes` is not 1.
        """
        if self._engine.is_frozen and passes != 1:
            raise EngineError(
                "set_backward_passes_per_step(): the optimizer is frozen, and reduces each pass: run all passes but "
                "the last in optimizer.no_sync(), or unfreeze() before"
            )
        super().set_backward_passes_per_step(passes)

    def unfreeze(self) -> None:
        """Return to steps in which ranks agree on their gradients. All ranks must do the same.

        Raises
        ------
        EngineError
            This was called within `no_sync()`.
        """
        self._engine.unfreeze()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like the optimizer's own method, and reduce its parameters' gradients, too. Collective."""
        super().add_param_group(param_group)  # type: ignore[misc]
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        try:
            self._engine.adopt_groups(groups)
        except BaseException:
            groups.pop()  # Otherwise steps would use gradients that are not reduced.
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copied or unpickled optimizer is a plain one, since hooks belong to this one's parameters.
        return _plain, (self._engine.kind,), self.__getstate__()


class _TorchWrapping(Wrapping):
    """State of a wrapped optimizer of torch."""

    broadcast = "engine.torch.broadcast_parameters(model.state_dict(), root_rank={root})"

    def __init__(self, optimizer: torch.optim.Optimizer, options: ReductionOptions, named_parameters: Any) -> None:
        super().__init__(type(optimizer), options, named_parameters)
        self._handles: list[Any] = []
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._has_own_names = named_parameters is None
        groups = optimizer.param_groups if has_order(optimizer) and options.op is not Adasum else []
        self._places = {id(each): p for group in groups for p, each in enumerate(group["params"])}

    def adopt_groups(self, groups: list[dict[str, Any]]) -> None:
        """Call `adopt`; without names from the user, with those that the optimizer itself has."""
        if self._has_own_names:
            self.names = _names_in(groups)
        self.add_groups(group["params"] for group in groups)

    def make(self, options: ReductionOptions, prefix: str, number: int) -> TorchReducer | Deltas:
        return Deltas(options, prefix, number) if options.op is Adasum else TorchReducer(options, number)

    def describe(self, name: str, parameter: torch.Tensor) -> tuple[str, int]:
        text, _ = super().describe(name, parameter)
        place = " on a GPU" if parameter.is_cuda else ""
        # In an elastic job, new ranks may not have run the code yet that freezes or unfreezes a layer.
        frozen = "" if self.moving else f" requires_grad={parameter.requires_grad}"
        # With all parameters in one vector, an optimizer's rounding depends on their order.
        order = f" at place {self._places[id(parameter)]}" if id(parameter) in self._places else ""
        return f"{text}{_describe_layout(parameter)}{frozen}{place}{order}", 0

    def expect_alone(self, named: dict[str, Any]) -> None:
        expect_no_rival(named)

    @property
    def is_frozen(self) -> bool:
        """Return whether the optimizer is frozen."""
        return isinstance(self.reduction, FrozenReduction)

    def freeze(self) -> None:
        """Freeze the optimizer; see `_DistributedTorchOptimizer.freeze`."""
        if isinstance(self.reducer, NoReducer):
            self.reducer.freeze()
        expect_all_ranks(self.options)
        runtime.current_engine()  # Raise if this process has no engine, or is a forked child.
        plan = agree_on_freeze(self._plan)
        if plan is not None:
            self.reduction = FrozenReduction(self.reducer, plan)
            self._expect_collection()
            self._first = None  # Its comparison may still be in flight, and would be captured.

    def _plan(self) -> Plan | None:
        """Make the plan of a freeze; None: it is frozen already."""
        if not isinstance(self.reducer, TorchReducer):
            raise EngineError("freeze(): an optimizer with op=Adasum cannot be frozen: use Average or Sum")
        if self.is_frozen:
            return None
        if not self._begun:
            raise EngineError("freeze(): run a step first, and then zero_grad(set_to_none=False)")
        return Plan.from_reducer(self.reducer)

    def unfreeze(self) -> None:
        """Unfreeze the optimizer; see `_DistributedTorchOptimizer.unfreeze`."""
        if isinstance(self.reduction, FrozenReduction):
            self.reduction.unfreeze()
            self.reduction = self.reducer
            self._expect_collection()

    def hang_on(self, optimizer: torch.optim.Optimizer) -> None:
        """Register hooks before and after each step, and a finalizer."""
        # Schedulers keep a reference to the class's own `step`, so these are hooks, not an override.
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self.after_step()),
        ]
        self.after_move(optimizer)

    def after_move(self, optimizer: torch.optim.Optimizer) -> None:
        self._expect_collection()

    def _expect_collection(self) -> None:
        """Remove the hooks of the present reduction when the optimizer is collected."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self._optimizer(), self.reduction.remove)
        self._finalizer.atexit = False

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `before_step` with the closure, if any, among the arguments of the optimizer's `step`."""
        named = "closure" in kwargs
        given = kwargs["closure"] if named else args[1] if len(args) > 1 else None
        if not self._begun and runtime.is_initialized() and self.process_set.included():
            warn_of_lone_library(given)
        closure = self.before_step(given)
        if closure is given:
            return None
        return (args, kwargs | {"closure": closure}) if named else ((args[0], closure, *args[2:]), kwargs)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._finalizer is not None:
            self._finalizer.detach()  # It would keep the reducer and the engine alive as long as the optimizer.
        super().end()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    gradient_as_bucket_view: bool = False,
    check_parameters: bool = True,
) -> Any:
    """Make an optimizer reduce its parameters' gradients over all ranks. Collective.

    Gradients are reduced while backward runs, and are complete when `backward()` returns. The result of a second
    backward before `step()` is reduced again, which is right for `Average` and an error for every other operation; see
    `no_sync()`. `step()` first reduces gradients that backward has not, such as those set by hand, and so does
    `synchronize()`.

    With `Adasum`, the changes of each rank's own `step()` are reduced instead of gradients: see
    `docs/reference/optimizer.md`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Optimizer to wrap. It stays the same object, with its state, hooks and schedulers; its class becomes a subclass
        of the same name.
    named_parameters : iterable of (str, torch.Tensor), optional
        `model.named_parameters()`: names for messages, by which ranks match their gradients. By default the names that
        the optimizer itself has, or else positions.
    compression : optional
        `Compression.none`, `fp16`, `bf16`, `fp8`, `tuned` or `tuned8`; a compressor of one's own; or a `Scheme` such as
        `PowerSGD()`, which then belongs to this optimizer. See `engine.Compressor`.
    backward_passes_per_step : int
        Number of backward passes that this rank accumulates before a reduction. `step()` after fewer passes, as at the
        end of an epoch, reduces the incomplete sum. The sum is not divided by the number of passes.
    op : Op
        `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`.
    gradient_predivide_factor : float
        Divisor of the ranks' gradients before they are added, with `Average`; the sum is divided by the world size over
        this factor.
    num_groups, groups : int, list of lists of torch.Tensor, optional
        Accepted for existing scripts, and without effect: gradients that are ready together are sent together anyway.
    sparse_as_dense : bool
        Whether to convert sparse gradients to dense ones before their reduction. Without effect for `SparseAdam`, which
        accepts no dense ones. Otherwise they stay sparse, with `Sum` and `Average`: each rank adds up its own entries,
        and sends these.
    process_set : ProcessSet
        Process set whose ranks reduce their gradients with each other. A rank that is not in it trains by itself.
    prescale_factor, postscale_factor : float
        Factors for the local gradients (with `Adasum`, changes), and for the result.
    gradient_as_bucket_view : bool
        Whether to keep gradients side by side, in shared memory or on the GPU, where they are reduced without copies.
        It takes as much memory as the gradients. Not with `Adasum`.
    check_parameters : bool
        Whether to compare the ranks' parameters in the first step, once, and log a warning if they differ, as after a
        forgotten `broadcast_parameters`. It reads the parameters once and exchanges 8 bytes for each of them.

    Returns
    -------
    torch.optim.Optimizer
        `optimizer`, with `synchronize()`, `skip_synchronize()`, `no_sync()`, `communication()` (seconds waited) and
        `unwrap()`. A copy or a pickle of it is a plain optimizer.

    Raises
    ------
    TypeError
        `optimizer` is not an optimizer, `compression` is not a compression, or `named_parameters` is a model.
    ValueError
        A number is out of range; `Adasum` has a number of ranks that is not a power of two; names are missing or
        occur twice; the optimizer is wrapped already, or a parameter belongs to another wrapped one.
    EngineError
        A parameter belongs to a model that torch's `DistributedDataParallel` or FSDP reduces, too; raised here, or by
        the first step.
    MismatchError
        The ranks' parameters differ in name, dtype or shape.
    UnsupportedTensorError
        Parameters are on a device other than the CPU or a CUDA one.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, not {type(optimizer).__qualname__}")
    expect_unwrapped(optimizer)
    if isinstance(optimizer, OuterOptimizer):
        raise ValueError("DistributedOptimizer takes the inner optimizer of OuterOptimizer: wrap that one first")
    options = ReductionOptions.from_arguments(
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        gradient_as_bucket_view=gradient_as_bucket_view,
        check_parameters=check_parameters,
    )
    if isinstance(optimizer, torch.optim.SparseAdam):
        options = replace(options, sparse_as_dense=False)  # It accepts no dense gradients; the sums are the same.
    own_step = _hooked_step(optimizer)
    wrapping = _TorchWrapping(optimizer, options, named_parameters)
    try:
        wrapping.adopt_groups(optimizer.param_groups)
    except BaseException:
        wrapping.end()
        raise
    wrapping.wrap_optimizer(optimizer, _DistributedTorchOptimizer, own_step)
    wrapping.hang_on(optimizer)
    time_loaders()
    return optimizer


def _hooked_step(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return additions to the class of a wrapped optimizer, so that `step` calls hooks: none, or a `step` of its own.

    torch 2.2 removes the hooks from the `step` of every class at the first compilation, but still marks it as hooked.
    Raises EngineError if a scheduler has a reference to the `step` without hooks.
    """
    step: Any = type(optimizer).step
    if not getattr(step, "hooked", False):
        return {}  # torch adds them itself
    layer = step
    while layer is not None:
        if "profile_hook_step" in getattr(getattr(layer, "__code__", None), "co_qualname", ""):
            return {}
        layer = getattr(layer, "__wrapped__", None)
    if "step" in vars(optimizer):
        raise EngineError(
            f"torch {torch.__version__} has removed the step hooks of {type(optimizer).__name__}, as it does when it "
            "compiles something, and a scheduler has been made since: make the scheduler after DistributedOptimizer, "
            "or call torch.compile after both"
        )
    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]
    return {"step": hooked}


def _names_in(groups: list[dict[str, Any]]) -> ParameterNames | None:
    """Return the names that an optimizer itself has for its parameters, if all have a unique one; since torch 2.6."""
    named: list[tuple[str, torch.Tensor]] = []
    for group in groups:
        named += zip(group.get("param_names") or (), group["params"], strict=False)
    count = sum(len(group["params"]) for group in groups)
    return ParameterNames(named) if len({name for name, _ in named}) == count else None


def _plain(kind: type) -> Any:
    """Make an empty optimizer, for `copy` and `pickle` to fill."""
    return object.__new__(kind)


def _describe_layout(parameter: torch.Tensor) -> str:
    """Describe strides that are not row-major. Ranks compare them, since shared gradients are reduced in place."""
    return "" if parameter.is_contiguous() else f" with strides {list(parameter.stride())}"
