"""`TorchEstimator`: train a model of PyTorch on a DataFrame, as a stage of a pipeline."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from ...launch.errors import LaunchError
from ..estimator import Common, JobEstimator
from ..store import Store
from ..training import START, load
from .model import TorchModel
from .training import CHECKPOINT, train_rank


class TorchEstimator(JobEstimator):
    """Estimator that trains a model of PyTorch on the ranks of a job in Spark.

    `optimizer` has the model's parameters. `loss` has one function for each label, which takes output and label; a
    label with as many values as the output gets its shape. `common` is the same as in `JobEstimator`. The `model` is a
    `torch.nn.Module`: it takes a tensor for each feature, and returns one for each label, or a tuple of them. With
    several batches a step, the last step of an epoch may have fewer.
    """

    OBJECT_NAMES = (*JobEstimator.OBJECT_NAMES, "optimizer", "loss")
    FRAMEWORK = "torch"
    MODEL_CLASS = TorchModel
    train_rank = staticmethod(train_rank)

    def __init__(
        self,
        *,
        optimizer: Any = None,
        loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__({"optimizer": optimizer, "loss": loss, **common})

    def _list_missing_options(self) -> list[str]:
        return [name for name in ("optimizer", "loss") if getattr(self, f"_{name}") is None]

    def _check(self) -> Store:
        store = super()._check()
        losses, labels = self._list_losses(), self._get_value(self.label_cols)
        if len(losses) != len(labels):
            raise LaunchError(f"loss has {len(losses)} functions, label_cols {len(labels)} columns: one for each")
        return store

    def _list_losses(self) -> list[Callable[..., Any]]:
        return list(self._loss) if isinstance(self._loss, list | tuple) else [self._loss]

    def _make_start(self) -> Any:
        losses = self._list_losses()
        weights = self._get_value(self.loss_weights) or [1.0] * len(losses)
        return self._model, self._optimizer, list(zip(losses, weights, strict=True))

    def _load_trained(self, home: str) -> Any:
        import torch

        model = load(self._store, f"{home}/{START}")[0]
        model.load_state_dict(torch.load(io.BytesIO(self._store.read(f"{home}/{CHECKPOINT}"))))
        return model
