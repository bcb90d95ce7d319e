"""Base class of estimators: parameters, data in the store, the training job, and the resulting model."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypedDict

from pyspark.ml.base import Estimator
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.param import TypeConverters

from ..launch.errors import LaunchError
from .backend import Backend, SparkBackend
from .manifest import NAME, TRAIN, VALIDATION, Manifest, of_parquet
from .model import TrainedModel
from .params import SavedStage, make_param
from .store import Store
from .training import HISTORY, START, Training, dump, row_shape
from .writer import write


class Common(TypedDict, total=False):
    """Arguments that every estimator takes, as `JobEstimator` documents them."""

    num_proc: int | None
    backend: Backend | None
    model: Any
    store: Store | None
    loss_weights: Sequence[float] | None
    feature_cols: Sequence[str] | None
    label_cols: Sequence[str] | None
    input_shapes: Sequence[Sequence[int] | None] | None
    label_shapes: Sequence[Sequence[int] | None] | None
    validation: float | str | None
    batch_size: int | None
    val_batch_size: int | None
    epochs: int | None
    train_steps_per_epoch: int | None
    validation_steps_per_epoch: int | None
    shuffle: bool | None
    inmemory_cache_all: bool | None
    random_seed: int | None
    run_id: str | None
    backward_passes_per_step: int | None
    gradient_compression: Any
    verbose: int | None


class JobEstimator(Estimator[TrainedModel], SavedStage):
    """Estimator that trains a model on the ranks of a job in Spark.

    Parameters
    ----------
    num_proc : int, optional
        Number of ranks; by default as many as Spark has slots.
    backend : Backend, optional
        Runs the ranks, instead of `num_proc`; by default in Spark. It is not saved with the stage.
    model
        Model to train, of the estimator's framework.
    store : Store
        Holds data, checkpoints and the model.
    loss_weights : list of float, optional
        Weights of the losses, by label; by default 1 each.
    feature_cols, label_cols : list of str
        Columns of numbers, lists of numbers of one length, or vectors.
    input_shapes, label_shapes : list of list of int, optional
        Shape of each feature and label, without the rows, such as `[1, 28, 28]`; or with a leading -1 for the rows, as
        in Horovod. By default a feature has the shape of its column, and a label that of the model's output, if the
        number of values is the same.
    validation : float or str, optional
        Share of the rows that are for validation; or a column that is true, or more than 0, in these rows.
    batch_size, val_batch_size : int
        Number of rows of a rank's batch; 32 by default.
    train_steps_per_epoch, validation_steps_per_epoch : int, optional
        Maximum number of batches of an epoch; by default all.
    shuffle : bool
        Whether every epoch has another order.
    inmemory_cache_all : bool
        Whether a rank keeps data in memory for the next epoch.
    random_seed : int
        Seed of the order, the split and the framework.
    run_id : str, optional
        Name of the run, which the store must not have yet; by default a new one for each `fit`.
    backward_passes_per_step : int
        Number of batches whose gradients are added up for a step; 1 by default.
    gradient_compression
        The `compression` of the binding's `DistributedOptimizer`.
    verbose : int
        0: show nothing but output of the model itself and errors.
    """

    OBJECT_NAMES: tuple[str, ...] = ("model", "store", "gradient_compression", "backend")
    NOT_SAVED = ("backend",)
    FRAMEWORK: ClassVar[str]
    MODEL_CLASS: ClassVar[type[TrainedModel]]
    num_proc = make_param("num_proc", "number of ranks", TypeConverters.toInt)
    loss_weights = make_param("loss_weights", "weights of the losses, by label", TypeConverters.toListFloat)
    feature_cols = make_param("feature_cols", "columns that the model takes", TypeConverters.toListString)
    label_cols = make_param("label_cols", "columns that it learns", TypeConverters.toListString)
    input_shapes = make_param("input_shapes", "shape of each feature, without the rows")
    label_shapes = make_param("label_shapes", "shape of each label, without the rows")
    validation = make_param("validation", "share of the rows that validate, or a column that says which")
    batch_size = make_param("batch_size", "rows of a batch", TypeConverters.toInt)
    val_batch_size = make_param("val_batch_size", "rows of a batch that validates", TypeConverters.toInt)
    epochs = make_param("epochs", "times that all rows are trained on", TypeConverters.toInt)
    train_steps_per_epoch = make_param("train_steps_per_epoch", "most batches of an epoch", TypeConverters.toInt)
    validation_steps_per_epoch = make_param(
        "validation_steps_per_epoch", "most batches that validate", TypeConverters.toInt
    )
    shuffle = make_param("shuffle", "whether every epoch has another order", TypeConverters.toBoolean)
    inmemory_cache_all = make_param("inmemory_cache_all", "whether ranks keep what they read", TypeConverters.toBoolean)
    random_seed = make_param("random_seed", "of the order, the split and the framework", TypeConverters.toInt)
    run_id = make_param("run_id", "name of the run in the store", TypeConverters.toString)
    backward_passes_per_step = make_param("backward_passes_per_step", "batches of a step", TypeConverters.toInt)
    verbose = make_param("verbose", "0: show little", TypeConverters.toInt)

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self._setDefault(batch_size=32, epochs=1, shuffle=True, random_seed=0, backward_passes_per_step=1, verbose=1)
        self._setDefault(inmemory_cache_all=False)
        self._set_values(dict.fromkeys(self.OBJECT_NAMES) | dict(given))

    def fit_on_parquet(self, path: str, validation_path: str | None = None) -> Any:
        """Train on Parquet files in a directory below the store; return a model of the estimator's framework.

        `validation_path` has the validation files; `validation` is ignored here.
        """
        store = self._check()
        if store.exists(f"{path}/{NAME}"):
            return self._train_model(path, Manifest.read(store.read(f"{path}/{NAME}")))
        parts = []
        for each, split in ((path, TRAIN), (validation_path, VALIDATION)):
            if each is not None:
                found = of_parquet(store.fs, store.get_full_path(each), [*dict.fromkeys(self._list_columns())], split)
                parts += [replace(part, name=f"{each}/{part.name}") for part in found.parts]
        return self._train_model("", Manifest.combine_parts(parts))

    def _fit(self, dataset: Any) -> Any:
        """Write the data, train, and return the model."""
        store, value = self._check(), self._get_value
        data = store.get_data_path(uuid.uuid4().hex)
        try:
            manifest = write(
                dataset, store, data, self._list_columns(), value(self.validation), value(self.random_seed)
            )
            labels = value(self.label_cols)
            vectors = [name for name in labels if isinstance(dataset.schema[name].dataType, VectorUDT)]
            return self._train_model(data, manifest, vectors, dataset.sparkSession)
        finally:
            store.remove(data)

    # ---- implemented by each framework

    @staticmethod
    def train_rank(training: Training) -> Any:
        """Train on one rank."""
        raise NotImplementedError

    def _list_missing_options(self) -> list[str]:
        """Return the names of arguments that the framework needs and that were not given."""
        raise NotImplementedError

    def _make_start(self) -> Any:
        """Return the object that is pickled for the ranks: the model, and how it is trained."""
        raise NotImplementedError

    def _make_environment(self) -> dict[str, str]:
        """Return environment variables for the ranks."""
        return {}

    def _load_trained(self, home: str) -> Any:
        """Load the model that the ranks have left in the store."""
        raise NotImplementedError

    def _model_options(self) -> dict[str, Any]:
        """Return further arguments of the model's class."""
        return {}

    def _find_shapes(self) -> list[Any]:
        """Return the shape of each feature, without the rows; None: that of the column."""
        return self._get_value(self.input_shapes) or [None] * len(self._get_value(self.feature_cols))

    def _find_weight_column(self) -> str:
        """Return the column with the weights of rows; empty: there is none."""
        return ""

    # ---- common to all frameworks

    def _list_columns(self) -> list[str]:
        weights = self._find_weight_column()
        return [*self._get_value(self.feature_cols), *self._get_value(self.label_cols), *([weights] if weights else [])]

    def _check(self) -> Store:
        """Raise for missing or inconsistent arguments, before anything is written; return the store."""
        who = type(self).__name__
        for name in ("model", "store"):
            if getattr(self, f"_{name}") is None:
                raise LaunchError(f"{who} needs {name}=")
        for name in self._list_missing_options():
            raise LaunchError(f"{who} needs {name}=")
        for each in (self.feature_cols, self.label_cols):
            if not self._get_value(each):
                raise LaunchError(f"{who} needs {each.name}=")
        if self._backend is not None and self._get_value(self.num_proc) is not None:
            raise LaunchError(f"{who} has num_proc= and backend=: give one of them")
        for given, columns in ((self.input_shapes, self.feature_cols), (self.label_shapes, self.label_cols)):
            shapes, names = self._get_value(given), self._get_value(columns)
            if shapes is not None and len(shapes) != len(names):
                raise LaunchError(f"{given.name} has {len(shapes)} shapes, {columns.name} {len(names)} columns")
        labels, weights = self._get_value(self.label_cols), self._get_value(self.loss_weights)
        if weights and len(weights) != len(labels):
            raise LaunchError(f"loss_weights has {len(weights)} weights, label_cols {len(labels)} columns")
        assert isinstance(self._store, Store)
        name = self._get_value(self.run_id)
        if name and self._store.exists(path := self._store.get_run_path(name)):
            raise LaunchError(
                f"run_id is {name!r}, and {self._store.prefix_path} has such a run: give another run_id, or remove it "
                f"by store.remove({path!r})"
            )
        return self._store

    def _train_model(self, data: str, manifest: Manifest, vectors: Sequence[str] = (), spark: Any = None) -> Any:
        """Train on the ranks, and return the model."""
        store, value = self._store, self._get_value
        assert isinstance(store, Store)
        home = store.get_run_path(value(self.run_id) or f"{self.FRAMEWORK}-{uuid.uuid4().hex[:12]}")
        features, labels, lengths = value(self.feature_cols), value(self.label_cols), manifest.lengths
        shapes = [
            row_shape(shape, name, lengths[name]) for shape, name in zip(self._find_shapes(), features, strict=True)
        ]
        given = value(self.label_shapes) or [None] * len(labels)
        label_shapes = [row_shape(shape, name, lengths[name]) for shape, name in zip(given, labels, strict=True)]
        options: Mapping[str, Any] = {"backward_passes_per_step": value(self.backward_passes_per_step)}
        if self._gradient_compression is not None:
            options = {**options, "compression": self._gradient_compression}
        dump(store, f"{home}/{START}", self._make_start())
        training = Training(
            store=store,
            run=home,
            data=data,
            manifest=manifest,
            features=tuple(features),
            labels=tuple(labels),
            shapes=tuple(shapes),
            label_shapes=tuple(label_shapes),
            batch_size=value(self.batch_size),
            val_batch_size=value(self.val_batch_size) or value(self.batch_size),
            epochs=value(self.epochs),
            steps=value(self.train_steps_per_epoch),
            val_steps=value(self.validation_steps_per_epoch),
            shuffle=value(self.shuffle),
            seed=value(self.random_seed),
            options=options,
            verbose=value(self.verbose),
            weights=self._find_weight_column(),
            cache=value(self.inmemory_cache_all),
        )
        own = SparkBackend(value(self.num_proc), verbose=value(self.verbose), spark=spark)
        (self._backend or own).run(self.train_rank, args=(training,), env=self._make_environment())
        model = self.MODEL_CLASS(
            model=self._load_trained(home),
            store=store,
            run_id=home.rpartition("/")[2],
            history=json.loads(store.read(f"{home}/{HISTORY}")),
            feature_cols=training.features,
            label_cols=training.labels,
            input_shapes=[None if shape is None else list(shape) for shape in shapes],
            feature_lengths=[manifest.lengths[name] for name in training.features],
            vector_cols=vectors,
            **self._model_options(),
        )
        model.publish_model()
        return model
