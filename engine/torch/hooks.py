"""`Reducer` of torch: gradient hooks, the end of a backward pass, and memory for gradients."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch

from ..errors import EngineError, UnsupportedTensorError
from ..frameworks.options import ReductionOptions
from ..frameworks.reducer import Reducer, live
from ..native import gradients
from . import sparse
from .adapter import DeviceAllocator, check, tensor_over
from .freezing import NO_PASS
from .overlaps import held_in
from .places import GradientPlaces
from .rivals import Successors

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
ALIGNMENT = 64  # bytes: a cache line, so that no two gradients share one
COMPILER = "torch._dynamo.compiled_autograd"
COMPILING = "in_compiled_autograd_region", "compiled_autograd_enabled"  # the name depends on the version of torch
COMPILED = (
    "DistributedOptimizer does not go with compiled autograd, which calls gradient hooks outside of a pass and "
    "goes on before gradients are reduced: leave out torch._dynamo.config.compiled_autograd and "
    "compiled_autograd._enable. torch.compile of the model works without them"
)


class TorchReducer(Reducer):
    """Reducer of gradients that torch's autograd computes.

    **Nested passes.** Reentrant activation checkpointing runs a backward pass inside another one. If the outer pass met
    a hooked parameter first, `end_of_pass` is queued for the outer pass, and includes the inner ones. Otherwise the
    inner pass is completed by itself, and a new pass begins after it, as with two backward passes.
    `use_reentrant=False` has no nested passes.
    """

    kind = torch.Tensor

    def __init__(self, options: ReductionOptions, number: int = 0) -> None:
        self._places: dict[int, GradientPlaces] = {}
        self._shared: dict[int, tuple[memoryview, int]] = {}  # memory for the gradient of a parameter, and its address
        self._accumulated = False  # whether no_sync() was used since the last step or `zero_grad`
        self._successors = Successors(self.is_hooked)
        keep_hooks_of_swapped()
        super().__init__(options, number)

    def expect_between_steps(self) -> None:
        """Raise EngineError if there are reduced but unused gradients, which a sum would count twice."""
        if not self._due and not self.options.repeatable:
            raise EngineError(
                "freeze(): gradients are reduced, and no step has used them; a sum would count them twice with the "
                "next pass: call step() or zero_grad() first"
            )

    def suspend(self) -> bool:
        """Stop reducing. Returns whether this rank has accumulated gradients that are not reduced yet."""
        owed, self._accumulated = self._accumulated and self._due, False
        self.group.paused = True
        return owed

    def resume(self, owed: bool, reduced: bool) -> None:
        """Reduce again after `suspend`, with gradients that are accumulated (`owed`) or reduced since then."""
        self._due, self._accumulated = owed or not reduced, owed
        self.group.paused = False

    def after_step(self) -> None:
        self._accumulated = False
        super().after_step()

    def before_zero(self) -> None:
        self._accumulated = False
        super().before_zero()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Accumulate gradients on this rank, without reductions, inside the block."""
        self._accumulated = True
        with super().pause():
            yield

    def check(self, tensor: torch.Tensor, what: str) -> None:
        check(tensor, what)

    def is_hooked(self, parameter: torch.Tensor) -> bool:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        return any(isinstance(hook, gradients.GradientHook) for hook in hooks.values())

    def find_idle(self, silent: list[int]) -> list[int]:
        if not self._successors.is_due(silent):
            return []
        # A gradient that no_sync() or the program itself has filled shows that the parameter is in use.
        return [index for index in silent if _is_empty(self._parameters[index].grad)]

    def expect_in_place(self, indices: Sequence[int]) -> None:
        silent = {self.names[index]: self._parameters[index] for index in indices}
        self._successors.expect_none(silent, self._parameters)

    def attach(self, parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
        required = parameter.requires_grad
        try:
            if not required:  # Autograd accepts no hook on a frozen parameter, but keeps existing ones.
                parameter.requires_grad_(True)
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        finally:
            parameter.requires_grad_(required)
        if isinstance(hook, gradients.GradientHook):
            hook.found_in(parameter._post_accumulate_grad_hooks)
        return handle

    def queue(self, callback: Callable[[], None]) -> int:
        running = torch._C._current_graph_task_id()
        compiler = sys.modules.get(COMPILER)
        if running == NO_PASS or any(getattr(compiler, state, False) for state in COMPILING):
            raise EngineError(COMPILED)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        return running

    def gradient_in(self, memory: Any, parameter: torch.Tensor) -> torch.Tensor:
        if isinstance(memory, tuple):
            data, name, layout = memory
            return self._dense_in(data, name, layout, parameter)
        if not isinstance(memory, list):
            return tensor_over(memory, parameter)
        dtype = parameter.dtype if parameter.grad is None else parameter.grad.dtype
        options = self.options
        return sparse.add_up(memory, dtype, parameter.shape, options.op, options.prescale, options.postscale)

    def _dense_in(self, memory: Any, name: str, layout: int, parameter: torch.Tensor) -> torch.Tensor:
        """Make a gradient over memory that has the other ranks' dtype and order of elements."""
        flat, shape = torch.frombuffer(memory, dtype=getattr(torch, name)), parameter.shape
        if layout:
            form = CHANNELS_LAST[len(shape)]
            gradient = flat.as_strided(shape, torch.empty(shape, device="meta", memory_format=form).stride())
        else:
            gradient = flat.view(shape)
        wanted = _gradient_dtype(parameter)
        return gradient if wanted is None else gradient.to(wanted)

    def is_floating(self, parameter: torch.Tensor) -> bool:
        return parameter.is_floating_point()

    def room_for(self, index: int) -> torch.Tensor:
        parameter = self._parameters[index]
        return torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)

    def rooms_for(self, index: int) -> DeviceAllocator:
        return DeviceAllocator(self._parameters[index].device)

    def full_like(self, parameter: torch.Tensor, value: float) -> torch.Tensor:
        return torch.full_like(parameter, value, dtype=_gradient_dtype(parameter))

    def store(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def no_gradients(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def version_of(self, gradient: torch.Tensor) -> int | None:
        return None if gradient.is_inference() else gradient._version

    def make_views(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Allocate a zeroed tensor in shared memory with the format of each parameter. Collective.

        Parameters that are neither row-major nor channels_last get a row-major gradient.
        """
        places, total = {}, 0
        for name, parameter in named.items():
            places[name] = total
            total += -(-parameter.numel() * parameter.element_size() // ALIGNMENT) * ALIGNMENT
        if not total:
            return {name: torch.empty_like(parameter) for name, parameter in named.items()}
        memory = self.engine.share(total)
        views = {}
        for name, parameter in named.items():
            own = memory[places[name] :]
            views[name] = view = tensor_over(own, parameter)
            self._shared[id(parameter)] = own, view.data_ptr()
        return views

    def takes_place(self, parameter: torch.Tensor) -> bool:
        return parameter.is_cuda

    def make_places(self, parameters: Sequence[torch.Tensor]) -> None:
        places = GradientPlaces(parameters)
        self._places.update((id(parameter), places) for parameter in parameters)

    def place_for(self, index: int) -> torch.Tensor:
        parameter = self._parameters[index]
        self._bucket[index] = view = self._places[id(parameter)].assign_place(parameter)
        return view

    def alias_for(self, index: int) -> torch.Tensor:
        view: Any = self._bucket[index]
        memory, address = self._shared.get(id(self._parameters[index]), (None, 0))
        if memory is not None and view.data_ptr() != address:
            # `share_memory_()` of a gradient, as in a queue of torch.multiprocessing, moves the storage of all tensors
            # over it, while the ranks still reduce the gradient here.
            self._bucket[index] = view = tensor_over(memory, view)
        return view.detach()  # type: ignore[no-any-return]

    def hand_to_current_stream(self) -> None:
        for places in set(self._places.values()):
            places.keep_for_current_stream()

    def memory_of(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach()  # Some versions of torch export no tensor that requires a gradient.

    def replace(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | sparse.Brought:
        """Return a contiguous copy of a gradient that cannot be reduced in place, or the parts of a sparse one."""
        what, scheme = f"the gradient of {self.names[index]!r}", index in self.rounds
        if gradient.layout is not torch.strided:
            as_dense = self.options.sparse_as_dense
            fault = sparse.fault_of(gradient) if as_dense and gradient.layout is torch.sparse_coo else None
            if fault is not None and scheme:
                raise UnsupportedTensorError(
                    f"{what} is sparse, and its indices are not in order or not in its shape, {list(gradient.shape)}"
                )
            if not as_dense and scheme:
                raise UnsupportedTensorError(
                    f"{what} is sparse, and this compression is made for dense ones: "
                    "construct DistributedOptimizer with sparse_as_dense=True, or with Compression.none, fp16 or bf16, "
                    "which leave sparse gradients as they are"
                )
            if not as_dense or fault is not None:
                return sparse.extract_parts(gradient, self.options.op, what)
            gradient = gradient.to_dense()
            parameter.grad = gradient
        check(gradient, what)
        gradient = gradient.detach()
        if scheme:
            return gradient
        copy = gradient.contiguous()
        if any(stride == 0 and length > 1 for stride, length in zip(gradient.stride(), gradient.shape, strict=True)):
            parameter.grad = copy  # Elements that share memory, as in an expanded tensor, cannot be written to.
        elif copy.data_ptr() != gradient.data_ptr():
            self.copies.append((gradient, copy))
        return copy

    def shares_memory(self, gradient: torch.Tensor) -> bool:
        """Return whether another tensor uses a gradient's memory, or the memory does not hold it unchanged.

        Autograd may give several parameters views of one buffer, as in `(a.view(-1) + b.view(-1)).backward()`. Before
        the first of them is reduced, the buffer has more users than the gradient and the storage object of this call.
        """
        if gradient.layout is not torch.strided:
            return False
        return gradient.is_neg() or torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > 2

    def held_in(self, rest: Sequence[int], others: Sequence[torch.Tensor]) -> list[bool | None]:
        return held_in([(self._parameters[index].grad, self._is_in_place(index)) for index in rest], others)

    def _is_in_place(self, index: int) -> bool:
        """Return whether a gradient is reduced in its own memory, and not copied to its reserved memory first."""
        kept, gradient = self._bucket[index], self._parameters[index].grad
        if kept is None or gradient is None or gradient.layout is not torch.strided:
            return not self.options.views or index in self.rounds
        return bool(kept.data_ptr() == gradient.data_ptr())

    def separate(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        check(gradient, "a gradient")
        gradient = gradient.resolve_neg().clone()
        parameter.grad = gradient
        return gradient


def keep_hooks_of_swapped() -> None:
    """Patch `torch.utils.swap_tensors` so that tensors keep their gradient hooks.

    torch uses it to convert and load modules under `set_swap_module_params_on_conversion`, and for some subclasses of
    parameters. It leaves the hooks in the Python object, which still shows them. But autograd finds them in the swapped
    content, and so calls those of the other tensor.
    """
    swap: Any = getattr(torch.utils, "swap_tensors", None)  # since torch 2.3
    if swap is None or hasattr(swap, "keeps_hooks"):
        return

    @wraps(swap)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        try:
            swap(t1, t2)
        except RuntimeError as error:
            if any(each.has_reference_to(t1) or each.has_reference_to(t2) for each in live):
                raise RuntimeError(
                    f"{error}: DistributedOptimizer, which remembers what it has reduced where a second reduction "
                    "would be wrong, as with op=Sum. Convert or load the module after zero_grad() and before backward()"
                ) from error
            raise
        hooks: list[Any] = [tensor._post_accumulate_grad_hooks for tensor in (t1, t2)]
        if any(hooks):
            for tensor, own in zip((t1, t2), hooks, strict=True):  # Setting them registers them with autograd.
                tensor._post_accumulate_grad_hooks = OrderedDict() if own is None else own

    swap_tensors.keeps_hooks = True  # type: ignore[attr-defined]
    torch.utils.swap_tensors = swap_tensors


def _is_empty(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is None or has only zeros; False if the engine does not support it."""
    if gradient is None:
        return True
    try:
        check(gradient)  # torch would read from a tensor without memory, and crash
    except UnsupportedTensorError:
        return False  # The error is raised when it is submitted.
    return not bool(gradient.any())


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of a parameter's gradients; None: any."""
    wanted: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)  # since torch 2.10
    return wanted
