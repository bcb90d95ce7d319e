"""Rank that trains a model of Keras in several ways, a block of steps at a time. Started by `.run`.

With `--strategy` it is a worker of TensorFlow's MultiWorkerMirroredStrategy, without the engine. `fit` of Keras 3 does
not support that, so it is compared in a loop of a `tf.function`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import time
import zlib
from collections.abc import Callable
from typing import Any

from benchmarks.common.worker import GroupWorker

MODELS = {"large": (1024, (2048, 2048, 1792), 128), "small": (64, (64, 64), 32)}
"""Features of a sample, units of the hidden layers, and samples of a batch. `large` has 10 million parameters."""
CLASSES = 10

Step = Callable[[int], list[float]]
"""Callable that takes a number of steps, and returns the times at which they ended."""


class FitRank:
    """Handlers of the requests to a rank."""

    def __init__(self, worker: GroupWorker, strategy: Any) -> None:
        import keras

        self._worker, self._strategy, self._keras = worker, strategy, keras
        self._models: dict[str, Any] = {}
        self._steps: dict[str, Step] = {}

    def build_variant(self, request: dict[str, Any]) -> dict[str, int]:
        """Create one variant of a model, and take its first steps; return the number and the bytes of its parameters.

        Variants are `fit`, `fit_floor`, `loop`, `loop_floor`, `loop_strategy` and `bare`. Those that end with `floor`
        train without communication. `bare` is the collective on arrays as large as the parameters, without a model.
        """
        variant, features = request["variant"], MODELS[request["model"]][0]
        scope = self._strategy.scope() if variant == "loop_strategy" else None
        if scope is None:
            model, optimizer = self._build_model(request["model"])
        else:
            with scope:
                model, optimizer = self._build_model(request["model"])
        if variant in ("fit", "loop"):
            optimizer = importlib.import_module("engine.keras").DistributedOptimizer(optimizer)
        makers = {"fit": self._prepare_fit, "loop": self._prepare_loop, "bare": self._prepare_bare}
        self._models[variant] = model
        self._steps[variant] = makers[variant.partition("_")[0]](model, optimizer, features, variant)
        self._worker.meet()
        self._steps[variant](2)
        weights = model.get_weights()
        return {"tensors": len(weights), "bytes": sum(each.nbytes for each in weights)}

    def time_block(self, request: dict[str, Any]) -> list[float]:
        """Meet the other ranks once, take untimed and timed steps, and return the seconds of the timed ones."""
        self._worker.meet()
        marks = self._steps[request["variant"]](request["warmup"] + request["steps"])
        return [after - before for before, after in itertools.pairwise(marks[request["warmup"] - 1 :])]

    def compute_digest(self, request: dict[str, Any]) -> int:
        """Return a checksum of the parameters of a variant."""
        value = 0
        for each in self._models[request["variant"]].get_weights():
            value = zlib.crc32(each.tobytes(), value)
        return value

    def _build_model(self, name: str) -> tuple[Any, Any]:
        keras = self._keras
        features, units, self._batch = MODELS[name]
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(each, activation="relu") for each in units]
        model = keras.Sequential([keras.Input((features,)), *layers, keras.layers.Dense(CLASSES)])
        optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def _draw_samples(self, features: int, batches: int) -> tuple[Any, Any]:
        """Return samples of this rank."""
        import numpy as np

        random = np.random.default_rng(self._worker.rank)
        x = random.normal(size=(batches * self._batch, features)).astype(np.float32)
        return x, random.integers(CLASSES, size=len(x)).astype(np.int32)

    def _prepare_fit(self, model: Any, optimizer: Any, features: int, variant: str) -> Step:
        loss = self._keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss, jit_compile="auto" if self._keras.backend.backend() == "jax" else False)
        x, y = self._draw_samples(features, 32)

        class Marks(self._keras.callbacks.Callback):  # type: ignore[name-defined]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                done.append(time.perf_counter())

        done: list[float] = []

        def take_steps(steps: int) -> list[float]:
            done.clear()
            rows = steps * self._batch
            model.fit(x[:rows], y[:rows], batch_size=self._batch, shuffle=False, verbose=0, callbacks=[Marks()])
            return list(done)

        return take_steps

    def _prepare_loop(self, model: Any, optimizer: Any, features: int, variant: str) -> Step:
        """Return steps in a `tf.function` with Keras' own optimizer, which adds up gradients if there is a strategy."""
        import tensorflow as tf

        loss_of = self._keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        shares = self._worker.ranks if variant == "loop_strategy" else 1
        x, y = map(tf.constant, self._draw_samples(features, 1))

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True)) / shares
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        if variant == "loop_strategy":
            program = tf.function(lambda x, y: self._strategy.run(step, (x, y)))
        else:
            program = tf.function(step)

        return _repeat_step(lambda: program(x, y))

    def _prepare_bare(self, model: Any, optimizer: Any, features: int, variant: str) -> Step:
        engine = importlib.import_module("engine")
        arrays = [each.copy() for each in model.get_weights()]
        return _repeat_step(lambda: engine.grouped_allreduce_(arrays, op=engine.Average, name="bare"))


def _repeat_step(step: Callable[[], Any]) -> Step:
    """Return steps that call `step` in a loop."""

    def take_steps(steps: int) -> list[float]:
        done = []
        for _ in range(steps):
            step()
            done.append(time.perf_counter())
        return done

    return take_steps


def _join_strategy(worker: GroupWorker) -> Any:
    """Join the other workers."""
    workers = [f"127.0.0.1:{port}" for port in worker.options.strategy.split(",")]
    task = {"type": "worker", "index": worker.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def main() -> None:
    """Join the other ranks and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="", metavar="PORTS", help="of all workers, with commas between them")
    worker = GroupWorker(parser)
    strategy = None
    try:
        if worker.options.strategy:
            strategy = _join_strategy(worker)
        else:
            importlib.import_module("engine").init()
        if os.environ["KERAS_BACKEND"] == "torch":
            importlib.import_module("torch").set_num_threads(1)
        rank = FitRank(worker, strategy)
    except BaseException:
        worker.report_failure()
        raise
    worker.serve({"build": rank.build_variant, "block": rank.time_block, "digest": rank.compute_digest})
    if strategy is None:
        importlib.import_module("engine").shutdown()


if __name__ == "__main__":
    main()
