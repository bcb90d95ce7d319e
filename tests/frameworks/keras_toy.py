"""A small model of Keras with data and comparisons, for tests of the Keras binding; imported only on ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import engine
import engine.keras

Array = Any
BACKEND = keras.backend.backend()
FEATURES = 6


def dense() -> list[Any]:
    """Return the layers of a small model."""
    return [keras.layers.Dense(8, activation="tanh", name="first"), keras.layers.Dense(2, name="second")]


def model(layers: Callable[[], Sequence[Any]] = dense, seed: int = 1) -> Any:
    """Return a small model with the layers of `layers`, which have fixed names; the seed determines its weights."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((FEATURES,)), *layers()], name="toy")


def whole(batches: int = 4, per_rank: int = 4) -> tuple[Array, Array]:
    """Return the data of all ranks: `batches` batches, each with `per_rank` samples of each rank."""
    random = np.random.default_rng(0)
    x = random.normal(size=(batches * per_rank * engine.size(), FEATURES)).astype(np.float32)
    return x, np.tanh(x[:, :2] * 2 + x[:, 2:4]).astype(np.float32)


def part(data: Array, per_rank: int = 4) -> Array:
    """Return this rank's samples, an equal share of each batch of `whole`."""
    rank, size = engine.rank(), engine.size()
    by_batch = data.reshape(-1, size, per_rank, *data.shape[1:])
    return by_batch[:, rank].reshape(-1, *data.shape[1:])


def fit(trained: Any, together: bool, epochs: int = 2, batches: int = 4, **settings: Any) -> Any:
    """Train a compiled model: `together` on this rank's share of each batch, otherwise on whole batches."""
    x, y = whole(batches)
    size = 4 * engine.size()
    if together:
        x, y, size = part(x), part(y), 4
    settings = {"verbose": 0, "shuffle": False, **settings}
    return trained.fit(x, y, batch_size=size, epochs=epochs, **settings)


def weights(trained: Any) -> list[Array]:
    """Return copies of a model's weights."""
    return [np.array(each) for each in trained.get_weights()]


def state(optimizer: Any) -> list[Array]:
    """Return copies of an optimizer's variables."""
    return [np.array(keras.ops.convert_to_numpy(each)) for each in optimizer.variables]


def check_same_everywhere(arrays: Sequence[Array]) -> None:
    """Check that every rank has these arrays, bit by bit."""
    engine.check_consistency({str(index): array for index, array in enumerate(arrays)})


def check_close(found: Sequence[Array], expected: Sequence[Array], tolerance: float = 1e-5) -> None:
    """Check that the arrays are equal up to rounding."""
    assert len(found) == len(expected)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape, (index, a.shape, b.shape)
        worst = np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0)
        assert worst <= tolerance, f"array {index} differs by {worst}"


def compare_training(make: Callable[[], Any], tolerance: float = 1e-5, **settings: Any) -> tuple[Any, Any]:
    """Return equal models, trained by a wrapped optimizer of `make` on all ranks and a plain one on whole batches."""
    compiled = settings.pop("compile", {})
    trained, alone = model(), model()
    alone.compile(make(), loss="mse", **compiled)
    fit(alone, together=False, **settings)
    trained.compile(engine.keras.DistributedOptimizer(make()), loss="mse", **compiled)
    fit(trained, together=True, **settings)
    check_same_everywhere(weights(trained))
    check_close(weights(trained), weights(alone), tolerance)
    assert max(np.abs(a - b).max() for a, b in zip(weights(trained), weights(model()), strict=True)) > 1e-4
    return trained, alone


class Steps:
    """Steps of an optimizer on its own variables, with given gradients."""

    def __init__(self, optimizer: Any, shapes: Sequence[tuple[int, ...]] = ((3, 4), (4,))) -> None:
        random = np.random.default_rng(5)
        self.optimizer = optimizer
        self.variables = [
            keras.Variable(random.normal(size=shape).astype(np.float32), name=f"v{index}")
            for index, shape in enumerate(shapes)
        ]
        optimizer.build(self.variables)
        self._step: Any = None

    def apply(self, gradients: Sequence[Array]) -> None:
        """Make a step as a custom training loop does."""
        self.optimizer.apply([tensor(each) for each in gradients], self.variables)

    def stateless(self, gradients: Sequence[Array]) -> None:
        """Make a step as a compiled program of JAX does."""
        import jax

        if self._step is None:
            self._step = jax.jit(self.optimizer.stateless_apply)
        values, after = self._step(
            [each.value for each in self.optimizer.variables],
            [tensor(each) for each in gradients],
            [each.value for each in self.variables],
        )
        for variable, value in zip([*self.variables, *self.optimizer.variables], [*values, *after], strict=True):
            variable.assign(value)

    def values(self) -> list[Array]:
        """Return copies of the variables."""
        return [np.array(keras.ops.convert_to_numpy(each)) for each in self.variables]


def tensor(array: Array) -> Any:
    """Return a tensor of the backend, with its own memory."""
    return keras.ops.convert_to_tensor(np.array(array))


def gradients_of(rank: int, step: int, shapes: Sequence[tuple[int, ...]] = ((3, 4), (4,))) -> list[Array]:
    """Return a rank's gradients in a step."""
    random = np.random.default_rng([rank, step])
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def mean_gradients(step: int) -> list[Array]:
    """Return the average of all ranks' gradients, added in the order of ranks."""
    by_rank = [gradients_of(rank, step) for rank in range(engine.size())]
    return [np.sum(each, axis=0, dtype=np.float32) / np.float32(engine.size()) for each in zip(*by_rank, strict=True)]
