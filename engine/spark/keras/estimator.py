"""`KerasEstimator`: train a model of Keras on a DataFrame, as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from pyspark.ml.param import TypeConverters

from ...launch.errors import LaunchError
from ..estimator import Common, JobEstimator
from ..params import make_param
from ..store import Store
from ..training import load
from .model import KerasModel
from .packed import Packed
from .training import CHECKPOINT, Start, train_rank


class KerasEstimator(JobEstimator):
    """Estimator that trains a model of Keras 3 on the ranks of a job in Spark.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer or str, optional
        None: the model is compiled already, and its own optimizer, `loss` and `metrics` are used.
    loss, metrics : optional
        Same as in `keras.Model.compile`.
    callbacks : list of keras.callbacks.Callback, optional
        Called on every rank, with metrics that are averaged over the ranks. A callback that writes a file must use
        another name on each rank.
    checkpoint_callback : keras.callbacks.ModelCheckpoint, optional
        Selects the epoch whose weights the trained model has, such as `BestModelCheckpoint`; its path is ignored. By
        default the last epoch.
    custom_objects : mapping of str to object, optional
        Classes and functions of the model that are not registered with Keras.
    sample_weight_col : str, optional
        Column of numbers: the weight of each row, in training and in validation.
    **common
        Same as in `JobEstimator`. The `model` is a `keras.Model`, with an input for each feature and an output for each
        label. `input_shapes` defaults to the shapes of its inputs, if they are known.
    """

    OBJECT_NAMES = (
        *JobEstimator.OBJECT_NAMES,
        *("optimizer", "loss", "metrics", "callbacks", "checkpoint_callback", "custom_objects"),
    )
    FRAMEWORK = "keras"
    MODEL_CLASS = KerasModel
    train_rank = staticmethod(train_rank)
    sample_weight_col = make_param(
        "sample_weight_col", "column that says how much a row counts", TypeConverters.toString
    )

    def __init__(
        self,
        *,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Sequence[Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        checkpoint_callback: Any = None,
        custom_objects: Mapping[str, Any] | None = None,
        sample_weight_col: str | None = None,
        **common: Unpack[Common],
    ) -> None:
        own = {"optimizer": optimizer, "loss": loss, "metrics": metrics, "callbacks": callbacks}
        more = {"custom_objects": custom_objects, "sample_weight_col": sample_weight_col}
        super().__init__({**own, **more, "checkpoint_callback": checkpoint_callback, **common})

    def _list_missing_options(self) -> list[str]:
        if self._optimizer is None and self._loss is None and self._model.compiled:
            return []
        return [name for name in ("optimizer", "loss") if getattr(self, f"_{name}") is None]

    def _check(self) -> Store:
        store = super()._check()
        inputs, features = self._find_inputs(), self._get_value(self.feature_cols)
        if inputs is not None and len(inputs) != len(features):
            raise LaunchError(f"the model has {len(inputs)} inputs, feature_cols {len(features)} columns: one for each")
        return store

    def _find_inputs(self) -> list[Any] | None:
        """Return the model's inputs, in their order; None if they are unknown."""
        try:
            found = self._model.inputs
        except AttributeError:  # a subclass of `keras.Model`, or a model that is not built
            return None
        return None if found is None else list(found)

    def _find_shapes(self) -> list[Any]:
        inputs = self._find_inputs()
        if self._get_value(self.input_shapes) or inputs is None:
            return super()._find_shapes()
        shapes = [list(each.shape[1:]) for each in inputs]
        return [None if None in shape else shape for shape in shapes]

    def _find_weight_column(self) -> str:
        return self._get_value(self.sample_weight_col) or ""

    def _make_start(self) -> Any:
        compiled = {
            "optimizer": self._optimizer,
            "loss": self._loss,
            "loss_weights": self._get_value(self.loss_weights),
            "metrics": self._metrics,
        }
        own = {} if self._optimizer is None else compiled
        objects = dict(self._custom_objects or {})
        start = Start(self._model, own, list(self._callbacks or ()), objects, self._checkpoint_callback)
        return Packed(start, objects)

    def _make_environment(self) -> dict[str, str]:
        import keras

        return {"KERAS_BACKEND": keras.backend.backend()}

    def _pack_objects(self) -> Any:
        return Packed(super()._pack_objects(), self._custom_objects)

    def _load_trained(self, home: str) -> Any:
        return load(self._store, f"{home}/{CHECKPOINT}")

    def _model_options(self) -> dict[str, Any]:
        return {"custom_objects": self._custom_objects}
