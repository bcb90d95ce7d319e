"""Frozen steps, in which the same gradients at the same addresses are reduced without agreement between ranks.

So CUDA graphs can capture the reductions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..collectives.process_sets import global_process_set
from ..collectives.reduce_ops import Average, Sum
from ..errors import EngineError, UnsupportedTensorError
from ..frameworks.reducer import live
from ..session import runtime

if TYPE_CHECKING:
    from ..frameworks.options import ReductionOptions
    from .hooks import TorchReducer

live_frozen: weakref.WeakSet[FrozenReduction] = weakref.WeakSet()
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NO_PASS = -1  # torch's number of the running backward pass if there is none
_CANNOT = "freeze(): {}, which cannot be frozen: {}"
WIRES = (None, "float16", "bfloat16")
KEPT = "zero_grad(set_to_none=False) before freeze(); zero_grad() of a frozen optimizer keeps gradients where they are"


@dataclass(frozen=True)
class Plan:
    """Gradients of an optimizer that are to be frozen."""

    members: dict[str, Any]
    """Parameters that have a gradient, by name."""
    wire: str | None
    """Dtype in which gradients are sent."""

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        device: torch.device = next(iter(self.members.values())).device
        return device

    @classmethod
    def from_reducer(cls, reducer: TorchReducer) -> Plan:
        """Make a plan from the present gradients of a reducer. Not collective.

        Raises EngineError if there are no gradients yet or the optimizer's options cannot be frozen, and
        UnsupportedTensorError if a gradient cannot be.
        """
        reducer.expect_between_steps()
        wire = _expect_plain(reducer)
        named = zip(reducer.names, reducer._parameters, strict=True)
        plan = cls({name: parameter for name, parameter in named if parameter.grad is not None}, wire)
        if not plan.members:
            raise EngineError(
                "freeze(): no parameter has a gradient yet: run a step first, and keep its gradients by " + KEPT
            )
        for name, parameter in plan.members.items():
            _expect_freezable(name, parameter, plan.device)
        runtime.current_device().check_device(plan.device.index or 0)
        return plan


class FrozenReduction:
    """Reduction of a reducer's gradients at the end of each backward pass, by one frozen pass.

    While it lives, an optimizer calls it instead of its `TorchReducer`, which is suspended. Its construction is
    collective. Every rank has a plan. Errors are those of `engine.gpu.freezing.FrozenPass`.
    """

    def __init__(self, reducer: TorchReducer, plan: Plan) -> None:
        self.paused = False  # whether backward passes only accumulate on this rank
        self.reduced = False  # whether the gradients were reduced since the last step or `zero_grad`
        self._reducer = reducer
        self._begun = False
        self.backward = NO_PASS  # number of the last backward pass in torch
        self._handles: list[Any] = []
        self._members, self._device = plan.members, plan.device
        from ..gpu.freezing import Frozen, Reduction

        self._addresses = {name: address_of(each.grad) for name, each in self._members.items()}
        frozen = [
            Frozen(name, str(each.grad.dtype).removeprefix("torch."), each.grad.numel(), self._addresses[name])
            for name, each in self._members.items()
            if each.grad.numel()
        ]
        options = reducer.options
        reduction = Reduction(int(options.op), options.prescale, options.postscale, plan.wire)
        self._pass = runtime.current_device().freeze(self._device.index or 0, frozen, reduction)
        for parameter in reducer._parameters:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._note_gradient))
        self.owed = reducer.suspend()  # whether accumulated gradients are not reduced yet
        live_frozen.add(self)

    def before_step(self) -> None:
        """Reduce gradients that no pass has reduced, before a step uses them."""
        if self._reducer.skipping:
            self.finish()
        else:
            self.synchronize()

    def wrap_closure(self, closure: Callable[[], Any], step: str) -> Callable[[], Any]:
        """Wrap the closure of a step that begins, so that gradients are reduced in each of its calls."""

        def reduced_closure() -> Any:
            result = closure()
            self.before_step()
            return result

        return reduced_closure

    def after_step(self) -> None:
        """Note that a step has used the gradients."""
        self.owed = self.reduced = False

    def before_zero(self) -> None:
        """Complete an interrupted pass, and drop gradients that did not exist at the freeze."""
        self.finish()
        self.owed = self.reduced = False
        for name, parameter in self._list_parameters():
            if name not in self._members:
                parameter.grad = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Accumulate gradients on this rank, without reductions, inside the block."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def unfreeze(self) -> None:
        """Complete an interrupted pass, and let the reducer reduce again."""
        if self.paused:
            raise EngineError("unfreeze() was called inside no_sync(); call it after the block")
        self.finish()
        self._detach()
        self._reducer.resume(self.owed, self.reduced)

    def remove(self) -> None:
        """Remove the hooks of the frozen pass and of the reducer."""
        self._detach()
        self._reducer.remove()

    def release(self) -> None:
        """Remove the hooks and release the engine, whose world has ended."""
        self._detach()
        self._reducer.release()

    def finish(self) -> None:
        """Complete a pass that an exception has interrupted, since the other ranks wait for it."""
        if self._begun:
            self._end()

    def synchronize(self) -> None:
        """Reduce the gradients that no pass has reduced, if any."""
        if self._begun or self.owed:
            self._end()
            return
        self._expect_nothing_new()
        every = range(len(self._reducer.names))
        if not self.reduced and self._reducer._successors.is_due(every):
            self._reducer.expect_in_place(every)

    def _detach(self) -> None:
        """Remove the hooks of the frozen pass."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        live_frozen.discard(self)

    def _note_gradient(self, _: torch.Tensor) -> None:
        """Note that a backward pass has computed a gradient; the first one queues the reduction."""
        if self.paused:
            self.owed = True
        elif not self._begun:
            self._begun = True
            self.backward = self._reducer.queue(self.finish)

    def _end(self) -> None:
        """Enqueue the reduction on the current stream; a CUDA graph that captures the stream includes it."""
        self._begun = self.owed = False
        self._expect_alone()
        self._expect_nothing_new()
        for name, parameter in self._members.items():
            if parameter.grad is None or address_of(parameter.grad) != self._addresses[name]:
                self._reject_change(f"the gradient of {name!r} is {'gone' if parameter.grad is None else 'elsewhere'}")
        if self.reduced and not self._reducer.options.repeatable:
            self._reject_change(
                "gradients are reduced a second time before a step, by which a sum would count them twice"
            )
        self._pass.enqueue_pass(stream_of(self._device))
        self.reduced = True

    def _expect_nothing_new(self) -> None:
        """End the job if a parameter of the optimizer has a gradient that the frozen pass does not reduce."""
        for name, parameter in self._list_parameters():
            if name not in self._members and parameter.requires_grad and parameter.grad is not None:
                self._reject_change(f"the gradient of {name!r}, of which there was none when it was frozen, has come")

    def _expect_alone(self) -> None:
        """End the job if another optimizer takes part in the pass, since ranks may order the reductions differently."""
        others = [each._pass for each in list(live) if each.kind is torch.Tensor and each is not self._reducer]
        others += [each.backward for each in list(live_frozen) if each is not self]
        if self.backward != NO_PASS and self.backward in others:
            self._end_job(
                "two optimizers reduce in one backward, and one of them is frozen, so ranks may wait for each "
                "other: run a backward for each, or unfreeze()"
            )

    def _list_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return all parameters of the optimizer, with their names."""
        reducer = self._reducer
        return [*zip(reducer.names, reducer._parameters, strict=True), *reducer._frozen.items()]

    def _reject_change(self, what: str) -> None:
        self._end_job(
            f"a frozen optimizer has the same gradients in each step, where they were, and {what}: "
            f"unfreeze() before that changes, and keep gradients by {KEPT}"
        )

    def _end_job(self, why: str) -> None:
        """Abort the world and raise, since the other ranks' GPUs wait for this one without their hosts noticing."""
        engine = self._reducer.engine
        engine.abort(f"rank {engine.rank}: {why}")
        raise engine.failure or EngineError(why)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU, so that a CUDA graph can capture its reduction."""
    return tensor.is_cuda


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor on its GPU."""
    return tensor.data_ptr()


def stream_of(device: torch.device) -> int:
    """Return the handle of the device's current stream."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def _expect_plain(reducer: TorchReducer) -> str | None:
    """Raise EngineError if an optimizer cannot be frozen; return the dtype in which its gradients are sent."""
    options, group = reducer.options, reducer.group
    wire = reducer.wire
    if options.op not in (Average, Sum):
        raise EngineError(_CANNOT.format(f"the operation is {options.op.name.title()}", "use Average or Sum"))
    if any(k in reducer.rounds for k in range(len(reducer.names))) or wire not in WIRES:
        raise EngineError(
            _CANNOT.format("compression is a scheme, the program's own, or tuned", "use Compression.none, fp16 or bf16")
        )
    if group.passes != 1:
        raise EngineError(
            _CANNOT.format("backward_passes_per_step is not 1", "run all passes but the last in optimizer.no_sync()")
        )
    if runtime.current_settings().device_sums == "ordered":
        raise EngineError(_CANNOT.format("device_sums is ordered", "use device_sums=nccl"))
    if group.paused:
        raise EngineError("freeze() was called inside no_sync(); call it after the block, between two steps")
    if group.active:
        raise EngineError("freeze() was called in the middle of a backward pass; call it between two steps")
    return wire


def expect_all_ranks(options: ReductionOptions) -> None:
    """Raise EngineError for an optimizer of a process set, since all ranks of the world agree upon a freeze."""
    if options.process_set is not global_process_set:
        raise EngineError(_CANNOT.format("the optimizer has a process set", "use one of all ranks"))


def _expect_freezable(name: str, parameter: torch.Tensor, device: torch.device) -> None:
    gradient = parameter.grad
    assert gradient is not None
    what = f"freeze(): the gradient of {name!r}"
    if not is_on_gpu(gradient):
        raise UnsupportedTensorError(
            f"{what} is in the host's memory, and only those on a GPU can be frozen: move the model there"
        )
    if gradient.device != device:
        raise UnsupportedTensorError(f"{what} is on {gradient.device}, and others are on {device}: a rank uses one GPU")
    if gradient.layout is not torch.strided:
        raise UnsupportedTensorError(
            f"{what} is sparse, so its size changes: make it dense, as Embedding(sparse=False)"
        )
    if gradient.dtype not in DTYPES:
        raise UnsupportedTensorError(
            f"{what} is of {gradient.dtype}, and only float16, bfloat16, float32 and float64 can be frozen: "
            "do not freeze() this optimizer"
        )
    dense = torch.ops.aten.is_non_overlapping_and_dense(gradient)
    if not dense or _find_strides(gradient) != _find_strides(parameter):
        raise UnsupportedTensorError(f"{what} has gaps, or is not in the order of the parameter: make it contiguous")


def _find_strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides of dimensions with more than one element; the others do not affect the layout."""
    return [stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]
