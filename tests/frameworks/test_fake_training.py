"""Training with the fake framework."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import engine

from ..on_ranks import on_ranks, spare
from . import fake_framework as fake

pytestmark = on_ranks(spare(1), 2, spare(3))

NO_COUNTS = 2.5, float("nan"), float("inf"), "2", None


def batches(steps: int = 5) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return inputs and wanted outputs of all ranks, by step."""
    for step in range(steps):
        numbers = np.random.default_rng(step)
        inputs = numbers.standard_normal((12, 3))
        yield inputs, np.sin(inputs[:, :2])


def gradients_of(model: dict[str, fake.Parameter], inputs: np.ndarray, wanted: np.ndarray) -> Any:
    """Return the gradients of a linear model's mean square error."""
    error = 2 * (inputs @ model["weight"] + model["bias"] - wanted) / len(inputs)
    return [
        (model["weight"], np.asarray(inputs.T @ error) + 0.0),
        (model["bias"], np.asarray(error.sum(axis=0)) + 0.0),
    ]


def model_of(seed: int = 0) -> dict[str, fake.Parameter]:
    """Return the parameters by name."""
    numbers = np.random.default_rng(seed)
    return {"weight": fake.Parameter(numbers.standard_normal((3, 2))), "bias": fake.Parameter(np.zeros(2))}


def trained(model: dict[str, fake.Parameter], optimizer: Any, first: int, stride: int) -> dict[str, np.ndarray]:
    """Return the parameters after some steps on every `stride`-th sample."""
    for inputs, wanted in batches():
        optimizer.zero_grad()
        fake.backward(gradients_of(model, inputs[first::stride], wanted[first::stride]))
        optimizer.step()
    return {name: np.asarray(each) for name, each in model.items()}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Check equality up to rounding."""
    for name, each in found.items():
        np.testing.assert_allclose(each, expected[name], rtol=1e-12, atol=1e-13)


def alone() -> dict[str, np.ndarray]:
    """Return the parameters that one process makes of all samples."""
    model = model_of()
    return trained(model, fake.SGD(model.values(), lr=0.1), 0, 1)


def test_trains_as_one_process() -> None:
    """Each rank has its share of the samples, and a different model before the broadcast."""
    model = model_of(seed=engine.rank())
    for name, each in model.items():
        fake.broadcast_(each, 0, name)
    optimizer = fake.DistributedOptimizer(fake.SGD(model.values(), lr=0.1), model.items())
    same(trained(model, optimizer, engine.rank(), engine.size()), alone())
    engine.check_consistency({name: np.asarray(each) for name, each in model.items()})
    assert type(optimizer.unwrap()) is fake.SGD


def test_accumulates_passes() -> None:
    """There are two passes before a reduction, a last pass that is left over, and passes in `no_sync`."""
    model = model_of()
    optimizer = fake.DistributedOptimizer(fake.SGD(model.values(), lr=0.1), backward_passes_per_step=2)
    for inputs, wanted in batches():
        mine = slice(engine.rank(), None, engine.size())
        for part in (inputs[mine][:3], wanted[mine][:3]), (inputs[mine][3:], wanted[mine][3:]):
            fake.backward([(each, gradient / 2) for each, gradient in gradients_of(model, *part)])
        optimizer.step()
        optimizer.zero_grad()
    if engine.size() == 2:  # halves have equal sizes, so the mean of means is the mean
        same({name: np.asarray(each) for name, each in model.items()}, alone())


def test_gets_the_gradients_of_others() -> None:
    """A rank without a gradient gets the average of the existing ones, also with a scheme in Python."""
    for compression in (engine.Compression.none, engine.Compression.fp16, Doubled()):
        model = model_of()
        optimizer = fake.DistributedOptimizer(fake.SGD(model.values(), lr=0.1), compression=compression)
        fake.backward([(model["weight"], np.full((3, 2), 12.0))] if engine.rank() == 0 else [])
        optimizer.synchronize()
        assert model["weight"].grad is not None and (model["weight"].grad == 12.0 / engine.size()).all()
        assert model["bias"].grad is None
        optimizer.unwrap()


class Doubled(engine.Compressor):
    """A compressor of the program's own."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        return tensor * 2, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor / 2


def test_is_refused_what_is_wrong() -> None:
    """The checks of the framework-neutral half raise the same errors as for torch."""
    model = model_of()
    optimizer = fake.SGD(model.values(), lr=0.1)
    for kind, words, options in (
        (ValueError, "backward_passes_per_step is 1 or more", {"backward_passes_per_step": 0}),
        *((ValueError, "passes_per_step is a whole number", {"backward_passes_per_step": n}) for n in NO_COUNTS),
        *((ValueError, "num_groups is a whole number", {"num_groups": n}) for n in NO_COUNTS),
        (ValueError, "prescale_factor is nan; expected a fin", {"op": engine.Sum, "prescale_factor": float("nan")}),
        (ValueError, "postscale_factor is inf; expected a fin", {"op": engine.Sum, "postscale_factor": float("inf")}),
        (ValueError, "has no name for parameter 1", {"named_parameters": [("weight", model["weight"])]}),
        (TypeError, "compression is Compression.none", {"compression": 3}),
        (engine.errors.MismatchError, "different options", {"op": engine.Sum if engine.rank() else engine.Average}),
    ):
        if engine.size() == 1 and kind is engine.errors.MismatchError:
            continue
        refused(kind, words, lambda options=options: fake.DistributedOptimizer(optimizer, **options))
    wrapped = fake.DistributedOptimizer(optimizer, op=engine.Sum)
    refused(ValueError, "is wrapped in DistributedOptimizer already", lambda: fake.DistributedOptimizer(wrapped))
    fake.backward([(model["bias"], np.ones(2))])
    refused(
        engine.errors.EngineError,
        "was reduced already since the last step",
        lambda: fake.backward([(model["bias"], np.ones(2))]),
    )
    optimizer.zero_grad()
    optimizer.unwrap()
    refused(TypeError, "expected a numpy.ndarray, not list", lambda: fake.allreduce([1.0]))


def refused(kind: type[Exception], words: str, call: Any) -> None:
    """Check that a call raises such an error."""
    try:
        call()
    except kind as error:
        if words not in str(error):
            raise
    else:
        raise AssertionError(f"did not raise {kind}: {words}")
