"""Collectives on JAX's arrays, eager and compiled, and the gradients that flow through them.

Gradients are compared with one process that has all ranks' inputs, which gives the mathematical ones. Horovod's, the
default, are a known multiple of them for each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import ArgumentError, EngineError, UnsupportedOperationError, UnsupportedTensorError

from ..on_ranks import on_ranks, spare
from .quick_jax import JAX

jax = pytest.importorskip("jax", reason="needs JAX")
import jax.numpy as jnp  # noqa: E402

import engine.jax as hvd  # noqa: E402
from engine.jax.adapter import expect_host  # noqa: E402

pytestmark = on_ranks(spare(1), 2, spare(3), env=JAX, job="jax")

DTYPES = "float16 bfloat16 float32 int8 uint8 int16 uint16 int32 bool".split()
MOVED = "uint32 complex64 float8_e4m3fn float8_e5m2".split()


def inputs(rank: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(rank).standard_normal(shape), jnp.float32)


def flat(arrays: Any) -> Any:
    return jnp.concatenate([each.reshape(-1) for each in arrays])


def check(
    shapes: list[tuple[int, ...]],
    collective: Callable[[Any], Any],
    model: Callable[[list[Any]], list[Any]],
    horovod: float = 1.0,
    compiled: bool = True,
) -> None:
    """Compare the collective's result and gradient with those of `model`, which maps all ranks' inputs to all outputs.

    `horovod` is the factor by which Horovod's gradient is larger.
    """
    rank, everyone = hvd.rank(), [inputs(rank, *shape) for rank, shape in enumerate(shapes)]
    outputs = jax.jit(lambda xs: model([each * 2 for each in xs]))(everyone)
    weights = [inputs(100 + rank, *each.shape) for rank, each in enumerate(outputs)]

    def total(arrays: list[Any]) -> Any:
        made = model([2 * each for each in arrays])
        return sum((each * weight).sum() for each, weight in zip(made, weights, strict=True))

    exact = jax.jit(jax.grad(total))(everyone)[rank]

    def loss(mine: Any) -> Any:
        output = collective(mine * 2)
        return (output * weights[rank]).sum(), output

    for mathematical, factor in ((False, horovod), (True, 1.0)):
        for way in (lambda f: f, jax.jit) if compiled else (lambda f: f,):
            with hvd.mathematical_gradients(mathematical):
                gradient, output = way(jax.grad(loss, has_aux=True))(everyone[rank])
            np.testing.assert_allclose(output, outputs[rank], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(gradient, exact * factor, rtol=1e-4, atol=1e-5)


def test_allreduce(size: int) -> None:
    shapes = [(3, 4)] * size
    check(shapes, lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum"), lambda xs: [sum(xs)] * size)
    check(shapes, lambda x: hvd.allreduce(x, name="mean"), lambda xs: [sum(xs) / size] * size)
    check(
        shapes,
        lambda x: hvd.allreduce(x, hvd.Sum, "scaled", prescale_factor=0.5, postscale_factor=3.0),
        lambda xs: [sum(xs) * 1.5] * size,
    )


def test_grouped_allreduce(size: int) -> None:
    check(
        [(3, 4)] * size,
        lambda x: flat(hvd.grouped_allreduce([x[:1], x[1:].T], op=hvd.Sum, name="group")),
        lambda xs: [flat([sum(xs)[:1], sum(xs)[1:].T])] * size,
    )


def test_broadcast(size: int) -> None:
    root = size - 1
    check([(2, 3)] * size, lambda x: hvd.broadcast(x, root, "spread"), lambda xs: [xs[root]] * size, 1 / size)


def test_allgather(size: int) -> None:
    shapes = [(2, 3)] * size
    check(shapes, lambda x: hvd.allgather(x, "rows"), lambda xs: [jnp.concatenate(xs)] * size, 1 / size)
    check([()] * size, lambda x: hvd.allgather(x, "scalars"), lambda xs: [jnp.stack(xs)] * size, 1 / size)
    check(
        shapes,
        lambda x: flat(hvd.grouped_allgather([x, x[:1] * 2], "several")),
        lambda xs: [flat([*xs, *(2 * x[:1] for x in xs)])] * size,
        1 / size,
    )


def test_an_allgather_of_uneven_rows_outside_of_a_program(size: int) -> None:
    shapes = [(rank + 1, 3) for rank in range(size)]
    check(shapes, hvd.allgather, lambda xs: [jnp.concatenate(xs)] * size, 1 / size, compiled=False)
    check(
        shapes,
        lambda x: flat(hvd.grouped_allgather([x, x[:1]])),
        lambda xs: [flat([*xs, *(x[:1] for x in xs)])] * size,
        1 / size,
        compiled=False,
    )


@pytest.mark.parametrize("rows", [7, 1])
def test_reducescatter(rows: int, size: int) -> None:
    def divided(total: Any) -> list[Any]:
        counts = [rows // size + (rank < rows % size) for rank in range(size)]
        return [total[sum(counts[:rank]) : sum(counts[: rank + 1])] for rank in range(size)]

    shapes = [(rows, 2)] * size
    check(shapes, lambda x: hvd.reducescatter(x, hvd.Sum, "share"), lambda xs: divided(sum(xs)), size)
    if rows == 1:
        return
    check(shapes, lambda x: hvd.reducescatter(x, name="mean share"), lambda xs: divided(sum(xs) / size), size)
    check(
        shapes,
        lambda x: flat(hvd.grouped_reducescatter([x, x[:, 0] * 3], hvd.Sum, "shares")),
        lambda xs: [flat(pair) for pair in zip(divided(sum(xs)), divided(sum(x[:, 0] * 3 for x in xs)), strict=True)],
        size,
    )


def test_alltoall(size: int) -> None:
    def exchanged(xs: list[Any], splits: list[list[int]]) -> list[Any]:
        parts = [np.split(np.arange(len(x)), np.cumsum(split)) for x, split in zip(xs, splits, strict=True)]
        return [jnp.concatenate([x[part[to]] for x, part in zip(xs, parts, strict=True)]) for to in range(size)]

    shapes = [(2 * size, 3)] * size
    check(shapes, lambda x: hvd.alltoall(x, name="even"), lambda xs: exchanged(xs, [[2] * size] * size))
    splits = [[(rank + to) % 2 + 1 for to in range(size)] for rank in range(size)]
    check(
        [(sum(split) + 1, 2) for split in splits],  # the last row is not sent
        lambda x: hvd.alltoall(x, splits[hvd.rank()])[0],
        lambda xs: exchanged(xs, splits),
        compiled=False,
    )
    rows = hvd.alltoall(jnp.ones((sum(splits[hvd.rank()]), 2)), splits[hvd.rank()])[1]
    assert isinstance(rows, jax.Array) and rows.tolist() == [split[hvd.rank()] for split in splits]


@pytest.mark.sample(1)
def test_gradients_of_gradients_and_forward_mode(size: int) -> None:
    x = inputs(hvd.rank(), 3)
    everyone = [inputs(rank, 3) for rank in range(size)]

    def loss(mine: Any) -> Any:
        return (hvd.allreduce(jnp.sin(mine), name="curved") ** 2).sum()

    def model(mine: Any) -> Any:
        others = sum(jnp.sin(each) for rank, each in enumerate(everyone) if rank != hvd.rank())
        return (((jnp.sin(mine) + others) / size) ** 2).sum()

    tangent = jnp.ones(3)
    value, slope = jax.jit(lambda v: jax.jvp(loss, (v,), (tangent,)))(x)
    slopes = sum(jax.jvp(lambda v: jnp.sin(v) / size, (each,), (tangent,))[1] for each in everyone)
    np.testing.assert_allclose(value, model(x), rtol=1e-5)
    np.testing.assert_allclose(slope, (2 * sum(map(jnp.sin, everyone)) / size * slopes).sum(), rtol=1e-4)
    second, again = jax.jit(jax.hessian(loss))(x), jax.hessian(loss)(x)
    assert second.shape == (3, 3)
    np.testing.assert_allclose(second, again, rtol=1e-5, atol=1e-6)


def test_operations_without_gradients() -> None:
    x = jnp.ones(2)
    assert jax.jit(lambda v: hvd.allreduce(v, op=hvd.Max, name="max"))(x).tolist() == [1, 1]
    with pytest.raises(EngineError, match="op=Max has no gradient"):
        jax.grad(lambda v: hvd.allreduce(v, op=hvd.Max, name="max").sum())(x)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_at_once_and_compiled(dtype: str, rank: int, size: int) -> None:
    mine = jnp.arange(rank, rank + 6).reshape(2, 3).astype(dtype)
    everyone = [np.arange(other, other + 6).reshape(2, 3) for other in range(size)]
    total = sum(each != 0 for each in everyone) > 0 if dtype == "bool" else sum(everyone)
    for found in (
        hvd.allreduce(mine, hvd.Sum),
        engine.allreduce(mine, engine.Sum),
        jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, f"sum of {dtype}"))(mine),
        jax.jit(lambda x: hvd.grouped_allreduce([x, x], hvd.Sum, f"group of {dtype}")[1])(mine),
    ):
        assert isinstance(found, jax.Array) and (found.dtype, found.shape) == (mine.dtype, mine.shape)
        assert np.array_equal(np.asarray(found).astype(np.float32), np.asarray(total).astype(np.float32))
    gathered = np.concatenate(everyone)
    for found in (hvd.allgather(mine), jax.jit(lambda x: hvd.allgather(x, f"rows of {dtype}"))(mine)):
        assert found.dtype == mine.dtype
        assert np.array_equal(np.asarray(found).astype(np.float32), gathered.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", MOVED)
def test_dtypes_that_are_moved(dtype: str, rank: int, size: int) -> None:
    mine = (jnp.arange(4) + rank).astype(dtype)
    root = (jnp.arange(4) + size - 1).astype(dtype)
    for found in (hvd.broadcast(mine, size - 1), jax.jit(lambda x: hvd.broadcast(x, size - 1, f"move {dtype}"))(mine)):
        assert found.dtype == mine.dtype and np.array_equal(np.asarray(found), np.asarray(root))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,) * 14, (300, 1001)])
def test_shapes(shape: tuple[int, ...], size: int) -> None:
    x = jnp.ones(shape)
    for found in (hvd.allreduce(x, hvd.Sum), jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, f"shape {shape}"))(x)):
        assert found.shape == shape and bool((found == size).all())


def test_compression(size: int) -> None:
    x = jnp.full((3,), 1 + 2**-12)

    class Halved:
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return tensor / 2, None

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tensor * 2

    for compression, want in ((hvd.Compression.fp16, 1.0), (hvd.Compression.bf16, 1.0), (Halved, 1 + 2**-12)):
        for way in (lambda f: f, jax.jit):
            found = way(lambda v, c=compression: hvd.allreduce(v, name=f"packed {c.__name__}", compression=c))(x)
            assert found.tolist() == [want] * 3


def test_process_sets(rank: int, size: int) -> None:
    chosen = hvd.add_process_set([size - 1]) if size > 1 else hvd.global_process_set
    x = jnp.arange(3.0) + rank
    if chosen.included():
        program = jax.jit(lambda v: (hvd.allreduce(v, hvd.Sum, "s", process_set=chosen), hvd.allgather(v, "g", chosen)))
        for found in program(x):
            assert found.tolist() == x.tolist()
    hvd.remove_process_set(chosen)


def test_what_cannot_be_called_so(rank: int) -> None:
    x = jnp.ones(3)
    with pytest.raises(ArgumentError, match="needs a name inside jit"):
        jax.jit(hvd.allreduce)(x)
    with pytest.raises(ArgumentError, match="needs a name inside jit"):
        jax.jit(jax.grad(lambda v: hvd.allreduce(v).sum()))(x)
    with pytest.raises(UnsupportedTensorError, match=r"call engine\.jax\.allreduce"):
        jax.jit(engine.allreduce)(x)
    with pytest.raises(UnsupportedTensorError, match="without '_'"):
        engine.allreduce_(x, name="in place")
    with pytest.raises(UnsupportedTensorError, match="key_data"):
        hvd.broadcast(jax.random.key(0), 0, "a key")
    with pytest.raises(EngineError, match=r"call it outside of jit"):
        jax.jit(lambda v: hvd.alltoall(v, [1] * 100, "no splits"))(x)
    with pytest.raises(TypeError, match=r"expected a jax\.Array, not str"):
        hvd.allreduce("three", name="text")


def test_splits_and_roots_that_are_no_whole_numbers_are_refused_on_all_ranks(rank: int, size: int) -> None:
    """A cast would truncate them: 1.9 rows would become 1."""
    wrong = ([1.9] * size, [1.0] * size, np.ones(size, np.float32), jnp.ones(size), np.ones(size, bool), ["1"] * size)
    for number, splits in enumerate(wrong):
        given = splits if rank == size - 1 else [1] * size
        with pytest.raises(EngineError, match="splits holds whole numbers, one for each rank"):
            hvd.alltoall(jnp.zeros(size), splits=given, name=f"splits {number}")
    for number, root in enumerate((0.7, 0.0, "0", jnp.float32(0), None)):
        with pytest.raises(EngineError, match="root_rank is a whole number, that of a rank"):
            hvd.broadcast(jnp.zeros(size), root if rank == size - 1 else 0, name=f"root {number}")
    assert hvd.alltoall(jnp.zeros(size), np.ones(size, np.uint8), name="small")[1].tolist() == [1] * size


def test_programs_for_an_accelerator_are_refused() -> None:
    """XLA could compile them where JAX has an accelerator. A JAX without a processor backend is refused, too."""
    program = jax.jit(lambda v: hvd.allreduce(v, name="on cuda"))
    for platforms in (("cuda",), ("cpu", "cuda"), ("tpu",)):
        with pytest.raises(
            UnsupportedOperationError, match=rf"'on cuda' is in a program for {platforms[-1]};.*for the pro"
        ):
            program.trace(jnp.ones(3)).lower(lowering_platforms=platforms)
    with pytest.raises(UnsupportedOperationError, match=r"JAX_PLATFORMS=cpu"):
        jax.export.export(program, platforms=("cuda",))(jnp.ones(3))

    def no_processor(**_: Any) -> Any:
        raise RuntimeError("Unknown backend cpu")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "local_devices", no_processor)
        with pytest.raises(
            EngineError, match=r"no device for the processor .*Unknown backend cpu.*PLATFORMS=.cuda,cpu"
        ):
            jax.jit(lambda v: hvd.allreduce(v, name="nowhere"))(jnp.ones(3))


def test_arrays_on_an_accelerator_are_refused() -> None:
    class Device:
        platform = "gpu"

        def __repr__(self) -> str:
            return "CudaDevice(id=0)"

    class OnDevice:
        dtype = np.dtype(np.float32)

        def devices(self) -> set[Device]:
            return {Device()}

    with pytest.raises(
        UnsupportedTensorError, match=r"an array is on CudaDevice\(id=0\).*main memory.*jax\.device_put\(x"
    ):
        engine.collectives.adapters.adapter_of(jnp.ones(1)).as_input(OnDevice())
    with pytest.raises(UnsupportedTensorError, match=r"parameters\['w'\] is on CudaDevice"):
        expect_host(OnDevice(), "parameters['w']")


def test_numbers_and_arrays_of_numpy_become_arrays_of_jax(size: int) -> None:
    for value in (2.0, np.float32(2), np.full((2,), 2, np.float32)):
        found = hvd.allreduce(value, hvd.Sum)
        assert isinstance(found, jax.Array) and found.dtype == jnp.float32 and bool((found == 2 * size).all())


def test_results_lie_in_the_memory_that_the_engine_filled() -> None:
    """XLA uses aligned memory in place, without a copy of the result."""
    adapter = engine.collectives.adapters.adapter_of(jnp.ones(1))
    output = adapter.make_empty(np.ones((3, 1000), np.float32))
    assert adapter.as_framework_tensor(jnp.ones(1), output).unsafe_buffer_pointer() == output.ctypes.data
