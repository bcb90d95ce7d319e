"""Programs of ranks that fail, leave or disagree in the middle of `fit`; imported by every rank."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import engine
import engine.keras

BATCHES = 400
AT = 3  # number of the first epoch's batch after which something happens


class After(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that calls a function on rank 1 after so many batches."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == AT:
            Path(f"fits.{engine.rank()}").touch()
            if engine.rank() == 1:
                self.what(self)


def model() -> Any:
    """Return a small model with a wrapped optimizer."""
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="layer")])
    made.compile(engine.keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    return made


def fit(trained: Any, what: Any) -> tuple[str, float]:
    """Return class and text of the error of `fit` on this rank, and its seconds after the event on rank 1."""
    x = np.ones((2 * BATCHES, 4), np.float32)
    engine.barrier("begin")
    try:
        trained.fit(x, x[:, :2], batch_size=2, verbose=0, shuffle=False, callbacks=[After(what)])
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - float(Path("event").read_text())
    return "", 0.0


def event() -> None:
    """Record the time of an event, by the monotonic clock that all processes share."""
    Path("event.part").write_text(str(time.monotonic()))
    Path("event.part").rename("event")


def stop(callback: Any) -> None:
    """End this rank's `fit`."""
    callback.model.stop_training = True


def disagree(callback: Any) -> None:
    """Submit another operation under the gradients' name, which all ranks then refuse; end this rank's `fit`."""
    prefix = f"{callback.model.optimizer._engine._prefix}."
    known = engine.session.runtime.current_engine().definitions()
    [name] = [each["name"] for each in known if re.search(rf"{re.escape(prefix)}.*(kernel|bias)", each["name"])]
    event()
    try:
        engine.allreduce(np.ones(3), name=name)
    except engine.errors.MismatchError:
        stop(callback)


def renew() -> Any:
    """Start a new world, and return a model in it."""
    engine.shutdown()
    engine.init()
    return model()


def failures() -> Any:
    """Return what rank 0 sees when rank 1 disagrees, leaves, aborts and dies, each in the middle of `fit`.

    Before that the test interrupts rank 1.
    """
    found = {}
    engine.init()
    interrupted()
    trained = renew()
    found["mismatch"] = fit(trained, disagree)
    if keras.backend.backend() == "jax":
        trained = model()  # the failed program had been donated the variables' memory
    x = np.ones((4, 4), np.float32)
    found["goes on"] = trained.fit(x, x[:, :2], batch_size=2, verbose=0).history["loss"]
    if engine.rank() == 1:
        fit(trained, lambda callback: (event(), stop(callback)))
        engine.shutdown()
    else:
        found["left"] = fit(trained, None)
    trained = renew()
    found["aborted"] = fit(trained, lambda _: (event(), engine.abort("enough of it")))
    trained = renew()
    found["died"] = fit(trained, lambda _: (event(), os.kill(os.getpid(), signal.SIGKILL)))
    return found


class Begun(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that makes a file when `fit` has done some batches."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == AT:
            Path(f"begun.{engine.rank()}").touch()


def fit_for_ever() -> None:
    """Train until something ends it; a file says when it has begun."""
    x = np.ones((2 * BATCHES, 4), np.float32)
    model().fit(x, x[:, :2], batch_size=2, epochs=10**6, verbose=0, callbacks=[Begun()])


def interrupted() -> None:
    """Train until the test interrupts rank 1, and return the error here and on rank 0."""
    rank = engine.rank()
    try:
        fit_for_ever()
    except KeyboardInterrupt:
        Path(f"interrupted.{rank}").touch()
    except Exception as error:
        told = Path(f"told.{rank}")
        told.with_suffix(".part").write_text(str(error))
        told.with_suffix(".part").rename(told)


def interrupted_together() -> None:
    """Train until the test interrupts the whole job."""
    engine.init()
    try:
        fit_for_ever()
    except KeyboardInterrupt:
        Path(f"interrupted.{engine.rank()}").touch()
        raise
