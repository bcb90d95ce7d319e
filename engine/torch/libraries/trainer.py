"""`Trainer` of Hugging Face transformers, whose gradients the engine reduces."""

from __future__ import annotations

from typing import Any

import transformers

from .accelerate import take_over


class TrainerMixin:
    """Mixin with which a `transformers.Trainer`, or a class derived from it, reduces gradients by the engine.

    It has to be the first base class: `class Tuner(TrainerMixin, SFTTrainer): ...`. `distributed_options` are options
    of `DistributedOptimizer`, such as `compression`; accumulation is the library's `gradient_accumulation_steps`.
    """

    distributed_options: dict[str, Any] = {}  # noqa: RUF012 (never changed in place)
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator like the library's method, and let the engine reduce its gradients."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        take_over(self.accelerator, self.distributed_options)


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' `Trainer`, with gradients reduced by the engine. Collective; takes the same arguments.

    Call `init()` and `export_place()` before the `TrainingArguments` are created.

    Raises
    ------
    EngineError
        The library has another rank than the engine, or is configured for DeepSpeed or FSDP.
    """
