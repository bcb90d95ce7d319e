"""Programs of JAX with collectives: many of them, in loops and branches, mapped, with callbacks, recomputed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import engine
from engine.config import config

from ..on_ranks import on_ranks, spare
from .quick_jax import JAX

jax = pytest.importorskip("jax", reason="needs JAX")
import jax.numpy as jnp  # noqa: E402

import engine.jax as hvd  # noqa: E402

pytestmark = on_ranks(spare(1), 2, spare(3), env=JAX, job="jax")


# The class depends on the progress of the program when its result was read.
FAILED = jax.errors.JaxRuntimeError, ValueError


def tensors() -> int:
    return engine.counters()["tensors"]


def test_forty_collectives_of_one_program_need_no_order(rank: int, size: int) -> None:
    """The collectives are independent, so ranks may begin them in any order; a thread for each would deadlock."""

    @jax.jit
    def program(x: Any) -> Any:
        heavy = [x @ (x + k) for k in range(40)]
        order = range(40) if rank % 2 == 0 else reversed(range(40))  # a compiler may choose any order on each rank
        found = {k: hvd.allreduce(heavy[k], hvd.Sum, f"many {k}") for k in order}
        return [found[k] for k in range(40)]

    for scale in range(1, 4):
        x = jnp.full((64, 64), float(scale))
        for k, found in enumerate(program(x)):
            assert float(found[0, 0]) == 64 * scale * (scale + k) * size


def test_a_callback_calls_the_engine_in_the_middle_of_a_program(size: int) -> None:
    """The rest of a program runs on the thread that ends its collective, never on one that moves data."""

    def called(x: Any) -> Any:
        return np.asarray(engine.allreduce(np.array(x), engine.Sum, "in a callback"))

    @jax.jit
    def program(x: Any) -> Any:
        first = hvd.allreduce(x, hvd.Sum, "before it")
        second = jax.pure_callback(called, jax.ShapeDtypeStruct(x.shape, x.dtype), first)
        return hvd.allreduce(second, hvd.Sum, "behind it")

    for scale in (1.0, 2.0):
        assert program(jnp.full((8,), scale)).tolist() == [scale * size**3] * 8


def test_one_collective_for_a_mapped_function(size: int) -> None:
    before = tensors()
    found = jax.jit(jax.vmap(lambda row: hvd.allreduce(row, hvd.Sum, "mapped")))(jnp.ones((50, 3)))
    assert found.tolist() == [[size] * 3] * 50
    assert tensors() - before == 1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_mapped_rows(axis: int, rank: int, size: int) -> None:
    """Whichever dimension is mapped, the first remaining one is gathered, scattered and exchanged."""
    x = np.arange(2 * size * 3 * 4, dtype=np.float32).reshape(2 * size, 3, 4)
    mine = jnp.moveaxis(jnp.asarray(x) + rank, 1, axis)
    everyone = [x + other for other in range(size)]

    @jax.jit
    def program(y: Any) -> Any:
        return (
            jax.vmap(lambda each: hvd.allgather(each, f"g{axis}"), axis, 1)(y),
            jax.vmap(lambda each: hvd.reducescatter(each, hvd.Sum, f"r{axis}"), axis, 1)(y),
            jax.vmap(lambda each: hvd.alltoall(each, name=f"a{axis}"), axis, 1)(y),
            jax.vmap(lambda each: hvd.grouped_allreduce([each, x[0, 0]], hvd.Sum, f"s{axis}"), axis, [1, None])(y)[0],
        )

    gathered, scattered, exchanged, summed = program(mine)
    assert np.array_equal(gathered, np.concatenate(everyone))
    assert np.array_equal(scattered, sum(everyone)[2 * rank : 2 * rank + 2])
    assert np.array_equal(exchanged, np.concatenate([each[2 * rank : 2 * rank + 2] for each in everyone]))
    assert np.array_equal(summed, sum(everyone))


def test_loops_and_branches(rank: int, size: int) -> None:
    x = jnp.full((4,), rank + 1.0)
    total = size * (size + 1) / 2

    def add(carried: Any, _: Any) -> Any:
        reduced = hvd.allreduce(carried, hvd.Average, "in a scan")
        return reduced + 1, reduced

    last, each = jax.lax.scan(add, x, None, length=5)
    assert np.allclose(last, total / size + 5) and np.allclose(each[:, 0], total / size + np.arange(5))

    @jax.jit
    def looped(value: Any) -> Any:
        return jax.lax.while_loop(lambda v: v[0] < 50, lambda v: hvd.allreduce(v * 2, hvd.Max, "in a loop"), value)

    assert looped(x)[0] >= 50

    @jax.jit
    def chosen(flag: Any, value: Any) -> Any:
        return jax.lax.cond(flag, lambda v: hvd.allreduce(v, hvd.Sum, "in a branch"), lambda v: -v, value)

    before = tensors()
    assert chosen(False, x).tolist() == (-x).tolist() and tensors() == before
    assert np.allclose(chosen(True, x), total)

    def loss(value: Any) -> Any:
        return jax.lax.scan(lambda c, _: (hvd.allreduce(jnp.sin(c), name="thrice"), None), value, None, 3)[0].sum()

    same = jnp.full((4,), 0.3)
    plain = jax.grad(lambda v: jnp.sin(jnp.sin(jnp.sin(v))).sum())(same)
    assert np.allclose(jax.jit(jax.grad(loss))(same), plain)


@pytest.mark.parametrize("policy", [None, "everything_saveable", "nothing_saveable", "dots_saveable"])
def test_what_is_computed_again(policy: str | None, size: int) -> None:
    """`jax.checkpoint` submits a collective again, under another name, unless its policy saves the result."""

    def layer(v: Any) -> Any:
        return jnp.sin(hvd.allreduce(jnp.sin(v), name=f"again {policy}"))

    def loss(v: Any, f: Any) -> Any:
        return (f(v) ** 2).sum()

    x = jnp.linspace(0.1, 1, 8)
    chosen = None if policy is None else getattr(jax.checkpoint_policies, policy)
    program = jax.jit(jax.grad(lambda v: loss(v, jax.checkpoint(layer, policy=chosen))))
    plain = jax.grad(lambda v: loss(v, lambda w: jnp.sin(jnp.sin(w))))(x)
    before = tensors()
    assert np.allclose(program(x), plain, rtol=1e-5)
    assert tensors() - before == (2 if policy == "everything_saveable" else 3)


def test_equal_calls_are_neither_merged_nor_taken_out_of_a_loop(size: int) -> None:
    @jax.jit
    def program() -> Any:
        constant = jnp.ones(3)
        apart = hvd.allreduce(constant, hvd.Sum, "one"), hvd.allreduce(constant, hvd.Sum, "other")
        return apart, jax.lax.fori_loop(0, 5, lambda _, s: s + hvd.allreduce(constant, hvd.Sum, "inside"), constant)

    for _ in range(3):
        before = tensors()
        (one, other), summed = program()
        assert one.tolist() == other.tolist() == [size] * 3 and summed.tolist() == [1 + 5 * size] * 3
        assert tensors() - before == 7


def test_a_share_without_rows_takes_part(rank: int, size: int) -> None:
    """There are fewer rows than ranks: a rank's result is empty, but the others need its call."""
    program = jax.jit(lambda x: hvd.reducescatter(x, hvd.Sum, "one row"))
    assert program(jnp.ones((1, 3))).tolist() == ([[size] * 3] if rank == 0 else [])


def test_rows_that_differ_in_a_program_are_an_error_on_every_rank(rank: int, size: int) -> None:
    if size == 1:
        return
    program = jax.jit(lambda x: hvd.allgather(x, "uneven"))
    with pytest.raises(FAILED, match="under jit the number of rows is equal") as caught:
        jax.block_until_ready(program(jnp.ones((rank + 1, 2))))
    assert isinstance(engine.errors.of(caught.value), engine.errors.MismatchError)


def test_a_mismatch_in_a_program_and_then_going_on(rank: int, size: int) -> None:
    if size == 1:
        return
    program = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, "shapes"))
    with pytest.raises(FAILED, match=r"FAILED_PRECONDITION: MismatchError: .*'shapes'") as caught:
        jax.block_until_ready(program(jnp.ones(3 + rank)))
    assert isinstance(engine.errors.of(caught.value), engine.errors.MismatchError)
    assert program(jnp.ones(2)).tolist() == [size] * 2


def test_one_name_twice_one_after_the_other(size: int) -> None:
    chain = jax.jit(lambda x: hvd.allreduce(hvd.allreduce(x, hvd.Sum, "chain"), hvd.Sum, "chain"))
    assert chain(jnp.ones(2)).tolist() == [size**2] * 2


def test_fifty_collectives_wait_for_no_cycle(rank: int, size: int) -> None:
    """No thread waits in the engine for any of them, and still none waits for a cycle."""
    program = jax.jit(lambda xs: [hvd.allreduce(x, hvd.Sum, f"small {k}") for k, x in enumerate(xs)])
    arrays = [jnp.full((100,), float(k)) for k in range(50)]
    found = jax.block_until_ready(program(arrays))
    assert [float(each[0]) for each in found] == [k * size for k in range(50)]

    def seconds() -> float:
        engine.barrier()
        begun = time.monotonic()
        jax.block_until_ready(program(arrays))
        return time.monotonic() - begun

    try:
        if rank == 0:
            engine.set_knobs(cycle_time_ms=500)
        least = min(seconds() for _ in range(3))
    finally:
        if rank == 0:
            engine.set_knobs(cycle_time_ms=config.Config().cycle_time_ms)
    assert least < 5, least  # 3 ms; 25 s with a cycle for each
