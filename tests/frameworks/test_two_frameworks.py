"""Two frameworks in one process: imported in any order, with operations of both in flight."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from .backends import on_backends

IMPORTS = """
import sys
from importlib import import_module
import numpy as np
import engine
engine.init()
for name in sys.argv[1:]:
    import_module(name)
    import_module(f"engine.{name}")
for name in sys.argv[1:]:
    hvd = import_module(f"engine.{name}")
    one = {"torch": lambda: import_module("torch").ones(2), "tensorflow": lambda: import_module("tensorflow").ones(2),
           "jax": lambda: import_module("jax").numpy.ones(2)}[name]()
    result = hvd.allreduce(one, op=hvd.Sum, name=name)
    assert type(result) is type(one) and np.asarray(result).tolist() == [1, 1], result
print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["torch tensorflow jax", "jax tensorflow torch"])
def test_bindings_work_beside_each_other_in_any_order(order: str) -> None:
    """Their libraries have runtimes of their own, whose symbols and threads must not clash."""
    for name in order.split():
        pytest.importorskip(name, reason=f"needs {name}")
    done = subprocess.run([sys.executable, "-c", IMPORTS, *order.split()], capture_output=True, text=True, timeout=110)
    assert done.stdout == "fine\n", done.stderr[-3000:]


@pytest.mark.slow
@on_backends(2, backends=("tensorflow",))
def test_optimizers_of_two_frameworks_take_no_name_of_each_other(rank: int, size: int) -> None:
    """Both have gradients in flight in one step; their parameters have equal names and different shapes."""
    import keras
    import torch

    import engine.keras
    import engine.torch

    weight = torch.nn.Parameter(torch.zeros(3))
    first = engine.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    variable = keras.Variable(np.zeros((2, 2), "float32"), name="weight")
    second = engine.DistributedOptimizer(keras.optimizers.SGD(1.0))
    third = engine.DistributedOptimizer(keras.optimizers.SGD(1.0))
    other = keras.Variable(np.zeros(5, "float32"), name="weight")
    for step in range(3):
        weight.grad = None
        (weight.sum() * (rank + 1) * step).backward()
        second.apply([keras.ops.ones((2, 2)) * (rank + 1) * step], [variable])
        third.apply([keras.ops.ones((5,)) * rank], [other])
        first.step()
    mean = sum(range(3)) * (size + 1) / 2
    assert weight.tolist() == [-mean] * 3
    assert variable.numpy().tolist() == [[-mean] * 2] * 2
    assert other.numpy().tolist() == [-3 * (size - 1) / 2] * 5
    prefixes = {each._engine.prefix for each in (first,)} | {each._engine._prefix for each in (second, third)}
    assert len(prefixes) == 3
