"""Program that an earlier revision runs: it writes what later versions have to load, and what they then have to find.

    python writer.py tuner|states|spark DIRECTORY

It imports names that the oldest revision has. `tuner` and `states` run on two ranks.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

LENGTH, BATCH, STEPS, REST = 46, 3, 3, 3


def write_tuner_result(folder: Path) -> None:
    """Search to the end, with a step that long cycles make slow. The tuner keeps its result in the user's cache."""
    import numpy as np

    import engine

    engine.init()
    tensors = {f"part{k}": np.ones(length, np.float32) for k, length in enumerate((3, 1000, 40_000))}
    over, end = np.zeros(1, np.float32), time.monotonic() + 120.0
    cache = folder / "cache"
    while not over[0]:
        handles = [engine.allreduce_async(each, name=name) for name, each in tensors.items()]
        for handle in handles:
            engine.synchronize(handle)
        late = time.monotonic() + 0.02 * (engine.knobs()["cycle_time_ms"] > 2.0)
        while time.monotonic() < late:
            pass
        found = engine.rank() == 0 and (any(cache.rglob("*.json")) or time.monotonic() > end)
        over = engine.allreduce(np.full(1, found, np.float32), name="over", op=engine.Max)
    engine.shutdown()


def make_training() -> tuple[Any, Any, Any, Any]:
    """Return a model, its distributed optimizer, a data set and its sampler, as both versions make them."""
    import torch

    import engine
    import engine.torch
    from engine.elastic import ElasticSampler

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheme = engine.torch.PowerSGD(rank=2, start_iter=1)
    optimizer = engine.DistributedOptimizer(plain, model.named_parameters(), compression=scheme)
    data = torch.randn(LENGTH, 8, generator=torch.Generator().manual_seed(6))
    return model, (optimizer, scheme), data, ElasticSampler(range(LENGTH), seed=9)


def train_steps(model: Any, optimizer: Any, data: Any, sampler: Any, steps: int) -> list[float]:
    """Train for some steps, and return the sum of the weights after each."""
    import torch

    batches = torch.utils.data.DataLoader(range(len(data)), batch_size=BATCH, sampler=sampler)
    sums = []
    for number, batch in zip(range(steps), batches, strict=False):
        optimizer.zero_grad()
        model(data[batch]).square().mean().backward()
        optimizer.step()
        sampler.record_batch(number, BATCH)
        sums.append(float(sum(each.detach().double().sum() for each in model.parameters())))
    return sums


def write_states(folder: Path) -> None:
    """Train some steps, write what a program would write into a checkpoint, and train on."""
    import torch

    import engine
    from engine.elastic import ElasticBatchSampler, ObjectState

    engine.init()
    model, (optimizer, scheme), data, sampler = make_training()
    state = ObjectState(sampler=sampler, epoch=4)
    before = train_steps(model, optimizer, data, sampler, STEPS)
    batches = ElasticBatchSampler(range(LENGTH), 6, seed=9)
    batches.record_batch(0)
    state.progress.epoch, state.progress.done = 4, sampler.done
    scheme_state, optimizer_state = scheme.state_dict(), optimizer.state_dict()
    kept = {
        "model": {name: value.clone() for name, value in model.state_dict().items()}, "epoch": state.epoch,
        "optimizer": optimizer_state, "scheme": scheme_state, "sampler": sampler.state_dict(),
        "batch_sampler": batches.state_dict(), "progress": state.progress,
    }  # fmt: skip
    if engine.rank() == 0:
        torch.save(kept, folder / "states.pt")
    sampler.load_state_dict(sampler.state_dict())
    rest = engine.allgather_object(list(sampler))
    # Error feedback belongs to a rank and is in no checkpoint, so a training that goes on from one lacks it.
    scheme.load_state_dict({"calls": {}, "factors": {}})
    scheme.load_state_dict(scheme_state)
    after = train_steps(model, optimizer, data, sampler, REST)
    if engine.rank() == 0:
        (folder / "states.json").write_text(json.dumps({"rest": rest, "before": before, "after": after}))
    engine.shutdown()


def write_stages(folder: Path) -> None:
    """Train with both estimators in Spark, and save estimators and models."""
    import keras
    import torch
    from pyspark.sql import SparkSession

    import engine
    from engine.spark.keras import KerasEstimator
    from engine.spark.store import Store
    from engine.spark.torch import TorchEstimator

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    draw = random.Random(3)
    rows = [([a, b], 2 * a - 3 * b + 1) for a, b in ((draw.random(), draw.random()) for _ in range(64))]
    frame = spark.createDataFrame(rows, "x array<double>, y double").repartition(2)
    store = Store.create(str(folder / "store"))
    common = {"store": store, "num_proc": 2, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "epochs": 2,
              "gradient_compression": engine.Compression.fp16, "verbose": 0}  # fmt: skip
    torch.manual_seed(1)
    keras.utils.set_random_seed(1)
    plain = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    estimators = {
        "torch": TorchEstimator(
            model=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1), loss=torch.nn.functional.mse_loss,
            run_id="earlier-torch", **common,
        ),
        "keras": KerasEstimator(
            model=keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), optimizer="sgd", loss="mse",
            run_id="earlier-keras", **common,
        ),
    }  # fmt: skip
    points = spark.createDataFrame([([each / 4, 1 - each / 2],) for each in range(4)], "x array<double>").coalesce(1)
    expected: dict[str, Any] = {"points": [row.x for row in points.collect()]}
    for name, estimator in estimators.items():
        estimator.write().save(str(folder / "stages" / f"{name}-estimator"))
        model = estimator.fit(frame)
        model.write().save(str(folder / "stages" / f"{name}-model"))
        output = [row.y__output for row in model.transform(points).collect()]
        expected[name] = {"output": output, "history": model.getHistory()}
    (folder / "spark.json").write_text(json.dumps(expected))
    spark.stop()


if __name__ == "__main__":
    WRITERS = {"tuner": write_tuner_result, "states": write_states, "spark": write_stages}
    WRITERS[sys.argv[1]](Path(sys.argv[2]))
