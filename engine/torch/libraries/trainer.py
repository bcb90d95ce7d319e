"""`Trainer` of Hugging Face transformers, whose gradients the engine reduces."""

from __future__ import annotations

from typing import Any

import transformers

from .accelerate import take_over


class TrainerMixin:
    """Makes a `transformers.Trainer`, or a class derived from it, train over the engine.

    Write it first among the base classes: `class Tuner(TrainerMixin, SFTTrainer): ...`. `distributed_options` are those
    of `DistributedOptimizer`, such as `compression`; accumulation is the library's `gradient_accumulation_steps`.
    """

    distributed_options: dict[str, Any] = {}  # noqa: RUF012 (never changed in place)
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """As the library's, with an accelerator over the engine."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        take_over(self.accelerator, self.distributed_options)


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' `Trainer`, over the engine. Collective; takes the same arguments.

    Call `init()` and `export_place()` before the `TrainingArguments` are made.

    Raises
    ------
    EngineError
        The library has been told another rank, or is configured for DeepSpeed or FSDP.
    """
