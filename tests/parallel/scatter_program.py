"""Reduce-scatter, all-to-all and groups. Runs on every rank."""

from __future__ import annotations

import itertools

import numpy as np

import engine

from .on_ranks import Cases, array, check_equal, numbers, refused, small_numbers, tensor
from .operation_table import BOOL, CELLS, DTYPES, OPS, expected

SHAPES = ((0, 3), (1,), (4, 0), (5, 7), (12, 33), (301, 5), (3, 40_000), (700_001,))


def shares(rows: int, size: int) -> list[int]:
    """Where each rank's rows begin, and the end."""
    return list(itertools.accumulate((rows // size + (rank < rows % size) for rank in range(size)), initial=0))


def reducescatters() -> int:
    """The rows of an allreduce, of every dtype and operation, even, uneven and none."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    for dtype, op in itertools.product(DTYPES, OPS):
        if CELLS[dtype, op].reduce is None:
            continue
        for shape in SHAPES[:6]:
            inputs = [numbers(dtype, shape, other) for other in range(size)]
            start = shares(shape[0], size)
            got = engine.reducescatter(tensor(dtype, inputs[rank]), getattr(engine, op))
            with cases.case(f"{dtype} {op} {shape}"):
                check_equal(dtype, array(dtype, got), expected(dtype, op, inputs)[start[rank] : start[rank + 1]])
    for dtype, shape in itertools.product(("float32", "float16", "int64"), SHAPES):
        inputs = [small_numbers(dtype, shape, other) for other in range(size)]
        start = shares(shape[0], size)
        got = engine.reducescatter(inputs[rank], engine.Sum, None, 0.5, 3.0)
        with cases.case(f"scaled {dtype} {shape}"):
            check_equal(dtype, got, expected(dtype, "Sum", inputs, 0.5, 3.0)[start[rank] : start[rank + 1]])
            check_equal(dtype, inputs[rank], small_numbers(dtype, shape, rank))
    with cases.case("many outstanding, among allreduces"):
        rows = [np.full((size * 2 + 1, 3), rank + k, np.float32) for k in range(100)]
        handles = [
            engine.reducescatter_async(each, engine.Sum, f"s{k}")
            if k % 2
            else engine.allreduce_async(each, engine.Sum, f"a{k}")
            for k, each in enumerate(rows)
        ]
        for k, handle in enumerate(handles):
            got = engine.synchronize(handle)
            assert (got == sum(range(k, k + size))).all()
            assert len(got) == (2 + (rank == 0) if k % 2 else size * 2 + 1)
    with cases.case("refusals"):
        refused(lambda: engine.reducescatter(np.float32(1)), "a scalar has none")
        refused(lambda: engine.reducescatter(np.ones(4), 17), "17", ValueError)
        refused(lambda: engine.reducescatter(np.ones(4, bool)), "bool tensor has no Average")
        if size > 1:
            said = refused(
                lambda: engine.reducescatter(np.ones((4, 2 + rank % 2)), engine.Sum, "shape"),
                "reducescatter sum float64[4, 2]",
                engine.errors.MismatchError,
            )
            assert "rank 1" in said or "ranks 1" in said
    return cases.done()


def groups() -> int:
    """One request for many tensors: mixed dtypes, empty, strided, in place and not; refused as a whole."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    total = size * (size - 1) // 2
    for count in (1, 2, 9, 3000):
        shapes = [(k % 5, 3) if k % 3 else () if k % 2 else (700,) for k in range(count)]
        kinds = [("float32", "int64", "float16")[k % 7 % 3] for k in range(count)]
        mine = [np.full(shape, rank + k % 9, kind) for k, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))]
        apart = engine.grouped_allreduce(mine, engine.Sum, f"apart {count}")
        inplace = [each.copy() for each in mine]
        handle = engine.grouped_allreduce_async_(inplace, engine.Sum, f"in place {count}")
        alone = engine.allreduce(np.full(3, rank), engine.Sum, f"alone {count}")
        result = engine.synchronize(handle)
        with cases.case(f"{count} tensors"):
            assert engine.poll(handle)
            assert all(a is b for a, b in zip(result, inplace, strict=True))
            assert (alone == total).all()
            for k, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
                for got in (apart[k], inplace[k]):
                    assert got.shape == shape and got.dtype == kind and (got == total + size * (k % 9)).all()
                assert (mine[k] == rank + k % 9).all()
    with cases.case("overlapping in place"):
        whole = np.full(6, rank + 1.0)
        for group in ([whole, whole], [whole[:4], np.ones(3), whole[2:]]):
            said = refused(lambda each=group: engine.grouped_allreduce_(each, engine.Sum), "share memory", ValueError)
            assert f"tensors 0 and {len(group) - 1}" in said
        assert (engine.grouped_allreduce([whole, whole], engine.Sum)[1] == size * (size + 1) / 2).all()
    with cases.case("strided"):
        rows = np.arange(12.0).reshape(3, 4) * rank
        result = engine.grouped_allreduce_([rows.T, rows[:, :0]], engine.Sum)
        assert (rows == np.arange(12.0).reshape(3, 4) * total).all() and result[1].shape == (3, 0)
    with cases.case("large"):
        big = [np.full(1_000_003, rank, np.float32), np.full(17, 2 * rank, np.float32)]
        engine.grouped_allreduce_(big, engine.Max)
        assert (big[0] == size - 1).all() and (big[1] == 2 * size - 2).all()
    with cases.case("refusals"):
        refused(lambda: engine.grouped_allreduce([]), "a group has 1 to", ValueError)
        untouched = np.full(2, rank)
        refused(lambda: engine.grouped_allreduce_([untouched, np.ones(2, np.complex64)], engine.Sum), "complex64")
        engine.barrier()
        assert (untouched == rank).all()
        if size > 1:
            pair = [np.ones(3), np.ones((2, 3) if rank else (3, 2))]
            said = refused(
                lambda: engine.grouped_allreduce_(pair, engine.Sum, "pair"), "a group of 2", engine.errors.MismatchError
            )
            assert "9 elements" in said and (pair[0] == 1).all()
        engine.barrier()
    return cases.done(8)


def alltoalls() -> int:
    """Splits that differ between ranks and calls, none on some ranks or on all, rows without bytes, and large ones."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    for number, rest in enumerate(((), (1,), (3, 4), (0,), (33,), (70_001,))):
        for dtype in ("float32", "int8", "float64", *BOOL):
            for name, splits in {
                "equal": np.full((size, size), 2),
                "uneven": np.add.outer(np.arange(size), np.arange(size)) % 4,
                "none": np.zeros((size, size), int),
                "all to the last": np.eye(size, dtype=int)[[size - 1] * size] * 3,
                "only rank 0 sends": np.eye(size, dtype=int)[0][:, None] * np.arange(1, size + 1),
            }.items():
                sent = [small_numbers(dtype, (int(splits[other].sum()), *rest), other, number) for other in range(size)]
                got, counts = engine.alltoall(sent[rank], splits[rank])
                bounds = np.cumsum(np.pad(splits, ((0, 0), (1, 0))), axis=1)
                want = [sent[other][bounds[other, rank] : bounds[other, rank + 1]] for other in range(size)]
                with cases.case(f"{name} {rest} {dtype}"):
                    check_equal(dtype, got, np.concatenate(want))
                    assert counts.dtype == np.int32 and counts.tolist() == splits[:, rank].tolist()
    with cases.case("without splits"):
        got = engine.alltoall(np.arange(size * 2) + 100 * rank)
        assert got.tolist() == [100 * other + 2 * rank + k for other in range(size) for k in range(2)]
    with cases.case("rows left over are not sent"):
        got, counts = engine.alltoall(np.arange(size + 3.0), [1] * size)
        assert got.tolist() == [float(rank)] * size and counts.tolist() == [1] * size
    with cases.case("rows that are not contiguous"):
        got, _ = engine.alltoall((np.arange(2.0 * size).reshape(2, size) + 10 * rank).T, [1] * size)
        assert got.tolist() == [[10 * other + rank, 10 * other + size + rank] for other in range(size)]
    with cases.case("many outstanding, by other rows in every call"):
        handles = [engine.alltoall_async(np.full((size * (k % 5), 2), rank), name=f"{k}") for k in range(200)]
        for k, handle in enumerate(handles):
            got = engine.synchronize(handle)
            assert got[:, 0].tolist() == [other for other in range(size) for _ in range(k % 5)]
    with cases.case("refusals"):
        refused(lambda: engine.alltoall(np.ones(size), [1] * (size + 1)), f"each of {size} ranks", ValueError)
        refused(lambda: engine.alltoall(np.ones(size), [2] * size), "cannot be taken", ValueError)
        refused(lambda: engine.alltoall(np.ones(size), [-1] + [1] * (size - 1)), "cannot be taken", ValueError)
        refused(lambda: engine.alltoall(5, [0] * size), "no tensor")
        if size > 1:
            refused(lambda: engine.alltoall(np.ones(size + 1)), "divided equally", ValueError)
            refused(
                lambda: engine.alltoall(np.ones((size, 2 + rank % 2)), name="shape"),
                "alltoall float64[*, 2]",
                engine.errors.MismatchError,
            )
    return cases.done(6 * 4 * 5 + 5)
