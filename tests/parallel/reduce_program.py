"""Every dtype, operation and scale, fused and alone. Runs on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

import engine

from .on_ranks import Cases, array, check_equal, check_same_on_all, numbers, tensor
from .operation_table import BOOL, CELLS, DTYPES, OPS, expected

SCALES = ((1.0, 1.0), (0.5, 1.0), (1.0, -3.0), (0.3, 1.7), (2.0**-30, 1e30))
LENGTHS = (37, 5000)


def reduce_everything() -> int:
    """Every cell of the table, with every scale: all in flight at once, then again one by one."""
    engine.init()
    cases = Cases()
    plan = [
        (dtype, op, pre, post, count)
        for dtype in DTYPES
        for op in OPS
        for pre, post in SCALES
        for count in LENGTHS
        if CELLS[dtype, op].reduce and (dtype not in BOOL or (pre, post) == (1.0, 1.0))
    ]
    results: list[Any] = []
    handles = []
    inputs = []
    for index, (dtype, op, pre, post, count) in enumerate(plan):
        mine = tensor(dtype, numbers(dtype, count, engine.rank(), index))
        submit = engine.allreduce_async_ if index % 2 else engine.allreduce_async
        handles.append(submit(mine, getattr(engine, op), f"{dtype} {op} {pre} {post} {count}", pre, post))
        inputs.append(mine)
    for index, (dtype, op, pre, post, count) in enumerate(plan):
        with cases.case(f"fused {dtype} {op} x{pre} x{post} [{count}]"):
            got = array(dtype, engine.synchronize(handles[index]))
            results.append(got)
            values = [numbers(dtype, count, rank, index) for rank in range(engine.size())]
            check_equal(dtype, got, expected(dtype, op, values, pre, post))
            if index % 2 == 0:
                check_equal(dtype, array(dtype, inputs[index]), values[engine.rank()])
    check_same_on_all(results)
    for index, (dtype, op, pre, post, count) in enumerate(plan):
        mine = tensor(dtype, numbers(dtype, count, engine.rank(), index))
        got = array(dtype, engine.allreduce(mine, getattr(engine, op), None, pre, post))
        with cases.case(f"alone {dtype} {op} x{pre} x{post} [{count}]"):
            assert got.tobytes() == results[index].tobytes(), "other bits than in a fused batch"
    return cases.done(2 * len(plan))


def special_values() -> int:
    """What the notes below the table promise, in numbers that a reader can check by eye."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()

    def reduced(values: Any, dtype: str, op: int, pre: float = 1.0, post: float = 1.0) -> np.ndarray:
        return np.asarray(engine.allreduce(np.array(values, dtype), op, None, pre, post))

    with cases.case("integers wrap"):
        assert reduced([100], "int8", engine.Sum)[0] == np.int64(100 * size).astype(np.int8)
        assert reduced([3], "int8", engine.Product)[0] == np.int64(3**size).astype(np.int8)
    with cases.case("the sum below an average does not wrap"):
        assert reduced([127, -128], "int8", engine.Average).tolist() == [127, -128]
        assert reduced([255], "uint8", engine.Average).tolist() == [255]
        assert reduced([65535], "uint16", engine.Average).tolist() == [65535]
        assert reduced([2**15 - 1, -(2**15)], "int16", engine.Average).tolist() == [2**15 - 1, -(2**15)]
        assert reduced([2**31 - 1], "int32", engine.Average).tolist() == [2**31 - 1]
    with cases.case("an average truncates toward zero"):
        got = reduced([1 if rank == 0 else 0, -1 if rank == 0 else 0], "int32", engine.Average)
        assert got.tolist() == ([1, -1] if size == 1 else [0, 0])
    with cases.case("factors truncate toward zero and saturate"):
        first = rank == 0
        got = reduced([3 if first else 0, -3 if first else 0, 100 if first else 0], "int8", engine.Sum, pre=1.5)
        assert got.tolist() == [4, -4, 127]
        assert reduced([-1 if first else 0], "int8", engine.Sum, post=1e9).tolist() == [-128]
        assert reduced([200 if first else 0], "uint8", engine.Sum, pre=-1.0).tolist() == [0]
        assert reduced([2**62 if first else 0], "int64", engine.Sum, post=1e3).tolist() == [2**63 - 1]
    with cases.case("NaN in Min and Max"):
        mine = [np.nan if rank == size - 1 else 1.0, np.nan if rank == 0 else 1.0]
        for dtype in ("float16", "float32", "float64"):
            assert np.isnan(reduced(mine, dtype, engine.Min)).all()
            assert np.isnan(reduced(mine, dtype, engine.Max)).all()
    with cases.case("of equal zeros the later rank's"):
        got = reduced([-0.0 if rank == size - 1 else 0.0], "float32", engine.Min)
        assert np.signbit(got[0])
        got = reduced([0.0 if rank == size - 1 else -0.0], "float32", engine.Max)
        assert not np.signbit(got[0])
    with cases.case("overflow is an infinity"):
        assert np.isinf(reduced([65504.0], "float16", engine.Sum)[0]) == (size > 1)
        assert reduced([65504.0], "float16", engine.Average)[0] == 65504.0
    with cases.case("denormal numbers are kept"):
        assert reduced([1e-45], "float32", engine.Max)[0] == np.float32(1e-45)
        assert reduced([1e-45], "float32", engine.Sum)[0] == np.float32(1e-45) * size
        assert reduced([6e-8], "float16", engine.Sum)[0] == np.float16(6e-8) * np.float16(size)
    with cases.case("any nonzero byte is true"):
        mine = np.frombuffer(bytes([2 if rank == 0 else 0, 255, 0]), np.bool_).copy()
        assert engine.allreduce(mine, engine.Sum).view(np.uint8).tolist() == [1, 1, 0]
        assert engine.allreduce(mine, engine.Min).view(np.uint8).tolist() == [1 if size == 1 else 0, 1, 0]
    with cases.case("rank order"):
        # 1e8 + 1 - 1e8 is 0 in float32, in this order only.
        order = {1: [0.25], 2: [1e8, 1.0], 3: [1e8, 1.0, -1e8], 4: [1.0, 1e8, -1e8, 0.5]}[size]
        total = np.float32(order[0])
        for value in order[1:]:
            total = np.float32(total + np.float32(value))
        for count in (1, 20_000, 700_000):  # one-shot, two chunks, many
            assert (reduced([order[rank]] * count, "float32", engine.Sum) == total).all()
    with cases.case("refusals of bool"):
        for op, pre, post in ((engine.Average, 1.0, 1.0), (engine.Sum, 2.0, 1.0), (engine.Max, 1.0, 0.5)):
            try:
                reduced([True], "bool", op, pre, post)
            except engine.errors.UnsupportedTensorError:
                continue
            raise AssertionError("not refused")
    return cases.done(11)
