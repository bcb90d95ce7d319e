"""`DistributedOptimizer` for torch: the optimizer it is given, which from then on reduces gradients over all ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import logs, objects
from ..compression import Compression, Scheme, resolve
from ..errors import EngineError
from ..process_sets import ProcessSet, global_process_set
from ..types import Adasum, Average, Op
from .adasum import Deltas
from .first_step import FirstStep
from .reducer import Reducer
from .rivals import expect_no_rival

# How many optimizers each process set has had: its ranks have wrapped equally many of them, and perhaps others besides.
_counts: weakref.WeakKeyDictionary[ProcessSet, Iterator[int]] = weakref.WeakKeyDictionary()


class _Distributed:
    """What the class of a wrapped optimizer has on top of its own. `_engine` is the state of one wrapping."""

    _engine: _Wrapping

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own; finishes a pass that an exception has cut short."""
        self._engine.reducer.before_zero()
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._engine.reducer.forget()
        if set_to_none:
            self._engine.reducer.renew()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the new parameters are reduced too. Collective."""
        super().add_param_group(param_group)  # type: ignore[misc]
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        try:
            self._engine.adopt(groups)
        except BaseException:
            groups.pop()  # Steps would use what is not reduced.
            raise

    def synchronize(self) -> None:
        """Reduce the gradients now, if nothing has reduced them since the last `step` or `zero_grad`. Collective then.

        `backward` reduces by itself, and `step` what else there is. So this is for gradients that were set by hand, and
        for a rank that may have had nothing to pass backward through: before they are clipped, unscaled or looked at.
        """
        self._engine.reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step` uses the gradients as they are, also those that were never reduced. All ranks must do the same.

        With `op=Adasum`, where `step` reduces what it has changed, it raises an `EngineError`.
        """
        with self._engine.reducer.skip():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up so many backward passes before a reduction, from now on. Collective in a window that is not complete.

        What such a window has added up is reduced first.
        """
        if passes < 1:
            raise ValueError(f"backward_passes_per_step is 1 or more, not {passes}")
        self._engine.reducer.finish()
        self._engine.reducer.group.passes = passes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the first backward after it, or `step`, reduces the sum, once.

        All ranks must do the same.
        """
        with self._engine.reducer.pause():
            yield

    def communication(self) -> float:
        """Seconds that this rank's callers have waited in the engine since the last call (at first: since wrapping)."""
        return self._engine.waited()

    def unwrap(self) -> torch.optim.Optimizer:
        """Take the hooks away and give the optimizer its own class back. Returns it."""
        assert isinstance(self, torch.optim.Optimizer)
        state: _Wrapping = self._engine
        state.end()
        del self._engine
        self.__class__ = state.kind
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy, or what a pickle brings back, is a plain optimizer: hooks belong to this one's parameters.
        return _plain, (self._engine.kind,), self.__getstate__()


class _Wrapping:
    """What a wrapped optimizer remembers."""

    def __init__(
        self,
        kind: type,
        reducer: Reducer | Deltas,
        names: dict[int, str] | None,
        prefix: str,
        process_set: ProcessSet,
        options: str,
        check_parameters: bool,
    ) -> None:
        self.kind = kind
        self.options = options
        self.reducer = reducer
        self.process_set = process_set
        self.names = names
        self.prefix = prefix
        self.handles: list[Any] = []
        self.finalizer: weakref.finalize[Any, Any] | None = None
        self._known: set[int] = set()
        self._parameters: dict[str, torch.Tensor] = {}
        self._begun = False  # the first step
        self._first = FirstStep(prefix, process_set) if check_parameters and process_set.included() else None
        self._engine = reducer.engine
        self._waited_ns = self._engine.counters()["wait_ns"]

    def adopt(self, groups: list[dict[str, Any]]) -> None:
        """Reduce the parameters of `groups` that are not yet reduced. Collective."""
        if not self.process_set.included():
            return  # This rank trains by itself.
        new: dict[str, torch.Tensor] = {}
        known = set(self._known)
        for g, group in enumerate(groups):
            for p, parameter in enumerate(group["params"]):
                if id(parameter) in known:
                    continue
                name = f"group{g}.param{p}" if self.names is None else self.names.get(id(parameter))
                if name is None:
                    raise ValueError(
                        f"named_parameters has no name for parameter {p} of group {g}, of shape "
                        f"{list(parameter.shape)}; name all of the optimizer's parameters, or none"
                    )
                known.add(id(parameter))
                new[self.prefix + name] = parameter
        if new:
            described = {
                name: (f"{objects.describe(name, each)} requires_grad={each.requires_grad}", _layout(each))
                for name, each in new.items()
            }
            objects.compare(
                {"options": (self.options, 0)},
                "DistributedOptimizer: the ranks give different options",
                None,
                self.process_set,
            )
            objects.compare(
                described,
                "DistributedOptimizer: the ranks' optimizers have different parameters",
                None,
                self.process_set,
            )
            own = {name.removeprefix(self.prefix): parameter for name, parameter in new.items()}
            expect_no_rival(own)
            self.reducer.add(new)
            self._parameters |= own
            self._known = known

    def before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have the gradients reduced before a step uses them. A step may be given a closure, which makes them."""
        if not self._begun:
            self._begun = True
            expect_no_rival(self._parameters)
            if self._first is not None:
                self._first.begin(self._parameters)
        named = "closure" in kwargs
        closure = kwargs["closure"] if named else args[1] if len(args) > 1 else None
        if not callable(closure):
            self.reducer.before_step()
            return None
        closure = self.reducer.around(closure, f"{self.kind.__qualname__}.step()")
        if named:
            return args, kwargs | {"closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def after_step(self, *_: Any) -> None:
        """The gradients have been used."""
        self.reducer.after_step()
        if self._first is not None and self._first.tell():
            self._first = None

    def waited(self) -> float:
        """Seconds in the engine since the last call."""
        before, self._waited_ns = self._waited_ns, self._engine.counters()["wait_ns"]
        return (self._waited_ns - before) / 1e9

    def end(self) -> None:
        """Undo what wrapping did, but for the class."""
        for handle in self.handles:
            handle.remove()
        if self.finalizer is not None:
            self.finalizer.detach()  # It would keep the reducer, and with it the engine, as long as the optimizer.
        self.reducer.remove()


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

    Gradients are reduced while backward runs, and are done when `backward()` returns. A second backward before `step()`
    is reduced again, which is right for `Average` and an error for every other operation; see `no_sync()`. `step()`
    first reduces gradients that backward has not, such as those set by hand, and so does `synchronize()`.

    With `Adasum` it is not gradients that are reduced, but what each rank's own `step()` changes: see
    `docs/optimizer.md`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Stays the same object, with its state, hooks and schedulers; its class becomes a subclass of the same name.
    named_parameters : iterable of (str, torch.Tensor), optional
        `model.named_parameters()`: names for messages, equal on all ranks. Numbers by default.
    compression : optional
        `Compression.none`, `fp16`, `bf16` or `tuned`; a compressor of one's own; or a `Scheme` such as `PowerSGD()`,
        which then belongs to this optimizer. See `engine.compression`.
    backward_passes_per_step : int
        So many backward passes are added up on this rank before a reduction. `step()` after fewer of them, as at the
        end of an epoch, reduces what there is. The sum is not divided by their number.
    op : Op
        `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`.
    gradient_predivide_factor : float
        With `Average`: divide by it before the ranks' gradients are added, and by the world size over it after.
    num_groups, groups : int, list of lists of torch.Tensor, optional
        Accepted for scripts that have them, and without effect: gradients that are ready together travel together
        anyway.
    sparse_as_dense : bool
        Make sparse gradients dense and reduce them. Else they stay sparse, with `Sum` and `Average`: each rank adds up
        its own entries, and sends these.
    process_set : ProcessSet
        Whose ranks reduce their gradients with each other. A rank that is not in it trains by itself.
    prescale_factor, postscale_factor : float
        Multiply the local gradients (with `Adasum`, changes), and the result.
    gradient_as_bucket_view : bool
        Keep gradients in shared memory, where they are reduced without copies. Takes as much of it as the gradients.
        Not with `Adasum`.
    check_parameters : bool
        Compare the ranks' parameters in the first step, once, and log a warning if they differ, as when
        `broadcast_parameters` was forgotten. It reads the parameters once and exchanges 8 bytes for each of them.

    Returns
    -------
    torch.optim.Optimizer
        `optimizer`, with `synchronize()`, `skip_synchronize()`, `no_sync()`, `communication()` (seconds waited) and
        `unwrap()`. A copy or a pickle of it is a plain optimizer.

    Raises
    ------
    TypeError
        Not an optimizer; not a compression; a model in place of its parameters.
    ValueError
        Numbers that make no sense; `Adasum` among a number of ranks that is no power of two; names that are missing or
        given twice; an optimizer that is wrapped already, or a parameter that belongs to one.
    EngineError
        A parameter belongs to a model that torch's `DistributedDataParallel` or FSDP reduces, too; raised here, or by
        the first step.
    MismatchError
        The ranks' parameters differ in name, dtype or shape.
    UnsupportedTensorError
        Parameters on a device.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, not {type(optimizer).__qualname__}")
    if isinstance(optimizer, _Distributed):
        raise ValueError(
            "this optimizer is wrapped in DistributedOptimizer already; wrap it once, or unwrap() it first"
        )
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is 1 or more, not {backward_passes_per_step}")
    if gradient_predivide_factor != 1.0:
        if op != Average or not 0 < gradient_predivide_factor < float("inf"):
            raise ValueError("gradient_predivide_factor is a positive number and goes with op=Average only")
        prescale_factor /= gradient_predivide_factor
        postscale_factor *= gradient_predivide_factor
    if isinstance(compression, Scheme) and (op != Average or prescale_factor != 1.0 or postscale_factor != 1.0):
        raise ValueError(
            f"{type(compression).__name__} averages gradients: it goes with op=Average and without factors"
        )
    if num_groups < 0 or (num_groups and groups is not None):
        raise ValueError("give num_groups (0 or more) or groups, not both")
    if gradient_as_bucket_view and process_set is not global_process_set:
        raise ValueError(
            "gradient_as_bucket_view goes with all ranks: gradients are shared by the world, not by a process set"
        )
    names = None if named_parameters is None else _names(named_parameters)
    kind = type(optimizer)
    own_step = _hooked_step(optimizer)
    number = next(_counts.setdefault(process_set, itertools.count()))
    prefix = f"{'change' if op == Adasum else 'gradient'}{number or ''}"
    reducer: Reducer | Deltas
    if op == Adasum:
        if gradient_as_bucket_view:
            raise ValueError("op=Adasum reduces no gradients: leave out gradient_as_bucket_view")
        compression = _uncompressed(compression, process_set)
        reducer = Deltas(prefix, prescale_factor, postscale_factor, process_set, number)
    else:
        reducer = Reducer(
            process_set,
            Op(op),
            prescale_factor,
            postscale_factor,
            gradient_as_bucket_view,
            sparse_as_dense,
            compression,
            number,
        )
    reducer.group.passes = backward_passes_per_step
    options = (
        f"op={Op(op).name.title()} compression={_described(compression)} "
        f"backward_passes_per_step={backward_passes_per_step} sparse_as_dense={sparse_as_dense} "
        f"gradient_as_bucket_view={gradient_as_bucket_view}"
    )
    wrapping = _Wrapping(kind, reducer, names, prefix + ".", process_set, options, check_parameters)
    try:
        wrapping.adopt(optimizer.param_groups)
    except BaseException:
        wrapping.end()
        raise
    # Schedulers keep the class's own `step`, so what must happen around it hangs on hooks, not on an override.
    wrapping.handles = [
        optimizer.register_step_pre_hook(wrapping.before_step),
        optimizer.register_step_post_hook(wrapping.after_step),
    ]
    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, **own_step}
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), namespace)
    optimizer._engine = wrapping  # type: ignore[attr-defined]
    wrapping.finalizer = weakref.finalize(optimizer, reducer.remove)
    wrapping.finalizer.atexit = False
    return optimizer


def _hooked_step(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the class of a wrapped optimizer needs so that `step` calls hooks: nothing, or a `step` of its own.

    torch 2.2 takes the hooks out of the `step` of every class when something is compiled for the first time, and says
    that they are there.

    Raises
    ------
    EngineError
        A scheduler holds on to the `step` without hooks.
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


def _uncompressed(compression: Any, process_set: ProcessSet) -> Any:
    """No compression, with a warning if there was one: Adasum does not compress, and can do without."""
    wire, own = resolve(compression)
    if (wire is not None or own is not None) and process_set.included() and process_set.rank() == 0:
        logs.logger.warning(
            "op=Adasum does not compress: changes travel as they are, and compression=%s has no effect; leave it out",
            getattr(compression, "__qualname__", type(compression).__qualname__),
        )
    return Compression.none


def _described(compression: Any) -> str:
    """What ranks compare of a compression: its class, and the numbers that it was made with."""
    if compression is None or isinstance(compression, type):
        return str(getattr(compression or Compression.none, "__qualname__", compression))
    made = getattr(compression, "__dict__", {}).items()
    plain = [f"{name.lstrip('_')}={value!r}" for name, value in made if isinstance(value, bool | int | float | str)]
    return f"{type(compression).__qualname__}({', '.join(plain)})"


def _plain(kind: type) -> Any:
    """An empty optimizer, for `copy` and `pickle` to fill."""
    return object.__new__(kind)


def _layout(parameter: torch.Tensor) -> int:
    """Strides as a number to compare: gradients in shared memory are reduced as they lie."""
    number = 0
    for stride in parameter.stride():
        number = (number * 1_000_003 + stride) % (1 << 61)
    return number


def _names(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """Names by parameter's identity."""
    names: dict[int, str] = {}
    used: set[str] = set()
    if isinstance(named_parameters, torch.nn.Module):
        raise TypeError(
            f"named_parameters is a {type(named_parameters).__qualname__}, not its parameters: give "
            "model.named_parameters()"
        )
    if not isinstance(named_parameters, Iterable):
        raise TypeError(
            f"named_parameters is of type {type(named_parameters).__qualname__}: give model.named_parameters(), or "
            "leave it out"
        )
    entries: list[Any] = list(named_parameters)
    for entry in entries:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError("named_parameters must give (name, parameter) pairs, as model.named_parameters() does")
        name, parameter = entry
        if name in used:
            raise ValueError(f"named_parameters gives the name {name!r} twice")
        used.add(name)
        names.setdefault(id(parameter), name)
    return names
