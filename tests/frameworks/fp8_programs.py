"""Programs of ranks on pretended hosts whose gradients travel with `Compression.fp8`, one for each binding.

Ranks are dealt round two hosts (tests/pretended_hosts.py). What each program returns is compared between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import engine

from ..block_reference import blocks_of_ranks

HOSTS = 2
SHAPES = {"weight": (70, 31), "bias": (5,), "large": (90, 401)}


def values(name: str, rank: int, dtype: str = "float32") -> Any:
    """Gradient of a rank, which every rank can compute."""
    rng = np.random.default_rng([rank, *name.encode()])
    sizes = np.exp2(rng.integers(-10, 10, SHAPES[name]))
    return (rng.standard_normal(SHAPES[name]) * sizes).astype(dtype)


def expected(name: str, dtype: str = "float32", absent: tuple[int, ...] = ()) -> Any:
    """Average that all ranks have to get."""
    size = engine.size()
    hosts = [rank % HOSTS for rank in range(size)]
    return blocks_of_ranks([None if rank in absent else values(name, rank, dtype) for rank in range(size)], hosts, True)


def check(found: dict[str, Any], **options: Any) -> list[str]:
    """Raise unless gradients have the formula's bits; return how the entries travelled."""
    for name, each in found.items():
        want = expected(name, **options)
        assert np.asarray(each).dtype == want.dtype
        # A step from zero loses the sign of zeros.
        assert (np.asarray(each) == want).all(), f"{name} has other values than the formula's"
    rows = engine.session.runtime.current_engine().history()
    return sorted({row["compression"] for row in rows if row["type"] == "batch" and row["kind"] == "allreduce"})


def reduce_torch() -> list[str]:
    import torch

    import engine.torch as hvd

    hvd.init()
    rank = hvd.rank()
    made = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(made.values(), lr=0.0), made.items(), compression=hvd.Compression.fp8
    )
    for lacking in ((), ("large",)):
        optimizer.zero_grad(set_to_none=True)
        mine = {name: each for name, each in made.items() if name not in lacking or rank % HOSTS == 0}
        sum((each * torch.from_numpy(values(name, rank))).sum() for name, each in mine.items()).backward()
        found = {name: made[name].grad.numpy().copy() for name in SHAPES if name not in lacking}
        travelled = check(found)
        if lacking:  # a whole host has no gradient: the average divides by all
            absent = tuple(range(1, hvd.size(), HOSTS))
            check({"large": made["large"].grad.numpy().copy()}, absent=absent)
        optimizer.step()
    return travelled


def reduce_grouped_torch() -> list[str]:
    import torch

    import engine.torch as hvd

    hvd.init()
    tensors = [torch.from_numpy(values(name, hvd.rank())) for name in SHAPES]
    outputs = hvd.grouped_allreduce(tensors, op=hvd.Average, compression=hvd.Compression.fp8)
    return check(dict(zip(SHAPES, (each.numpy() for each in outputs), strict=True)))


def reduce_tensorflow() -> list[str]:
    import tensorflow as tf

    import engine.tensorflow as hvd

    hvd.init()
    variables = {name: tf.Variable(tf.zeros(shape)) for name, shape in SHAPES.items()}

    def gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each * values(name, hvd.rank())) for name, each in variables.items()])
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp8)
        return list(tape.gradient(loss, list(variables.values())))

    for way in (tf.function(gradients), gradients):
        travelled = check(dict(zip(SHAPES, (each.numpy() for each in way()), strict=True)))
    return travelled


def reduce_jax() -> list[str]:
    import jax
    import jax.numpy as jnp

    import engine.jax as hvd

    hvd.init()
    mine = {name: jnp.asarray(values(name, hvd.rank())) for name in SHAPES}
    ways: list[Callable[[Any], Any]] = [lambda f: f, jax.jit]
    for k, way in enumerate(ways):
        reduce = way(
            lambda tree, k=k: {
                name: hvd.allreduce(each, name=f"{name} {k}", compression=hvd.Compression.fp8)
                for name, each in tree.items()
            }
        )
        travelled = check({name: np.asarray(each) for name, each in reduce(mine).items()})
    return travelled


def reduce_optax() -> list[str]:
    import jax.numpy as jnp
    import optax

    import engine.jax as hvd

    hvd.init()
    mine = {name: jnp.asarray(values(name, hvd.rank())) for name in SHAPES}
    optimizer = hvd.distributed(optax.sgd(-1.0), compression=hvd.Compression.fp8)
    updates, _ = optimizer.update(mine, optimizer.init(mine), mine)
    return check({name: np.asarray(each) for name, each in updates.items()})


def reduce_keras() -> list[str]:
    import keras

    import engine.keras as hvd

    hvd.init()
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES.values()]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(-1.0), compression=hvd.Compression.fp8, check_parameters=False
    )
    optimizer.build(variables)
    mine = [keras.ops.convert_to_tensor(values(name, hvd.rank())) for name in SHAPES]
    optimizer.apply_gradients(list(zip(mine, variables, strict=True)))
    moved = (keras.ops.convert_to_numpy(each) for each in variables)
    return check(dict(zip(SHAPES, moved, strict=True)))


def reduce_numpy() -> list[str]:
    engine.init()
    found = {
        name: engine.allreduce(values(name, engine.rank()), name=name, compression=engine.Compression.fp8)
        for name in SHAPES
    }
    return check(found)


def train_digits(steps: int, seeds: int) -> dict[str, list[float]]:
    """Train a network on handwritten digits, and return its mean loss over the last steps for each seed.

    Keys are an optimizer and a compression, such as `adamw fp8`. Each rank has its own part of every batch.
    """
    import torch
    from sklearn.datasets import load_digits
    from torch.nn import functional

    import engine.torch as hvd

    hvd.init()
    data = load_digits()
    pictures, labels = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(data.target)
    found: dict[str, list[float]] = {}
    for kind in ("sgd", "adamw"):
        for compression in ("none", "fp8"):
            for seed in range(seeds):
                torch.manual_seed(seed)
                layers = (
                    torch.nn.Linear(64, 96),
                    torch.nn.Tanh(),
                    torch.nn.Linear(96, 96),
                    torch.nn.Tanh(),
                    torch.nn.Linear(96, 10),
                )
                model = torch.nn.Sequential(*layers)
                inner = (
                    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
                    if kind == "sgd"
                    else torch.optim.AdamW(model.parameters(), lr=2e-3)
                )
                optimizer = hvd.DistributedOptimizer(
                    inner, model.named_parameters(), compression=getattr(hvd.Compression, compression)
                )
                losses = []
                order = torch.Generator().manual_seed(seed)
                for _ in range(steps):
                    batch = torch.randint(len(labels), (64,), generator=order)[hvd.rank() :: hvd.size()]
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(pictures[batch]), labels[batch])
                    loss.backward()
                    optimizer.step()
                    losses.append(hvd.allreduce(loss.detach(), name="loss").item())
                hvd.check_consistency(model.state_dict())
                found.setdefault(f"{kind} {compression}", []).append(float(np.mean(losses[-20:])))
                optimizer.unwrap()
    return found
