"""`Accelerator` of Hugging Face Accelerate, whose gradients the engine reduces instead of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer

from ...errors import EngineError
from ...frameworks.optimizer import Distributed
from .world import broadcast_model, expect_same_place, export_place, reduce_gradients_of

_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")


class EngineGradients:
    """Methods of an `Accelerator` that let the engine reduce gradients.

    `distributed_options` are options of `DistributedOptimizer`, such as `compression`.
    """

    distributed_options: dict[str, Any] = {}  # noqa: RUF012 (never changed in place)
    _optimizers: list[Any]

    def expect_usable(self) -> None:
        """Raise EngineError if the library has another rank or size than the engine, or shards the model itself."""
        own: Any = self
        kind = str(own.distributed_type.name)
        if kind not in _PLAIN:
            raise EngineError(f"Accelerate is configured for {kind}, which reduces gradients itself: leave one of both")
        expect_same_place("Accelerate", own.process_index, own.num_processes)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare objects like the library's method; an optimizer may precede its model."""
        self._named = _name_parameters(each for each in args if isinstance(each, torch.nn.Module))
        return super().prepare(*args, **kwargs)  # type: ignore[misc]

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepare a model without DistributedDataParallel, and broadcast rank 0's parameters and buffers."""
        prepared = getattr(model, "_is_accelerate_prepared", False)
        model = super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[misc]
        if not evaluation_mode and not prepared:
            broadcast_model(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer like the library's method, wrapped in `DistributedOptimizer`."""
        if not isinstance(_unwrap_optimizer(optimizer), Distributed):
            known = _name_parameters(self._models) | getattr(self, "_named", {})  # type: ignore[attr-defined]
            reduce_gradients_of(optimizer, known, self.distributed_options)
        return super().prepare_optimizer(optimizer, device_placement)  # type: ignore[misc]

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Accumulate gradients of a model on this rank inside the block."""
        own = {id(each) for each in model.parameters()}
        with ExitStack() as stack:
            for optimizer in map(_unwrap_optimizer, self._optimizers):
                if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
                    stack.enter_context(optimizer.no_sync())
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale gradients like the library's method, after their reduction. Clipping calls it first."""
        for each in self._optimizers:
            _unwrap_optimizer(each).synchronize()
        super().unscale_gradients(optimizer)  # type: ignore[misc]


class Accelerator(EngineGradients, accelerate.Accelerator):
    """Accelerate's `Accelerator`, with gradients reduced by the engine. Collective; call `init()` before.

    Gathering, metrics, data loaders, checkpoints and everything else are the library's own.

    Parameters
    ----------
    *args, **kwargs
        Arguments of `accelerate.Accelerator`.
    distributed_options : dict, optional
        Options of `DistributedOptimizer`, such as `{"compression": Compression.fp16}`.

    Raises
    ------
    EngineError
        The library has another rank than the engine, or is configured for DeepSpeed or FSDP; or the job is elastic.
    """

    def __init__(self, *args: Any, distributed_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        export_place()
        super().__init__(*args, **kwargs)
        self.distributed_options = distributed_options or {}
        self.expect_usable()


def take_over(accelerator: Any, distributed_options: dict[str, Any] | None = None) -> None:
    """Let the engine reduce the gradients of an existing `accelerate.Accelerator`. Raises those of `Accelerator`."""
    kind = type(accelerator)
    if not isinstance(accelerator, EngineGradients):
        accelerator.__class__ = type(kind.__name__, (EngineGradients, kind), {})
    accelerator.distributed_options = distributed_options or {}
    accelerator.expect_usable()


def _unwrap_optimizer(optimizer: Any) -> Any:
    """Return an optimizer without the library's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _name_parameters(models: Any) -> dict[torch.Tensor, str]:
    """Return names of models' parameters; those of a second or later model begin with its number."""
    named: dict[torch.Tensor, str] = {}
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            named.setdefault(parameter, f"{number}.{name}" if number else name)
    return named
