"""`TorchEstimator`: train a model of PyTorch on a DataFrame, as a stage of a pipeline."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.ml.base import Estimator
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.param import Param, Params, TypeConverters

from ...launch.errors import LaunchError
from ..job import run
from ..manifest import NAME, Manifest, of_parquet
from ..params import Stage
from ..store import Store
from ..writer import write
from .model import TorchModel
from .training import CHECKPOINT, HISTORY, MODEL, START, Training, dump, load, train


def _param(name: str, doc: str, convert: Any = TypeConverters.identity) -> Param[Any]:
    return Param(Params._dummy(), name, doc, convert)


class TorchEstimator(Estimator[TorchModel], Stage):
    """Trains a model of PyTorch on the ranks of a job in Spark.

    Parameters
    ----------
    num_proc : int, optional
        Number of ranks; by default as many as Spark has slots.
    model : torch.nn.Module
        Takes a tensor for each feature, and gives one for each label, or a tuple of them.
    optimizer : torch.optim.Optimizer
        Of the model's parameters.
    loss : callable or list of callable
        Of output and label; one for each label. An output with as many values as the label gets its shape.
    loss_weights : list of float, optional
        By label; 1 each by default.
    store : Store
        Where data, checkpoints and the model lie.
    feature_cols, label_cols : list of str
        Columns of numbers, lists of numbers of one length, or vectors.
    input_shapes : list of list of int, optional
        Of each feature, without the rows, such as `[1, 28, 28]`; by default as the column has it.
    validation : float or str, optional
        Share of the rows that validate; or a column that is true, or more than 0, where a row does.
    batch_size, val_batch_size : int
        Rows of a rank's batch; 32 by default.
    epochs : int
    train_steps_per_epoch, validation_steps_per_epoch : int, optional
        The most batches of an epoch; all by default.
    shuffle : bool
        Whether every epoch has another order.
    random_seed : int
        Of the order, the split and PyTorch.
    run_id : str, optional
        The name of the run in the store, which has none of that name; a new one for each `fit` by default.
    backward_passes_per_step : int
        Batches whose gradients are added up for a step; 1 by default. The last step of an epoch may have fewer.
    gradient_compression
        The `compression` of `engine.torch.DistributedOptimizer`.
    verbose : int
        0: show nothing but what the model itself writes and what goes wrong.
    """

    OBJECT_NAMES = ("model", "optimizer", "loss", "store", "gradient_compression")
    num_proc = _param("num_proc", "number of ranks", TypeConverters.toInt)
    loss_weights = _param("loss_weights", "weights of the losses, by label", TypeConverters.toListFloat)
    feature_cols = _param("feature_cols", "columns that the model takes", TypeConverters.toListString)
    label_cols = _param("label_cols", "columns that it learns", TypeConverters.toListString)
    input_shapes = _param("input_shapes", "shape of each feature, without the rows")
    validation = _param("validation", "share of the rows that validate, or a column that says which")
    batch_size = _param("batch_size", "rows of a batch", TypeConverters.toInt)
    val_batch_size = _param("val_batch_size", "rows of a batch that validates", TypeConverters.toInt)
    epochs = _param("epochs", "times that all rows are trained on", TypeConverters.toInt)
    train_steps_per_epoch = _param("train_steps_per_epoch", "most batches of an epoch", TypeConverters.toInt)
    validation_steps_per_epoch = _param(
        "validation_steps_per_epoch", "most batches that validate", TypeConverters.toInt
    )
    shuffle = _param("shuffle", "whether every epoch has another order", TypeConverters.toBoolean)
    random_seed = _param("random_seed", "of the order, the split and PyTorch", TypeConverters.toInt)
    run_id = _param("run_id", "name of the run in the store", TypeConverters.toString)
    backward_passes_per_step = _param("backward_passes_per_step", "batches of a step", TypeConverters.toInt)
    verbose = _param("verbose", "0: show little", TypeConverters.toInt)

    def __init__(
        self,
        *,
        num_proc: int | None = None,
        model: Any = None,
        optimizer: Any = None,
        loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        loss_weights: Sequence[float] | None = None,
        store: Store | None = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        input_shapes: Sequence[Sequence[int] | None] | None = None,
        validation: float | str | None = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        shuffle: bool | None = None,
        random_seed: int | None = None,
        run_id: str | None = None,
        backward_passes_per_step: int | None = None,
        gradient_compression: Any = None,
        verbose: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self._setDefault(batch_size=32, epochs=1, shuffle=True, random_seed=0, backward_passes_per_step=1, verbose=1)
        self._fill(given)

    def fit_on_parquet(self, path: str, validation_path: str | None = None) -> TorchModel:
        """Train on Parquet files that are in the store already.

        Parameters
        ----------
        path : str
            Their directory, below the store.
        validation_path : str, optional
            Of those that validate; `validation` does not count here.

        Returns
        -------
        TorchModel
        """
        from dataclasses import replace

        from ..manifest import VALIDATION

        store = self._check()
        columns = [*dict.fromkeys([*self._value(self.feature_cols), *self._value(self.label_cols)])]
        if store.exists(f"{path}/{NAME}"):
            return self._train(path, Manifest.read(store.read(f"{path}/{NAME}")), ())
        parts = []
        for each, split in ((path, "train"), (validation_path, VALIDATION)):
            if each is not None:
                found = of_parquet(store.fs, store.get_full_path(each), columns, split)
                parts += [replace(part, name=f"{each}/{part.name}") for part in found.parts]
        return self._train("", Manifest.of(parts), ())

    def _fit(self, dataset: Any) -> TorchModel:
        """Write the data, train, and give the model."""
        store, value = self._check(), self._value
        features, labels = value(self.feature_cols), value(self.label_cols)
        data = store.get_data_path(uuid.uuid4().hex)
        try:
            manifest = write(
                dataset, store, data, [*features, *labels], value(self.validation), value(self.random_seed)
            )
            vectors = [name for name in labels if isinstance(dataset.schema[name].dataType, VectorUDT)]
            return self._train(data, manifest, vectors)
        finally:
            store.remove(data)

    def _check(self) -> Store:
        """Refuse what lacks before anything is written."""
        for name in ("model", "optimizer", "loss", "store"):
            if getattr(self, f"_{name}", None) is None:
                raise LaunchError(f"TorchEstimator needs {name}=")
        for param in (self.feature_cols, self.label_cols):
            if not self._value(param):
                raise LaunchError(f"TorchEstimator needs {param.name}=")
        shapes, losses = self._value(self.input_shapes), self._losses()
        features, labels = self._value(self.feature_cols), self._value(self.label_cols)
        if shapes is not None and len(shapes) != len(features):
            raise LaunchError(f"input_shapes has {len(shapes)} shapes, feature_cols {len(features)} columns")
        if len(losses) != len(labels):
            raise LaunchError(f"loss has {len(losses)} functions, label_cols {len(labels)} columns: one for each")
        assert isinstance(self._store, Store)
        run = self._value(self.run_id)
        if run and self._store.exists(path := self._store.get_run_path(run)):
            raise LaunchError(
                f"run_id is {run!r}, and {self._store.prefix_path} has such a run: give another run_id, or remove it "
                f"by store.remove({path!r})"
            )
        return self._store

    def _losses(self) -> list[tuple[Callable[..., Any], float]]:
        losses = list(self._loss) if isinstance(self._loss, list | tuple) else [self._loss]
        weights = self._value(self.loss_weights) or [1.0] * len(losses)
        if len(weights) != len(losses):
            raise LaunchError(f"loss_weights has {len(weights)} weights, loss {len(losses)} functions")
        return list(zip(losses, weights, strict=True))

    def _train(self, data: str, manifest: Manifest, vectors: Sequence[str]) -> TorchModel:
        import torch

        store, value = self._check(), self._value
        home = store.get_run_path(value(self.run_id) or f"torch-{uuid.uuid4().hex[:12]}")
        shapes = value(self.input_shapes) or [None] * len(value(self.feature_cols))
        options: Mapping[str, Any] = {"backward_passes_per_step": value(self.backward_passes_per_step)}
        if self._gradient_compression is not None:
            options = {**options, "compression": self._gradient_compression}
        dump(store, f"{home}/{START}", (self._model, self._optimizer, self._losses()))
        training = Training(
            store=store,
            run=home,
            data=data,
            manifest=manifest,
            features=tuple(value(self.feature_cols)),
            labels=tuple(value(self.label_cols)),
            shapes=tuple(shape if shape is None else tuple(shape) for shape in shapes),
            batch_size=value(self.batch_size),
            val_batch_size=value(self.val_batch_size) or value(self.batch_size),
            epochs=value(self.epochs),
            steps=value(self.train_steps_per_epoch),
            val_steps=value(self.validation_steps_per_epoch),
            shuffle=value(self.shuffle),
            seed=value(self.random_seed),
            options=options,
            verbose=value(self.verbose),
        )
        run(train, (training,), num_proc=value(self.num_proc), verbose=value(self.verbose))
        model = load(store, f"{home}/{START}")[0]
        model.load_state_dict(torch.load(io.BytesIO(store.read(f"{home}/{CHECKPOINT}"))))
        dump(store, f"{home}/{MODEL}", model)
        return TorchModel(
            model=model,
            store=store,
            run_id=home.rpartition("/")[2],
            history=json.loads(store.read(f"{home}/{HISTORY}")),
            feature_cols=training.features,
            label_cols=training.labels,
            input_shapes=shapes,
            feature_lengths=[manifest.lengths[name] for name in training.features],
            vector_cols=vectors,
        )
