"""What estimators have in common: parameters, data in the store, the job that trains, the model that comes of it."""

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
from .params import Stage, param
from .store import Store
from .training import HISTORY, START, Training, dump, row_shape
from .writer import write


class Common(TypedDict, total=False):
    """The arguments that every estimator takes, as `JobEstimator` documents them."""

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


class JobEstimator(Estimator[TrainedModel], Stage):
    """Trains a model on the ranks of a job in Spark.

    Parameters
    ----------
    num_proc : int, optional
        Number of ranks; by default as many as Spark has slots.
    backend : Backend, optional
        Where the ranks run, in place of `num_proc`; in Spark by default. It is not saved with the stage.
    model
        What is trained, of the estimator's framework.
    store : Store
        Where data, checkpoints and the model lie.
    loss_weights : list of float, optional
        By label; 1 each by default.
    feature_cols, label_cols : list of str
        Columns of numbers, lists of numbers of one length, or vectors.
    input_shapes : list of list of int, optional
        Of each feature, without the rows, such as `[1, 28, 28]`; or with -1 for the rows before it, as Horovod has it:
        `[-1, 1, 28, 28]`. By default as the column has it.
    label_shapes : list of list of int, optional
        Of each label, likewise. By default a label gets the shape of the model's output, if that has as many values.
    validation : float or str, optional
        Share of the rows that validate; or a column that is true, or more than 0, where a row does.
    batch_size, val_batch_size : int
        Rows of a rank's batch; 32 by default.
    epochs : int
    train_steps_per_epoch, validation_steps_per_epoch : int, optional
        The most batches of an epoch; all by default.
    shuffle : bool
        Whether every epoch has another order.
    inmemory_cache_all : bool
        Whether a rank keeps what it has read in memory, for the next epoch.
    random_seed : int
        Of the order, the split and the framework.
    run_id : str, optional
        The name of the run in the store, which has none of that name; a new one for each `fit` by default.
    backward_passes_per_step : int
        Batches whose gradients are added up for a step; 1 by default.
    gradient_compression
        The `compression` of the binding's `DistributedOptimizer`.
    verbose : int
        0: show nothing but what the model itself writes and what goes wrong.
    """

    OBJECT_NAMES: tuple[str, ...] = ("model", "store", "gradient_compression", "backend")
    NOT_SAVED = ("backend",)
    FRAMEWORK: ClassVar[str]
    MODEL_CLASS: ClassVar[type[TrainedModel]]
    num_proc = param("num_proc", "number of ranks", TypeConverters.toInt)
    loss_weights = param("loss_weights", "weights of the losses, by label", TypeConverters.toListFloat)
    feature_cols = param("feature_cols", "columns that the model takes", TypeConverters.toListString)
    label_cols = param("label_cols", "columns that it learns", TypeConverters.toListString)
    input_shapes = param("input_shapes", "shape of each feature, without the rows")
    label_shapes = param("label_shapes", "shape of each label, without the rows")
    validation = param("validation", "share of the rows that validate, or a column that says which")
    batch_size = param("batch_size", "rows of a batch", TypeConverters.toInt)
    val_batch_size = param("val_batch_size", "rows of a batch that validates", TypeConverters.toInt)
    epochs = param("epochs", "times that all rows are trained on", TypeConverters.toInt)
    train_steps_per_epoch = param("train_steps_per_epoch", "most batches of an epoch", TypeConverters.toInt)
    validation_steps_per_epoch = param("validation_steps_per_epoch", "most batches that validate", TypeConverters.toInt)
    shuffle = param("shuffle", "whether every epoch has another order", TypeConverters.toBoolean)
    inmemory_cache_all = param("inmemory_cache_all", "whether ranks keep what they read", TypeConverters.toBoolean)
    random_seed = param("random_seed", "of the order, the split and the framework", TypeConverters.toInt)
    run_id = param("run_id", "name of the run in the store", TypeConverters.toString)
    backward_passes_per_step = param("backward_passes_per_step", "batches of a step", TypeConverters.toInt)
    verbose = param("verbose", "0: show little", TypeConverters.toInt)

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self._setDefault(batch_size=32, epochs=1, shuffle=True, random_seed=0, backward_passes_per_step=1, verbose=1)
        self._setDefault(inmemory_cache_all=False)
        self._fill(dict.fromkeys(self.OBJECT_NAMES) | dict(given))

    def fit_on_parquet(self, path: str, validation_path: str | None = None) -> Any:
        """Train on Parquet files that are in the store already.

        Parameters
        ----------
        path : str
            Their directory, below the store.
        validation_path : str, optional
            Of those that validate; `validation` does not count here.

        Returns
        -------
        TrainedModel
            Of the estimator's framework.
        """
        store = self._check()
        if store.exists(f"{path}/{NAME}"):
            return self._train(path, Manifest.read(store.read(f"{path}/{NAME}")))
        parts = []
        for each, split in ((path, TRAIN), (validation_path, VALIDATION)):
            if each is not None:
                found = of_parquet(store.fs, store.get_full_path(each), [*dict.fromkeys(self._columns())], split)
                parts += [replace(part, name=f"{each}/{part.name}") for part in found.parts]
        return self._train("", Manifest.of(parts))

    def _fit(self, dataset: Any) -> Any:
        """Write the data, train, and give the model."""
        store, value = self._check(), self._value
        data = store.get_data_path(uuid.uuid4().hex)
        try:
            manifest = write(dataset, store, data, self._columns(), value(self.validation), value(self.random_seed))
            labels = value(self.label_cols)
            vectors = [name for name in labels if isinstance(dataset.schema[name].dataType, VectorUDT)]
            return self._train(data, manifest, vectors, dataset.sparkSession)
        finally:
            store.remove(data)

    # ---- what each framework does in its own way

    @staticmethod
    def work(training: Training) -> Any:
        """What each rank does."""
        raise NotImplementedError

    def _lacking(self) -> list[str]:
        """The arguments that the framework needs and that were not given."""
        raise NotImplementedError

    def _begin(self) -> Any:
        """What is pickled for the ranks: the model, and how it is trained."""
        raise NotImplementedError

    def _env(self) -> dict[str, str]:
        """Variables that the ranks get."""
        return {}

    def _trained(self, home: str) -> Any:
        """The model that the ranks have left in the store."""
        raise NotImplementedError

    def _more(self) -> dict[str, Any]:
        """More arguments of the model's class."""
        return {}

    def _shapes(self) -> list[Any]:
        """The shape of each feature, without the rows; None: as the column has it."""
        return self._value(self.input_shapes) or [None] * len(self._value(self.feature_cols))

    def _weights(self) -> str:
        """The column with the rows' weights; empty: there is none."""
        return ""

    # ---- what all do

    def _columns(self) -> list[str]:
        weights = self._weights()
        return [*self._value(self.feature_cols), *self._value(self.label_cols), *([weights] if weights else [])]

    def _check(self) -> Store:
        """Refuse what lacks before anything is written."""
        who = type(self).__name__
        for name in ("model", "store"):
            if getattr(self, f"_{name}") is None:
                raise LaunchError(f"{who} needs {name}=")
        for name in self._lacking():
            raise LaunchError(f"{who} needs {name}=")
        for each in (self.feature_cols, self.label_cols):
            if not self._value(each):
                raise LaunchError(f"{who} needs {each.name}=")
        if self._backend is not None and self._value(self.num_proc) is not None:
            raise LaunchError(f"{who} has num_proc= and backend=: give one of them")
        for given, columns in ((self.input_shapes, self.feature_cols), (self.label_shapes, self.label_cols)):
            shapes, names = self._value(given), self._value(columns)
            if shapes is not None and len(shapes) != len(names):
                raise LaunchError(f"{given.name} has {len(shapes)} shapes, {columns.name} {len(names)} columns")
        labels, weights = self._value(self.label_cols), self._value(self.loss_weights)
        if weights and len(weights) != len(labels):
            raise LaunchError(f"loss_weights has {len(weights)} weights, label_cols {len(labels)} columns")
        assert isinstance(self._store, Store)
        name = self._value(self.run_id)
        if name and self._store.exists(path := self._store.get_run_path(name)):
            raise LaunchError(
                f"run_id is {name!r}, and {self._store.prefix_path} has such a run: give another run_id, or remove it "
                f"by store.remove({path!r})"
            )
        return self._store

    def _train(self, data: str, manifest: Manifest, vectors: Sequence[str] = (), spark: Any = None) -> Any:
        """Have the ranks train, and give the model."""
        store, value = self._store, self._value
        assert isinstance(store, Store)
        home = store.get_run_path(value(self.run_id) or f"{self.FRAMEWORK}-{uuid.uuid4().hex[:12]}")
        features, labels, lengths = value(self.feature_cols), value(self.label_cols), manifest.lengths
        shapes = [row_shape(shape, name, lengths[name]) for shape, name in zip(self._shapes(), features, strict=True)]
        given = value(self.label_shapes) or [None] * len(labels)
        label_shapes = [row_shape(shape, name, lengths[name]) for shape, name in zip(given, labels, strict=True)]
        options: Mapping[str, Any] = {"backward_passes_per_step": value(self.backward_passes_per_step)}
        if self._gradient_compression is not None:
            options = {**options, "compression": self._gradient_compression}
        dump(store, f"{home}/{START}", self._begin())
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
            weights=self._weights(),
            cache=value(self.inmemory_cache_all),
        )
        own = SparkBackend(value(self.num_proc), verbose=value(self.verbose), spark=spark)
        (self._backend or own).run(self.work, args=(training,), env=self._env())
        model = self.MODEL_CLASS(
            model=self._trained(home),
            store=store,
            run_id=home.rpartition("/")[2],
            history=json.loads(store.read(f"{home}/{HISTORY}")),
            feature_cols=training.features,
            label_cols=training.labels,
            input_shapes=[None if shape is None else list(shape) for shape in shapes],
            feature_lengths=[manifest.lengths[name] for name in training.features],
            vector_cols=vectors,
            **self._more(),
        )
        model.publish()
        return model
