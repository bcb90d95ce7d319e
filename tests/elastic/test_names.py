"""A rank with a compiled step works in the next world with a rank that compiles it there for the first time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import engine
from engine.frameworks import agreement

from ..on_ranks import Ranks, on_ranks

BACKENDS = "tensorflow", "jax", "torch"

pytestmark = [
    pytest.mark.slow,
    on_ranks(*(Ranks(2, name, (("KERAS_BACKEND", name),)) for name in BACKENDS), world=None),
]


def made() -> tuple[Any, Any]:
    import keras

    import engine.keras
    from engine.keras.elastic import KerasState

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="layer")])
    model.compile(engine.keras.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    return model, KerasState(model)


def test_a_newcomer_that_compiles_its_step_goes_with_a_survivor_that_does_not() -> None:
    """A world that ends and one that begins in the same process stand for a reset; rank 1 is the newcomer."""
    import keras

    from engine.keras import wrapping

    x = np.ones((4, 3), np.float32)
    compares = agreement.compares_gradients
    wrapping.compares_gradients = agreement.compares_gradients = lambda: False  # as in an elastic job
    try:
        engine.init()
        model, state = made()
        newcomer = engine.rank() == 1
        for second in (False, True):
            if second:
                engine.shutdown()
                if newcomer:
                    engine.global_process_set.numbers.counts.clear()  # as in a new process
                    model, state = made()
                engine.init()
            state.sync()
            model.fit(x, x[:, :2] * engine.rank(), batch_size=2, verbose=0)
            state.commit()
        assert state.committed == 2
        weights = [np.asarray(keras.ops.convert_to_numpy(each.value)) for each in model.weights]
        engine.check_consistency({str(number): each for number, each in enumerate(weights)})
    finally:
        wrapping.compares_gradients = agreement.compares_gradients = compares
