"""Estimators: written files, the rows that each rank reads, training, transforming, saving and loading."""

from __future__ import annotations

import json
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs pyarrow")

from engine.launch import LaunchError
from engine.spark.manifest import NAME, TRAIN, VALIDATION, DataError, Manifest, Part, of_parquet
from engine.spark.reader import Reader
from engine.spark.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store

pytestmark = pytest.mark.timeout(300)  # the first test of a session starts a JVM, and Spark in it


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"))


def files(store: Store, path: str, rows: list[int], kind: type = int) -> Manifest:
    """Write files with these row counts in row groups of 64; their column counts upwards over all files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    home = Path(store.get_full_path(path))
    home.mkdir(parents=True)
    parts, at = [], 0
    for number, count in enumerate(rows):
        table = pa.table({"x": np.arange(at, at + count).astype(kind)})
        pq.write_table(table, home / f"{number}.parquet", row_group_size=64)
        groups = tuple(min(64, count - begin) for begin in range(0, count, 64))
        parts.append(Part(f"{number}.parquet", TRAIN, groups, {"x": 0}))
        at += count
    return Manifest.combine_parts(parts)


@pytest.mark.parametrize(("rows", "size"), [([500, 3, 500], 7), ([1003], 1), ([10], 7), ([64, 64], 3), ([3], 3)])
@pytest.mark.parametrize("batch_size", [1, 10, 4096])
def test_ranks_read_every_row_once_and_equally_many_batches(store, rows, size, batch_size):
    """Covers 1003 rows and other numbers, and fewer row groups than ranks."""
    manifest = files(store, "data/a", rows)
    orders = []
    for epoch in range(2):
        readers = [Reader(store, "data/a", manifest, ["x"], rank=rank, size=size, seed=5) for rank in range(size)]
        read = [[batch["x"] for batch in reader.read_batches(epoch, batch_size)] for reader in readers]
        assert {len(batches) for batches in read} == {readers[0].count_steps(batch_size)}
        counts = [sum(map(len, batches)) for batches in read]
        assert max(counts) - min(counts) <= 1
        assert all(0 < len(batch) <= batch_size + 1 for batches in read for batch in batches)
        orders.append([int(value) for batches in read for batch in batches for value in batch])
        assert sorted(orders[-1]) == list(range(sum(rows)))
    assert sum(rows) < 64 or orders[0] != orders[1]


def test_row_groups_without_rows_are_passed_over(store):
    """Other programs write such files; one file starts with an empty group, another has only empty ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    home = Path(store.get_full_path("data/e"))
    home.mkdir(parents=True)
    for name, counts in (("a", (0, 3, 0, 2)), ("b", (0,))):
        with pq.ParquetWriter(
            home / f"{name}.parquet", pa.schema({"x": pa.int64(), "v": pa.list_(pa.int64())})
        ) as file:
            for count in counts:
                file.write_table(pa.table({"x": range(count), "v": [[1, 2]] * count}, file.schema))
    manifest = of_parquet(store.fs, store.get_full_path("data/e"), ["x", "v"])
    assert [part.groups for part in manifest.parts] == [(0, 3, 0, 2)] and manifest.lengths == {"x": 0, "v": 2}
    batches = Reader(store, "data/e", manifest, ["x"], shuffle=False).read_batches(0, 4)
    assert [int(value) for batch in batches for value in batch["x"]] == [0, 1, 2, 0, 1]


def test_files_of_two_schemas_are_told(store):
    files(store, "data/h", [3])
    files(store, "data/h/later", [3], float)
    with pytest.raises(DataError, match=r"'x' has integers in .*/h/0\.parquet and fractions in .*/later/0\.parquet"):
        of_parquet(store.fs, store.get_full_path("data/h"), ["x"])


def test_too_few_rows_for_the_ranks_are_an_error(store):
    with pytest.raises(DataError, match="2 train rows are too few for 3 ranks"):
        Reader(store, "data/a", files(store, "data/a", [2]), ["x"], size=3)


def frame(spark: Any, rows: list[tuple[Any, ...]], schema: str, partitions: int = 2) -> Any:
    return spark.createDataFrame(rows, schema).repartition(partitions)


@pytest.mark.slow
def test_what_is_written_is_what_the_manifest_says(spark, store):
    """Covers empty partitions, duplicate files, vectors, and a split in the same pass."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions

    from engine.spark.writer import write

    data = spark.range(200).repartition(5).filter("id < 100 and id % 5 < 4")
    data = data.withColumn(
        "v", array_to_vector(functions.array(functions.col("id").cast("double"), functions.lit(1.0)))
    )
    data = data.withColumn("w", functions.array("id", "id"))
    data = data.withColumn("late", functions.when(functions.col("id") >= 60, True))  # null in the other rows
    manifest = write(data, store, "data/b", ["id", "v", "w"], "late", rows_per_group=7)
    assert (manifest.count_rows(TRAIN), manifest.count_rows(VALIDATION)) == (48, 32)
    assert manifest.lengths == {"id": 0, "v": 2, "w": 2}
    assert max(rows for _, _, rows in manifest.list_groups()) <= 7
    small = write(data, store, "data/s", ["w"], bytes_per_group=20 * 3)  # 20 bytes a row, with its list's end
    assert (small.count_rows(), max(rows for _, _, rows in small.list_groups())) == (80, 3)
    store.write("data/b/train-00000-1-repeated.parquet", b"of a task that was run twice")
    found = Manifest.read(store.read(f"data/b/{NAME}"))
    assert found == manifest
    (batch,) = Reader(store, "data/b", found, ["id", "v"], VALIDATION).read_batches(0, 100)
    assert sorted(batch["id"]) == [each for each in range(60, 100) if each % 5 < 4]
    assert batch["v"].dtype == np.float32 and batch["v"].tolist() == [[each, 1] for each in batch["id"]]


@pytest.mark.slow
def test_a_frame_that_differs_at_each_evaluation_is_written_once(spark, store):
    """Training and validation share no row, and lack none."""
    from pyspark.sql import functions

    from engine.spark.writer import write

    data = spark.range(400).withColumn("x", functions.rand())
    manifest = write(data, store, "data/c", ["id", "x"], 0.25)
    assert (
        manifest.count_rows(TRAIN) + manifest.count_rows(VALIDATION) == 400
        and 50 < manifest.count_rows(VALIDATION) < 150
    )
    read = [
        int(each)
        for split in (TRAIN, VALIDATION)
        for batch in Reader(store, "data/c", manifest, ["id"], split).read_batches(0, 50)
        for each in batch["id"]
    ]
    assert sorted(read) == list(range(400))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("rows", "schema", "said"),
    [
        ([(1.0, [1.0]), (2.0, [1.0, 2.0])], "y double, x array<double>", "column 'x' has lists of 1 and of 2 values"),
        ([(1.0, [1.0]), (None, [1.0])], "y double, x array<double>", "column 'y' has 1 rows without a value"),
        (
            [(1.0, [1.0]), (1.0, [None])],
            "y double, x array<double>",
            "column 'x' has lists in which a value is missing",
        ),
        ([(1.0, [1.0]), (float("nan"), [1.0])], "y double, x array<double>", "column 'y' has 1 values that are NaN"),
        ([(1.0, [1.0, float("nan")])], "y double, x array<double>", "column 'x' has 1 values that are NaN"),
        ([(1.0, [float("-inf")])], "y float, x array<float>", "column 'x' has 1 values that are NaN or infinite"),
        ([(1e300, [1.0])], "y double, x array<double>", "column 'y' has 1 values that are NaN or infinite as float32"),
        ([(1.0, [])], "y double, x array<double>", "column 'x' has lists without values"),
        ([(1.0, "a")], "y double, x string", "column 'x' is of string: expected numbers"),
        ([], "y double, x array<double>", "has no rows"),
        ([(1.0,)], "y double", "has no column 'x'; it has y"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_told_by_their_column(spark, store, rows, schema, said):
    """Covers ragged lists within a partition and between two, nulls, and strings."""
    from engine.spark.writer import write

    for partitions in (1, 2):
        with pytest.raises(DataError, match=said):
            write(frame(spark, rows, schema, partitions), store, "data/d", ["x", "y"])


def test_a_path_says_which_store_it_is(tmp_path):
    assert type(Store.create(str(tmp_path))) is LocalStore
    assert type(Store.create("memory://a")) is FilesystemStore
    assert type(HDFSStore.create("hdfs://name/a")) is HDFSStore
    for path in ("dbfs:/a", "/dbfs/a", "file:///dbfs/a"):
        store = Store.create(path)
        assert type(store) is DBFSLocalStore and store.prefix_path == "/dbfs/a"
    for path in ("/Volumes/a/b", "dbfs:/Volumes/a/b", "file:/Volumes/a/b"):
        store = Store.create(path)
        assert type(store) is DBFSLocalStore and store.prefix_path == "/Volumes/a/b"


def test_a_store_that_executors_have_not_in_common_with_the_driver_is_told(spark, store):
    from engine.spark.writer import write

    with pytest.raises(DataError, match=r"memory://a, and it is not there on the driver: the store must be one place"):
        write(frame(spark, [(1.0,)], "y double"), Store.create("memory://a"), "data/g", ["y"])
    with pytest.raises(FileNotFoundError, match=r"does not find runs/a/start\.pkl in .*: a store must be one place"):
        store.read("runs/a/start.pkl")


def test_a_local_store_is_the_same_directory_wherever_a_task_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store.create("store")
    store.write("a", b"a")
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(store)).read("a") == b"a"


def linear() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def points(spark: Any) -> Any:
    """Rows of y = 2 a - 3 b + 1, with a and b also as a vector."""
    from pyspark.ml.feature import VectorAssembler

    draw = random.Random(3)
    rows = [(a, b, 2 * a - 3 * b + 1) for a, b in ((draw.random(), draw.random()) for _ in range(203))]
    found = frame(spark, rows, "a double, b double, y double", 3)
    return VectorAssembler(inputCols=["a", "b"], outputCol="x").transform(found)


def test_a_model_is_trained_saved_and_loaded_in_a_pipeline(spark, store, points, tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.linalg import DenseVector

    from engine.spark.torch import TorchEstimator

    class Two(torch.nn.Module):  # has two outputs: a prediction, and a copy of its input vector
        def __init__(self) -> None:
            super().__init__()
            self.sum, self.copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)

        def forward(self, x: Any) -> tuple[Any, Any]:
            return self.sum(x), self.copy(x)

    torch.manual_seed(1)
    model = Two()
    estimator = TorchEstimator(
        num_proc=2,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=[torch.nn.functional.mse_loss] * 2,
        store=store,
        feature_cols=["x"],
        label_cols=["y", "x"],
        validation=0.2,
        batch_size=8,
        epochs=10,
        verbose=0,
    )
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="x"), estimator])
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    pipeline = Pipeline.load(str(tmp_path / "pipeline"))
    with ThreadPoolExecutor(1) as pool:  # a thread that has made no session, such as one of a `CrossValidator`
        fitted = pool.submit(pipeline.fit, points.drop("x")).result()
    history = fitted.stages[-1].getHistory()
    assert [epoch["epoch"] for epoch in history] == [*range(10)]
    assert history[-1]["train"]["loss"] < 0.1 < history[0]["train"]["loss"]
    assert history[-1]["validation"]["loss"] < 0.1
    assert not store.fs.ls(store.get_full_path("data"))
    fitted.write().overwrite().save(f"file:{tmp_path}/fitted")  # a path in Spark's form, which fsspec does not know
    loaded = PipelineModel.load(f"file:{tmp_path}/fitted")
    first, second = (each.transform(points.drop("x")).collect() for each in (fitted, loaded))
    assert first == second
    assert np.mean([(row.y__output - row.y) ** 2 for row in first]) < 0.05
    assert all(isinstance(row.x__output, DenseVector) for row in first)
    assert np.mean([(row.x__output.toArray() - row.x.toArray()) ** 2 for row in first]) < 0.05
    assert torch.equal(loaded.stages[-1].getModel().sum.weight, fitted.stages[-1].getModel().sum.weight)


@pytest.mark.slow
def test_parquet_that_is_there_already_is_trained_on(spark, store, points):
    torch = pytest.importorskip("torch", reason="needs torch")
    from pyspark.ml.functions import vector_to_array

    from engine.spark.torch import TorchEstimator

    points.select(vector_to_array("x", "float32").alias("x"), "y").write.parquet(store.get_full_path("data/there"))
    assert of_parquet(store.fs, store.get_full_path("data/there"), ["x"]).count_rows() == 203
    model, optimizer = linear()
    common = {"num_proc": 2, "store": store, "feature_cols": ["x"], "batch_size": 8, "epochs": 2, "verbose": 0}
    loss = torch.nn.functional.mse_loss
    trained = TorchEstimator(model=model, optimizer=optimizer, loss=loss, label_cols=["y"], **common)
    history = trained.fit_on_parquet("data/there").getHistory()
    assert history[1]["train"]["loss"] < history[0]["train"]["loss"] and "validation" not in history[0]


def test_models_of_one_run_id_do_not_compute_with_each_others_parameters(spark, store, points):
    """A run was removed, and another got its ID: a model of the first keeps its own parameters."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from engine.spark.torch import TorchModel

    found = []
    for value in (1.0, 2.0):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, value)
        found.append(
            TorchModel(
                model=model,
                store=store,
                run_id="mine",
                history=[],
                feature_cols=["y"],
                label_cols=["y"],
                input_shapes=[[1]],
                feature_lengths=[0],
            )
        )
    for value, each in zip((1.0, 2.0), found, strict=True):
        rows = each.setOutputCols(["out"]).transform(points).collect()
        assert [row.out for row in rows] == pytest.approx([value * row.y for row in rows], rel=1e-5)


def test_a_stage_that_a_later_version_has_saved_is_told(spark, store, tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    from engine.spark.torch import TorchEstimator

    path = str(tmp_path / "stage")
    TorchEstimator(store=store, label_cols=["y"]).save(path)
    assert TorchEstimator.load(path).getOrDefault("label_cols") == ["y"]
    (metadata,) = Path(path, "metadata").glob("part-*")
    found = json.loads(metadata.read_text())
    found["paramMap"]["of_tomorrow"] = 1
    metadata.write_text(json.dumps(found))
    for checksum in metadata.parent.glob(".*.crc"):
        checksum.unlink()
    with pytest.raises(Exception, match="of_tomorrow"):
        TorchEstimator.load(path)
    metadata.write_text(json.dumps(found | {"engineVersion": "99.0"}))
    with pytest.raises(LaunchError, match=r"was saved by version 99\.0, and .* cannot load it: .*of_tomorrow"):
        TorchEstimator.load(path)


def test_what_an_estimator_lacks_is_told(store):
    pytest.importorskip("torch", reason="needs torch")
    from engine.spark.torch import TorchEstimator

    model, optimizer = linear()
    whole = {"model": model, "optimizer": optimizer, "loss": len, "store": store, "feature_cols": ["x"]}
    with pytest.raises(Exception, match="TorchEstimator needs label_cols="):
        TorchEstimator(**whole).fit_on_parquet("data/a")
    with pytest.raises(Exception, match="loss has 1 functions, label_cols 2 columns"):
        TorchEstimator(**whole, label_cols=["a", "b"]).fit_on_parquet("data/a")
    store.write("runs/mine/checkpoint/state.pt", b"of another run")
    with pytest.raises(LaunchError, match=r"run_id is 'mine', and .* has such a run: give another"):
        TorchEstimator(**whole, label_cols=["y"], run_id="mine").fit_on_parquet("data/a")


def test_gradients_of_several_batches_are_added_up_for_a_step(store):
    """The gradients of five batches are the means of 0, 1 and so on; they make steps of 2, 2 and 1 in each epoch."""
    torch = pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("pyspark", reason="needs pyspark 4", exc_type=ImportError)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from engine.spark.torch.training import train_rank
    from engine.spark.training import START, Training, dump

    manifest = files(store, "data/f", [10], float)
    model = torch.nn.Linear(1, 1, bias=False)
    dump(
        store,
        f"runs/f/{START}",
        (model, torch.optim.SGD(model.parameters(), lr=0.0), [(lambda output, label: output.mean(), 1.0)]),
    )
    training = Training(
        store=store,
        run="runs/f",
        data="data/f",
        manifest=manifest,
        features=("x",),
        labels=("x",),
        shapes=((1,),),
        label_shapes=(None,),
        batch_size=2,
        val_batch_size=2,
        epochs=2,
        steps=None,
        val_steps=None,
        shuffle=False,
        seed=0,
        options={"backward_passes_per_step": 2},
        verbose=0,
    )
    seen: list[float] = []

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.append(float(optimizer.param_groups[0]["params"][0].grad))

    hook = register_optimizer_step_post_hook(note)
    try:
        train_rank(training)
    finally:
        hook.remove()
    assert seen == [0.5 + 2.5, 4.5 + 6.5, 8.5] * 2


@pytest.mark.parametrize(
    ("shape", "length", "row"),
    [
        (None, 3, None),
        ([3], 3, (3,)),
        ([-1, 3], 3, (3,)),  # the shape includes rows, as in Horovod
        ((-1, 1, 2, 3), 6, (1, 2, 3)),
        ([-1, -1, 3], 6, (2, 3)),
        ([2, -1], 6, (2, 3)),
        ([-1], 0, ()),
        ([], 0, ()),
        ([1], 0, (1,)),
        ([-1, 1], 0, (1,)),
        ([16, 3], 3, DataError),
        ([-1], 3, DataError),
        ([2], 3, DataError),
        ([-1, 2, -1], 3, DataError),
        ([0, -1], 3, DataError),
    ],
)
def test_a_shape_is_that_of_a_row_with_the_rows_or_without(shape, length, row):
    from engine.spark.training import row_shape

    if row is DataError:
        with pytest.raises(DataError, match=r"column 'x' has . values a row, which the shape \[.*\] does not take"):
            row_shape(shape, "x", length)
    else:
        assert row_shape(shape, "x", length) == row


@pytest.mark.sample(1)
@pytest.mark.parametrize("cache", [False, True])
def test_labels_get_the_shape_of_the_output_and_losses_see_it(spark, store, cache):
    """One output is a number per row, the other the scores of classes; training and validation treat them alike."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from engine.spark.backend import SparkBackend
    from engine.spark.torch import TorchEstimator

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number, self.scores, self.image = (torch.nn.Linear(2, size) for size in (1, 3, 4))

        def forward(self, x: Any) -> tuple[Any, Any, Any]:
            assert x.dim() == 2
            return self.number(x), self.scores(x), self.image(x).reshape(-1, 2, 2)

    def number(output: Any, label: Any) -> Any:
        assert output.shape == label.shape == (len(output), 1)
        return ((output[:, 0] - label[:, 0]) ** 2).mean()

    def scores(output: Any, label: Any) -> Any:
        assert output.shape == (len(label), 3) and label.dtype == torch.int64
        return torch.nn.functional.cross_entropy(output, label)

    def image(output: Any, label: Any) -> Any:
        assert output.shape == label.shape == (len(output), 2, 2)
        return ((output - label) ** 2).mean()

    rows = [(i / 32 - 1, float(i % 2), 3 * i / 32 - 4, i % 3, [float(i % 2)] * 4) for i in range(64)]
    data = frame(spark, rows, "a double, b double, y double, k int, v array<double>").selectExpr(
        "array(a, b) AS x", "y", "k", "v"
    )
    model = Model()
    trained = TorchEstimator(
        backend=SparkBackend(num_proc=2),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=[number, scores, image],
        loss_weights=[1.0, 0.0, 1.0],
        store=store,
        feature_cols=["x"],
        label_cols=["y", "k", "v"],
        input_shapes=[[-1, 2]],
        validation=0.2,
        batch_size=8,
        epochs=30,
        inmemory_cache_all=cache,
        verbose=0,
    ).fit(data)
    last = trained.getHistory()[-1]
    assert last["train"]["loss"] < 0.1 and last["validation"]["loss"] < 0.1
    found = trained.transform(data).collect()
    assert max(abs(row.y - row.y__output) for row in found) < 0.5
    assert all(len(row.k__output) == 3 and len(row.v__output) == 4 for row in found)


def test_an_estimator_has_ranks_or_a_backend(store):
    pytest.importorskip("torch", reason="needs torch")
    from engine.spark.backend import SparkBackend
    from engine.spark.torch import TorchEstimator

    model, optimizer = linear()
    both = TorchEstimator(
        model=model,
        optimizer=optimizer,
        loss=len,
        store=store,
        feature_cols=["x"],
        label_cols=["y"],
        num_proc=2,
        backend=SparkBackend(num_proc=2),
    )
    with pytest.raises(LaunchError, match="TorchEstimator has num_proc= and backend=: give one of them"):
        both.fit_on_parquet("data/a")
