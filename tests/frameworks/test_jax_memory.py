"""Buffers that programs of JAX share, donate and reuse: a collective reads and writes only its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..on_ranks import on_ranks, spare
from .quick_jax import JAX

jax = pytest.importorskip("jax", reason="needs JAX")
import jax.numpy as jnp  # noqa: E402

import engine.jax as hvd  # noqa: E402

pytestmark = on_ranks(spare(1), 2, spare(3), env=JAX, job="jax")

LARGE = 200_000  # elements; more than a chunk of the engine, and dispatched asynchronously


def test_what_is_sent_stays_as_it_is(rank: int, size: int) -> None:
    """Covers a program's parameter, a value used before and after the collective, and one that is sent twice."""

    @jax.jit
    def program(x: Any) -> Any:
        y = x * 2
        summed = hvd.allreduce(y, hvd.Sum, "kept y")
        again, twice, given = hvd.grouped_allreduce([y, y, x], hvd.Sum, "kept group")
        return y, summed, again, twice, given, summed + y, x

    x = jnp.full(LARGE, rank + 1.0)
    total = size * (size + 1) / 2
    for _ in range(3):
        found = [np.unique(each).tolist() for each in program(x)]
        mine = rank + 1.0
        sums = [2 * total, 2 * total, 2 * total, total, 2 * total + 2 * mine]
        assert found == [[2 * mine], *([each] for each in sums), [mine]]
        assert np.unique(x).tolist() == [mine]


@pytest.mark.parametrize("elements", [4, LARGE])
def test_donated_arrays(elements: int, rank: int, size: int) -> None:
    """Each step of a loop gets the memory of the previous one; some of it is sent at once, some is computed on."""

    def step(parameters: Any, momentum: Any) -> Any:
        gradients = [parameters[0] * 0 + rank + 1, parameters[1] * 0 + 2 * (rank + 1)]
        reduced = hvd.grouped_allreduce(gradients, name=f"donated {elements}")
        kept = hvd.grouped_allreduce([momentum], hvd.Max, f"donated momentum {elements}")[0]
        changed = [each - gradient for each, gradient in zip(parameters, reduced, strict=True)]
        return changed, kept + reduced[0]

    program = jax.jit(step, donate_argnums=(0, 1))
    parameters, momentum = [jnp.zeros(elements), jnp.ones(elements)], jnp.zeros(elements)
    mean = (size + 1) / 2
    for _ in range(5):
        given = parameters[0]
        parameters, momentum = program(parameters, momentum)
        assert given.is_deleted()
    for found, expected in ((parameters[0], -5 * mean), (parameters[1], 1 - 10 * mean), (momentum, 5 * mean)):
        assert np.unique(found).tolist() == [expected]


def test_many_steps_are_under_way_with_donated_arrays(rank: int, size: int) -> None:
    """The next step is dispatched before the previous one ends, and takes the first one's memory."""

    @jax.jit
    def begin() -> Any:
        return jnp.arange(LARGE, dtype=jnp.int32) % 7 + rank

    program = jax.jit(lambda x: hvd.allreduce(x + 1, hvd.Max, "under way"), donate_argnums=0)
    x = begin()
    for _ in range(20):
        x = program(x)
    assert np.array_equal(x, np.arange(LARGE) % 7 + size - 1 + 20)


def test_a_result_in_the_input_of_the_next_collective(size: int) -> None:
    """Results of a chain may reuse their inputs' memory; branches from one value may not share memory."""

    @jax.jit
    def program(x: Any) -> Any:
        first = hvd.allreduce(x + 1, hvd.Sum, "link 1")
        left = hvd.allreduce(first, hvd.Sum, "link 2")
        right = hvd.allreduce(first * 3, hvd.Sum, "link 3")
        return first, left, right, hvd.allreduce(left + right, hvd.Max, "link 4")

    for scale in (1.0, 5.0):
        found = [np.unique(each).tolist() for each in program(jnp.full(LARGE, scale))]
        one = (scale + 1) * size
        assert found == [[one], [one * size], [3 * one * size], [4 * one * size]]


def test_a_collective_of_a_loop_keeps_what_the_loop_carries(size: int) -> None:
    @jax.jit
    def program(x: Any) -> Any:
        def step(carried: Any, _: Any) -> Any:
            value, kept = carried
            summed, _ = hvd.grouped_allreduce([value, kept], hvd.Sum, "carried")
            return (summed / size + 1, kept), summed

        return jax.lax.scan(step, (x, x * 10), None, length=4)

    (last, kept), each = program(jnp.ones(LARGE // 10))
    assert np.unique(last).tolist() == [5] and np.unique(kept).tolist() == [10]
    assert np.unique(each, axis=1)[:, 0].tolist() == [size, 2 * size, 3 * size, 4 * size]


def test_a_program_of_a_process_set_that_is_gone_runs_in_no_other(rank: int, size: int) -> None:
    """A later set may get the same index among the sets, but the program does not mean it."""
    if size == 1:
        return
    pair = hvd.add_process_set([0, 1]) if size > 2 else hvd.add_process_set([0])
    program = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, "of a set", process_set=pair))
    ranks = len(pair.ranks)
    if pair.included():
        assert program(jnp.ones(2)).tolist() == [ranks] * 2
    hvd.shutdown()
    hvd.init()
    other = hvd.add_process_set([size - 1, 0]) if size > 2 else hvd.add_process_set([1])
    if rank == 0:
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError), match=r"NotInitializedError: .*no such process set.*elastic\.run"
        ):
            jax.block_until_ready(program(jnp.ones(2)))
    hvd.remove_process_set(other)
    hvd.add_process_set(pair)  # a set with the same ranks: its programs run again
    if pair.included():
        assert program(jnp.ones(2)).tolist() == [ranks] * 2
    hvd.remove_process_set(pair)


def test_a_gradient_is_reduced_in_the_memory_that_it_lies_in() -> None:
    program = jax.jit(lambda x: hvd.grouped_allreduce([x * 2, x * 3], name="in place"))
    compiled = program.lower(jnp.ones(LARGE)).compile()
    assert "output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}" in compiled.as_text()
