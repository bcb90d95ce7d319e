"""Steps of `fit` that fail between commits, for `tests/elastic/test_framework_states.py`; prints its results."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import engine
from engine.keras import elastic

FAILS = 5  # number of the batch after which a step fails


class StepError(Exception):
    """Ends a `fit`, like a failed collective."""


class Fail(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the first epoch, and deletes the arrays that a compiled step has consumed."""

    failed = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == FAILS and not self.failed:
            self.failed = True
            for array in (each for part in (self._model._jax_state or {}).values() for each in part or ()):
                array.delete()
            raise StepError


def main() -> None:
    engine.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
    model.compile("adam", loss="mse", metrics=["mae"])
    state: Any = elastic.KerasState(model, epoch=0, batch=0)
    state.sync()
    rows = np.ones((40, 4), np.float32)
    fail = Fail()
    while state.epoch < 2:
        callbacks = [
            fail,
            elastic.CommitStateCallback(state, batches_per_commit=2),
            elastic.UpdateBatchStateCallback(state),
            elastic.UpdateEpochStateCallback(state),
        ]
        left = rows[state.batch * 4 :]
        span = {"initial_epoch": state.epoch, "epochs": state.epoch + 1}
        try:
            model.fit(left, left[:, :1], batch_size=4, shuffle=False, verbose=0, callbacks=callbacks, **span)
        except StepError:
            state.restore()
            assert state.batch == 4 and int(state.optimizer.iterations) == 4, "it is where the commit was"
    print(keras.backend.backend(), fail.failed, state.epoch, int(state.optimizer.iterations))


if __name__ == "__main__":
    main()
