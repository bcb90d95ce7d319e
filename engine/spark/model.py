"""Base class of trained models: a stage of a pipeline that adds a model's outputs to a DataFrame."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pyspark.ml.base import Model
from pyspark.ml.param import TypeConverters

from .columns import as_numbers
from .params import SavedStage, make_param
from .store import Store
from .training import dump, load, reshape_columns

Compute = Callable[[Any, list[Any]], list[Any]]
"""Takes a model and the arrays of its features, and returns an array for each output, [rows, ...]."""


class TrainedModel(Model, SavedStage):
    """Stage that computes a model's outputs on the executors, which find the model in the store.

    `history` has the losses and metrics of each epoch; names that begin with `val_` are those of the validation rows. A
    shape in `input_shapes` is without the rows; None: that of the column. A length in `feature_lengths` is 0 for
    numbers. `output_cols` defaults to the labels' names followed by `__output`.
    """

    OBJECT_NAMES: tuple[str, ...] = ("model", "store", "history")
    run_id = make_param("run_id", "the run that has made the model", TypeConverters.toString)
    feature_cols = make_param("feature_cols", "columns that the model takes", TypeConverters.toListString)
    label_cols = make_param("label_cols", "columns that it has learnt", TypeConverters.toListString)
    input_shapes = make_param("input_shapes", "shape of each feature, without the rows")
    feature_lengths = make_param("feature_lengths", "length of each feature's lists", TypeConverters.toListInt)
    vector_cols = make_param("vector_cols", "labels whose outputs become vectors", TypeConverters.toListString)
    output_cols = make_param("output_cols", "names of the outputs", TypeConverters.toListString)
    batch_size = make_param("batch_size", "rows that are computed at once", TypeConverters.toInt)

    def __init__(
        self,
        *,
        model: Any = None,
        store: Store | None = None,
        run_id: str | None = None,
        history: list[dict[str, float]] | None = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        input_shapes: Sequence[Any] | None = None,
        feature_lengths: Sequence[int] | None = None,
        vector_cols: Sequence[str] | None = None,
        output_cols: Sequence[str] | None = None,
        batch_size: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self._setDefault(batch_size=1024, vector_cols=[])
        self._set_values(given)

    @staticmethod
    def compute_outputs(model: Any, arrays: list[Any]) -> list[Any]:
        """Compute the outputs in the form of `Compute`, in the model's inference mode."""
        raise NotImplementedError

    def getModel(self) -> Any:
        """Return the model itself."""
        return self._model

    def getHistory(self) -> Any:
        """Return losses and metrics, averaged over all ranks, in Horovod's form for the framework."""
        raise NotImplementedError

    def setOutputCols(self, names: Sequence[str]) -> TrainedModel:
        """Set the names of the outputs."""
        self._set_values({"output_cols": list(names)})
        return self

    def _transform(self, dataset: Any) -> Any:
        """Add the outputs to a DataFrame: numbers, lists of numbers, or vectors where the label was one."""
        from pyspark.ml.functions import array_to_vector, predict_batch_udf
        from pyspark.sql import types

        value, real = self._get_value, types.FloatType()
        features, labels = value(self.feature_cols), value(self.label_cols)
        names = value(self.output_cols) or [f"{label}__output" for label in labels]
        inputs = [as_numbers(dataset, name) for name in features]
        widths = self._find_widths([np.int64 if integers else np.float32 for _, integers in inputs])
        fields = [
            types.StructField(name, types.ArrayType(real) if width else real)
            for name, width in zip(names, widths, strict=True)
        ]
        store, path, compute = self._store, self.publish_model(), self.compute_outputs
        shapes = [shape if shape is None else tuple(shape) for shape in value(self.input_shapes)]

        def make() -> Any:
            return _make_predictor(compute, store, path, features, shapes, names, widths)

        lengths = value(self.feature_lengths)
        predict = predict_batch_udf(
            make,
            return_type=types.StructType(fields),
            batch_size=value(self.batch_size),
            input_tensor_shapes=[[length] if length else [] for length in lengths],
        )
        temporary = f"__engine_{uuid.uuid4().hex}"
        found = dataset.withColumn(temporary, predict(*(column for column, _ in inputs)))
        vectors = {name for label, name in zip(labels, names, strict=True) if label in value(self.vector_cols)}
        for name in names:
            column = found[temporary][name]
            found = found.withColumn(name, array_to_vector(column) if name in vectors else column)
        return found.drop(temporary)

    def _find_widths(self, kinds: Sequence[Any]) -> list[int]:
        """Return the number of values of each output in a row; 0 for a number."""
        features, shapes = self._get_value(self.feature_cols), self._get_value(self.input_shapes)
        lengths = self._get_value(self.feature_lengths)
        batch = {
            name: np.zeros((2, length) if length else 2, kind)
            for name, length, kind in zip(features, lengths, kinds, strict=True)
        }
        arrays = reshape_columns(batch, features, [None if shape is None else tuple(shape) for shape in shapes])
        widths = [output.size // 2 for output in self.compute_outputs(self._model, arrays)]
        vectors = self._get_value(self.vector_cols)
        labels = self._get_value(self.label_cols)
        return [
            0 if width == 1 and label not in vectors else width for width, label in zip(widths, labels, strict=True)
        ]

    def publish_model(self) -> str:
        """Write the model where executors find it, unless it is there already; return the path below the store.

        The path is unique to this model: a later run of the same name, after this run was removed, has another path.
        """
        path = f"{self._store.get_run_path(self._get_value(self.run_id))}/{self.uid}.pkl"
        if not self._store.exists(path):
            dump(self._store, path, self._pack_model())
        return path

    def _pack_model(self) -> Any:
        """Return the object that is pickled for executors that compute with the model."""
        return self._model


def _make_predictor(
    compute: Compute,
    store: Store,
    path: str,
    features: Sequence[str],
    shapes: Sequence[tuple[int, ...] | None],
    names: Sequence[str],
    widths: Sequence[int],
) -> Any:
    """Load the model in an executor's Python process, and return the function that computes a batch."""
    model = load(store, path)

    def predict(*inputs: Any) -> dict[str, Any]:
        batch = {
            name: values.astype(np.int64 if values.dtype.kind in "iub" else np.float32)
            for name, values in zip(features, inputs, strict=True)
        }
        outputs = compute(model, reshape_columns(batch, features, shapes))
        return {
            name: output.astype(np.float32, copy=False).reshape((-1, width) if width else -1)
            for name, output, width in zip(names, outputs, widths, strict=True)
        }

    # Spark counts the parameters; if there is only one, it passes all columns as one array.
    kind = inspect.Parameter.POSITIONAL_ONLY
    columns = [inspect.Parameter(f"column{number}", kind) for number in range(len(features))]
    predict.__signature__ = inspect.Signature(columns)  # type: ignore[attr-defined]
    return predict
