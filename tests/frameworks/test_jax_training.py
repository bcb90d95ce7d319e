"""Training with optax on any number of ranks equals one process with the whole batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine
from engine.session import runtime

from ..on_ranks import on_ranks, spare
from ..waiting import until
from .quick_jax import JAX

jax = pytest.importorskip("jax", reason="needs JAX")
optax = pytest.importorskip("optax", reason="needs optax")
import jax.numpy as jnp  # noqa: E402

import engine.jax as hvd  # noqa: E402

pytestmark = on_ranks(spare(1), 2, spare(3), env=JAX, job="jax")

STEPS, BATCH = 6, 12


def model(seed: int) -> Any:
    random = np.random.default_rng(seed)
    return {
        "first": {"w": jnp.asarray(random.standard_normal((5, 8)), jnp.float32), "b": jnp.zeros(8)},
        "second": {"w": jnp.asarray(random.standard_normal((8, 1)), jnp.float32), "b": jnp.zeros(1)},
    }


def batches() -> list[Any]:
    return [jnp.asarray(np.random.default_rng(9 + k).standard_normal((BATCH, 5)), jnp.float32) for k in range(STEPS)]


def loss_of(parameters: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch @ parameters["first"]["w"] + parameters["first"]["b"])
    found = hidden @ parameters["second"]["w"] + parameters["second"]["b"]
    return ((found[:, 0] - jnp.sin(batch.sum(1))) ** 2).mean()


def train(parameters: Any, optimizer: Any, inputs: list[Any], compiled: bool = True) -> tuple[Any, Any]:
    """Return the parameters and the optimizer's state after a step for each input."""
    state = optimizer.init(parameters)

    def step(parameters: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(loss_of)(parameters, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    step = jax.jit(step) if compiled else step
    for batch in inputs:
        parameters, state = step(parameters, state, batch)
    return parameters, state


def shards() -> list[Any]:
    return [batch[hvd.rank() :: hvd.size()] for batch in batches()]


def check(found: Any, expected: Any) -> None:
    hvd.check_consistency(found)
    for mine, exact in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-5)


WAYS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "first in a chain": (lambda: optax.chain(hvd.distributed(), optax.sgd(0.1)), lambda: optax.sgd(0.1)),
    "around an optimizer": (lambda: hvd.distributed(optax.adamw(0.01)), lambda: optax.adamw(0.01)),
    "by any framework's name": (lambda: engine.DistributedOptimizer(optax.adam(0.01)), lambda: optax.adam(0.01)),
    "clipped, with momentum": (
        lambda: hvd.distributed(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))),
        lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9)),
    ),
    "divided in two": (
        lambda: hvd.distributed(optax.adam(0.01), gradient_predivide_factor=2.0),
        lambda: optax.adam(0.01),
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_that_of_one_process(way: str, rank: int) -> None:
    wrapped, plain = WAYS[way]
    parameters = hvd.broadcast_pytree(model(rank))
    found, _ = train(parameters, wrapped(), shards(), compiled=way != "around an optimizer")
    expected, _ = train(model(0), plain(), batches())
    check(found, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("average", [True, False])
def test_every_so_many_gradients(average: bool, size: int) -> None:
    """Three gradients make one reduction and one step; `optax.MultiSteps` reduces each micro step instead."""
    optimizer = hvd.distributed(optax.adam(0.01), every=3, average_aggregated_gradients=average)
    engine.barrier()
    before = engine.counters()["tensors"]
    found, state = jax.block_until_ready(train(model(0), optimizer, shards()))
    compared = 2  # ranks compare options and parameters before the first reduction
    assert engine.counters()["tensors"] - before == STEPS // 3 + compared
    assert int(state.passes) == 0
    expected, _ = train(model(0), optax.MultiSteps(optax.adam(0.01), 3, use_grad_mean=average), batches())
    check(found, expected)


def test_compressed_gradients_train_alike() -> None:
    found, _ = train(model(0), hvd.distributed(optax.sgd(0.1), compression=hvd.Compression.fp16), shards())
    hvd.check_consistency(found)
    expected, _ = train(model(0), optax.sgd(0.1), batches())
    for mine, exact in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, exact, rtol=0.05, atol=0.01)


def test_adasum_combines_what_the_steps_change(rank: int, size: int) -> None:
    if size == 3:
        return  # Adasum needs a power of two
    optimizer = hvd.distributed(optax.sgd(0.1), op=hvd.Adasum)
    found, _ = train(model(0), optimizer, batches()[:1])  # all ranks have the same gradient, which Adasum averages
    expected, _ = train(model(0), optax.sgd(0.1), batches()[:1])
    check(found, expected)


def test_a_step_is_one_call_with_a_name_and_ends_a_step(size: int) -> None:
    """The tuner is told of steps; timeline and stall reports name the first array of the tree."""
    optimizer = hvd.distributed(optax.sgd(0.1))
    parameters = model(0)
    state = optimizer.init(parameters)
    update = jax.jit(optimizer.update)
    gradients = jax.grad(loss_of)(parameters, batches()[0])
    jax.block_until_ready(update(gradients, state, parameters))
    engine.barrier()
    native = runtime.current_engine()
    native.record_steps()
    marks = native.steps(0)[1]
    entries = engine.counters()["tensors"]
    jax.block_until_ready(update(gradients, state, parameters))
    until(lambda: len(native.steps(0)[1]) == len(marks) + 1, "the end of a step was marked")
    assert engine.counters()["tensors"] - entries == 1
    traced = str(jax.make_jaxpr(optimizer.update)(gradients, state, parameters))
    assert re.search(r"name=gradient\d*\.first/b \+3", traced), traced


def test_ranks_of_a_process_set_train_by_themselves(rank: int, size: int) -> None:
    chosen = hvd.add_process_set([0]) if size > 1 else hvd.global_process_set
    found, _ = train(model(0), hvd.distributed(optax.sgd(0.1), process_set=chosen), shards())
    expected, _ = train(model(0), optax.sgd(0.1), shards())
    for mine, exact in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-6)
    hvd.remove_process_set(chosen)


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="every needs the optimizer"):
        hvd.distributed(every=2)
    with pytest.raises(ValueError, match="1 or more"):
        hvd.distributed(optax.sgd(0.1), every=0)
    with pytest.raises(ValueError, match="such as optax"):
        hvd.distributed(object())
    with pytest.raises(ValueError, match="is not for JAX"):
        hvd.distributed(compression=engine.Scheme())


def test_a_tree_of_everything_is_broadcast(rank: int, size: int) -> None:
    optimizer = optax.adam(0.1)
    tree = {
        "parameters": model(rank),
        "state": optimizer.init(model(rank)),
        "key": jax.random.key(rank),
        "half": jnp.full((3,), rank, jnp.bfloat16),
        "host": np.full((2,), rank),
        "number": rank,
        "nothing": None,
        "text": f"from {rank}",
    }
    found = hvd.broadcast_parameters(tree, root_rank=size - 1)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert (found["number"], found["text"]) == (size - 1, f"from {size - 1}")
    assert isinstance(found["host"], np.ndarray) and found["host"].tolist() == [size - 1] * 2
    assert found["half"].dtype == jnp.bfloat16 and float(found["half"][0]) == size - 1
    assert bool((jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(size - 1))).all())
    hvd.check_consistency(found)
    for mine, exact in zip(jax.tree.leaves(found["parameters"]), jax.tree.leaves(model(size - 1)), strict=True):
        assert np.array_equal(mine, exact)


def test_trees_that_differ(rank: int, size: int) -> None:
    if size == 1:
        return
    tree = {"w": jnp.ones(3 + rank)}
    with pytest.raises(engine.errors.MismatchError, match=r"\['w'\]"):
        hvd.broadcast_pytree(tree)
    with pytest.raises(engine.errors.MismatchError, match=r"\['w'\]"):
        hvd.check_consistency({"w": jnp.full((3,), rank)})
    assert hvd.allgather_object(rank) == list(range(size))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "behind clipping": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), hvd.distributed(optax.sgd(0.1))),
        r"comes after 1 transformation in an optax.chain.*Wrap the whole chain, distributed\(optax.chain",
    ),
    "behind clipping, alone": (lambda: optax.chain(optax.clip(1.0), hvd.distributed(), optax.sgd(0.1)), "optax.chain"),
    "in a chain behind clipping": (
        lambda: optax.chain(optax.clip(1.0), optax.chain(hvd.distributed(optax.sgd(0.1)))),
        "after 1 transformation",
    ),
    "in a named chain": (
        lambda: optax.named_chain(("clip", optax.clip(1.0)), ("all", hvd.distributed(optax.sgd(0.1)))),
        "optax.named_chain",
    ),
    "if finite": (
        lambda: optax.apply_if_finite(hvd.distributed(optax.sgd(0.1)), 5),
        r"inside of optax.apply_if_finite.*distributed\(optax.apply_if_finite",
    ),
    "under a condition": (
        lambda: optax.conditionally_transform(hvd.distributed(optax.sgd(0.1)), lambda step, **_: step > 1),
        "conditionally_transform",
    ),
    "several steps, some skipped": (
        lambda: optax.MultiSteps(hvd.distributed(optax.sgd(0.1)), 2, should_skip_update_fn=optax.skip_not_finite),
        "should_skip_update_fn",
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", REFUSED)
def test_what_sees_or_decides_by_one_rank_is_refused(way: str, compiled: bool, size: int) -> None:
    """One rank has NaN, which such conditions test for; no rank waits for another."""
    make, text = REFUSED[way]
    optimizer = make()
    parameters = model(0)
    odd = jnp.nan if hvd.rank() == size - 1 else 1.0
    gradients = jax.tree.map(lambda each: each * odd, parameters)
    update = jax.jit(optimizer.update) if compiled else optimizer.update
    with pytest.raises(ValueError, match=text):
        update(gradients, optimizer.init(parameters), parameters)


ALLOWED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "if all are finite": (lambda whole: hvd.distributed(optax.apply_if_finite(whole, 5)), True),
    "several steps": (lambda whole: optax.MultiSteps(hvd.distributed(whole), 1), False),
    "some of the parameters": (lambda whole: optax.masked(hvd.distributed(whole), True), False),
    "first of a chain": (lambda whole: optax.chain(hvd.distributed(whole), optax.identity()), False),
    "with settings": (lambda whole: optax.inject_hyperparams(lambda rate: hvd.distributed(whole))(rate=0.1), False),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", ALLOWED)
def test_what_all_ranks_see_alike_trains_as_one_process_does(way: str) -> None:
    wrap, skips = ALLOWED[way]
    found, _ = train(model(0), wrap(optax.sgd(0.1)), shards())
    expected, _ = train(model(0), optax.sgd(0.1), batches())
    check(found, expected)
    if skips:  # a NaN on one rank makes the average NaN, and changes nothing
        optimizer = wrap(optax.sgd(0.1))
        odd = jnp.nan if hvd.rank() == 0 else 1.0
        gradients = jax.tree.map(lambda each: each * odd, model(0))
        updates, _ = optimizer.update(gradients, optimizer.init(model(0)), model(0))
        assert all(not np.any(each) for each in jax.tree.leaves(updates))
