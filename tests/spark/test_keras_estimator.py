"""`KerasEstimator`: training, callbacks, weights of rows, custom objects, transforming, saving and loading."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs pyarrow")
pytest.importorskip("keras", reason="needs keras")

import keras

from engine.launch import LaunchError
from engine.spark.store import Store

pytestmark = pytest.mark.timeout(600)  # the first test of a session starts a JVM, ranks and executors import TensorFlow


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"))


@pytest.fixture(scope="module")
def points(spark: Any) -> Any:
    """Rows of y = 2 a - 3 b + 1, some with another y and weight c = 0."""
    draw = random.Random(3)
    rows = []
    for number in range(203):
        a, b, counts = draw.random(), draw.random(), float(number % 5 > 0)
        rows.append((a, b, (2 * a - 3 * b + 1) if counts else 100.0, counts))
    return spark.createDataFrame(rows, "a double, b double, y double, c double").repartition(3)


def halving() -> tuple[Any, Any]:
    """Unregistered layer and loss, of a module that executors cannot import."""

    class Half(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x / 2

    def distance(label: Any, output: Any) -> Any:
        return keras.ops.mean(keras.ops.square(label - output), axis=-1)

    return Half, distance


def linear(*layers: Any) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])


def estimate(store: Store, model: Any, **parameters: Any) -> Any:
    """Make an estimator of a model, on two ranks."""
    from engine.spark.keras import KerasEstimator

    common = {"num_proc": 2, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "epochs": 20, "verbose": 0}
    return KerasEstimator(model=model, store=store, **common | parameters)


@pytest.mark.slow
def test_a_model_is_trained_saved_and_loaded_in_a_pipeline(spark, store, points, tmp_path):
    """Rows of weight 0 would spoil the model; a callback ends the training; custom objects travel with the model."""
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    half, distance = halving()

    class Ends(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert set(logs) == {"loss", "mae", "val_loss", "val_mae"}
            if epoch == 11:
                self.model.stop_training = True

    estimator = estimate(
        store,
        linear(half()),
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=distance,
        metrics=["mae"],
        callbacks=[Ends()],
        custom_objects={"Half": half, "distance": distance},
        sample_weight_col="c",
        validation=0.2,
    )
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="x"), estimator])
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    fitted = Pipeline.load(str(tmp_path / "pipeline")).fit(points)
    history = fitted.stages[-1].getHistory()
    assert len(history["loss"]) == 12 and history["loss"][-1] < 0.05 < history["loss"][0]
    assert history["val_loss"][-1] < 0.05 and history["mae"][-1] > 10  # metrics ignore weights
    assert not store.fs.ls(store.get_full_path("data"))
    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    loaded = PipelineModel.load(str(tmp_path / "fitted"))
    first, second = (each.transform(points).collect() for each in (fitted, loaded))
    assert first == second
    assert np.mean([(row.y__output - row.y) ** 2 for row in first if row.c]) < 0.05
    for mine, other in zip(
        loaded.stages[-1].getModel().get_weights(), fitted.stages[-1].getModel().get_weights(), strict=True
    ):
        assert np.array_equal(mine, other)


@pytest.mark.slow
def test_a_compiled_model_of_two_inputs_and_outputs_is_trained_on_parquet_that_is_there(spark, store, points):
    points.where("c > 0").selectExpr("*", "array(a, b) AS pair").write.parquet(store.get_full_path("data/there"))
    keras.utils.set_random_seed(1)
    a, b = keras.Input((1,)), keras.Input((1,))
    y = keras.layers.Dense(1)(keras.layers.Concatenate()([a, b]))
    model = keras.Model([a, b], [y, keras.layers.Dense(2)(y)])
    model.compile(keras.optimizers.SGD(0.05), loss=["mse", "mse"])
    columns = {"feature_cols": ["a", "b"], "label_cols": ["y", "pair"]}
    estimator = estimate(store, model, **columns, epochs=3, backward_passes_per_step=2)
    found = estimator.fit_on_parquet("data/there")
    history = found.getHistory()
    assert len(history["loss"]) == 3 and history["loss"][-1] < history["loss"][0]
    row = found.setOutputCols(["one", "two"]).transform(points).first()
    expected = [
        each.ravel() for each in found.getModel().predict([np.array([[row.a]]), np.array([[row.b]])], verbose=0)
    ]
    assert np.allclose(row.one, expected[0], atol=1e-6) and np.allclose(row.two, expected[1], atol=1e-6)


def test_what_an_estimator_lacks_is_told(store):
    from engine.spark.keras import KerasEstimator

    whole = {"model": linear(), "store": store, "feature_cols": ["x"], "label_cols": ["y"]}
    with pytest.raises(LaunchError, match="KerasEstimator needs optimizer="):
        KerasEstimator(**whole).fit_on_parquet("data/a")
    with pytest.raises(LaunchError, match="KerasEstimator needs loss="):
        KerasEstimator(**whole, optimizer="sgd").fit_on_parquet("data/a")
    with pytest.raises(LaunchError, match="the model has 1 inputs, feature_cols 2 columns"):
        KerasEstimator(**whole | {"feature_cols": ["x", "z"]}, optimizer="sgd", loss="mse").fit_on_parquet("data/a")
    with pytest.raises(TypeError, match=r"KerasEstimator has no parameter 'lr'; it has .*batch_size"):
        KerasEstimator(**whole, lr=3)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_labels_get_the_shape_of_the_output_for_losses_and_metrics_of_ones_own(spark, store, points, known):
    """Keras itself reshapes labels neither for the call of a `Loss` nor for a metric's function."""

    class Distance(keras.losses.Loss):  # type: ignore[misc]
        def call(self, label: Any, output: Any) -> Any:
            return keras.ops.mean(keras.ops.square(label - output))

    def away(label: Any, output: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(label - output))

    class Unknown(keras.Model):  # type: ignore[misc]
        def __init__(self, **config: Any) -> None:
            super().__init__(**config)
            self.last = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.last(x)

    data = points.filter("c > 0").selectExpr("array(a, b) AS x", "y")
    trained = estimate(
        store,
        linear() if known else Unknown(),
        optimizer=keras.optimizers.SGD(0.3),
        loss=Distance(),
        metrics=[away],
        custom_objects={"Distance": Distance, "away": away, "Unknown": Unknown},
        checkpoint_callback=keras.callbacks.ModelCheckpoint("unused.keras", monitor="val_loss", save_best_only=True),
        validation=0.2,
    ).fit(data)
    history = trained.getHistory()
    assert history["val_loss"][-1] < 0.02 and history["val_away"][-1] < 0.2
    assert max(abs(row.y - row.y__output) for row in trained.transform(data).collect()) < 0.5
