"""`docs/reference/frameworks.md` against the code: names and options are there or not, as it says."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.errors import EngineError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "frameworks.md"
PACKAGES = {"PyTorch": "torch", "TensorFlow": "tensorflow", "Keras": "keras", "JAX": "jax"}  # tests/mxnet has MXNet


def table(title: str) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Return the frameworks of one section's table, and each row's texts by framework."""
    (section,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith(f"{title}\n")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    frameworks = rows[0][1:]
    return frameworks, {row[0]: dict(zip(frameworks, row[1:], strict=True)) for row in rows[2:]}


def claims(title: str, framework: str) -> dict[str, str]:
    """Return one section's claims about a framework, by name."""
    frameworks, rows = table(title)
    assert framework in frameworks
    return {name: said[framework] for row, said in rows.items() for name in re.findall(r"`([^`]+)`", row) or [row]}


def names_that_are_told_wrongly(framework: str, package: str) -> list[str]:
    """Return names that exist against the page, or are missing against it."""
    binding = importlib.import_module(f"engine.{package}")
    said = claims("Names", framework)
    assert len(said) > 30 and set(said.values()) == {"yes", "no"}
    return [name for name, there in said.items() if hasattr(binding, name) != (there == "yes")]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Start a world of one rank."""
    engine.init()
    yield
    engine.shutdown()


@pytest.fixture(params=[name for name in PACKAGES if name in table("Names")[0]])
def framework(request: pytest.FixtureRequest) -> str:
    """Each framework that is installed."""
    name = str(request.param)
    pytest.importorskip(PACKAGES[name], reason=f"needs {name}")
    return name


def test_names_are_there_or_not_as_the_table_says(framework: str) -> None:
    assert names_that_are_told_wrongly(framework, PACKAGES[framework]) == []


def optimizer_of(framework: str) -> Any:
    """Return a plain optimizer."""
    if framework == "PyTorch":
        import torch

        return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    if framework == "TensorFlow":
        import tensorflow as tf

        return tf.compat.v1.train.GradientDescentOptimizer(0.1)
    if framework == "Keras":
        import keras

        return keras.optimizers.SGD(0.1)
    import optax

    return optax.sgd(0.1)


def test_the_dispatcher_finds_the_binding_and_options_are_taken_or_refused(framework: str) -> None:
    """Refusals say what to do instead, or what is possible."""
    wrap = engine.DistributedOptimizer
    parameters = inspect.signature(
        importlib.import_module(f"engine.{PACKAGES[framework]}").DistributedOptimizer
    ).parameters
    # JAX's options are those of `distributed`.
    known = {*parameters, *("compression", "op", "gradient_predivide_factor", "process_set")}
    if framework == "JAX":
        known |= {*inspect.signature(importlib.import_module("engine.jax").distributed).parameters}

    def twice() -> Any:
        return wrap(wrap(optimizer_of(framework)))

    made: dict[str, Callable[[], Any]] = {
        "compression=Compression.fp16": lambda: wrap(optimizer_of(framework), compression=engine.Compression.fp16),
        "op=Sum": lambda: wrap(optimizer_of(framework), op=engine.Sum),
        "op=Adasum": lambda: wrap(optimizer_of(framework), op=engine.Adasum),
        "compression=PowerSGD()": lambda: wrap(optimizer_of(framework), compression=scheme()),
        "an optimizer that is wrapped already": twice,
    }
    for option, said in claims("Options of `DistributedOptimizer`", framework).items():
        if said == "refused":
            with pytest.raises((EngineError, TypeError, ValueError), match=r"(use|unwrap|goes with|give|wrap) "):
                made[option]()
        elif option in made:
            assert said == "yes", option
            assert made[option]() is not None
        else:
            assert (option in known) == (said == "yes"), option


def scheme() -> engine.Scheme:
    """A scheme like `engine.torch.PowerSGD`."""
    pytest.importorskip("torch", reason="needs torch")
    power_sgd: Callable[[], engine.Scheme] = importlib.import_module("engine.torch").PowerSGD
    return power_sgd()


def test_the_table_tells_of_every_framework() -> None:
    for title in ("Names", "Options of `DistributedOptimizer`"):
        frameworks, rows = table(title)
        assert {*PACKAGES, "MXNet"} >= {*frameworks} >= {"PyTorch", "TensorFlow", "Keras", "MXNet"}
        assert all(set(said.values()) <= {"yes", "no", "refused"} for said in rows.values())
