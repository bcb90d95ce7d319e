"""Collectives on MXNet's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import engine

from ..on_ranks import Parts, on_ranks
from .environment import PYTHON

pytestmark = on_ranks(1, 2, 3, python=str(PYTHON))

DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")
KINDS = ("nd", "np")


def array(kind: str, values: Any, dtype: str) -> Any:
    """An array of one of MXNet's two interfaces."""
    import mxnet

    return getattr(mxnet, kind).array(np.asarray(values), dtype=dtype)


def values(rank: int, dtype: str) -> np.ndarray:
    """Values of shape [2, 3], small enough for sums in every dtype."""
    made = np.arange(6).reshape(2, 3) + rank
    return (made % 2 == 0) if dtype == "bool" else made.astype(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_the_five_collectives_give_arrays_of_the_same_kind(kind: str, rank: int, size: int, parts: Parts) -> None:
    import engine.mxnet as hvd

    everyone = range(size)
    for dtype in DTYPES:
        own = array(kind, values(rank, dtype), dtype)
        total = np.sum([values(each, dtype) for each in everyone], axis=0).astype(dtype)
        rows = np.concatenate([values(each, dtype) for each in everyone])
        results = {
            "allreduce": (hvd.allreduce(own, op=hvd.Sum), total),
            "max": (hvd.allreduce(own, op=hvd.Max), np.max([values(each, dtype) for each in everyone], axis=0)),
            "grouped": (hvd.grouped_allreduce([own, own], op=hvd.Sum)[1], total),
            "allgather": (hvd.allgather(own), rows),
            "grouped gather": (hvd.grouped_allgather([own, own])[0], rows),
            "broadcast": (hvd.broadcast(own, size - 1), values(size - 1, dtype)),
            "alltoall": (hvd.alltoall(array(kind, np.repeat(values(rank, dtype)[:1], size, 0), dtype)), rows[::2]),
        }
        if dtype != "bool":
            spread = array(kind, np.tile(values(rank, dtype), (size, 1)), dtype)
            results["reducescatter"] = hvd.reducescatter(spread, hvd.Sum), total
        in_place = array(kind, values(rank, dtype), dtype)
        results["in place"] = hvd.allreduce_(in_place, op=hvd.Sum), total
        assert results["in place"][0] is in_place
        given = array(kind, values(rank, dtype), dtype)
        results["broadcast in place"] = hvd.broadcast_(given, 0), values(0, dtype)
        for name, (result, expected) in results.items():
            with parts.part(f"{name} {dtype}"):
                assert type(result) is type(own)
                assert np.dtype(result.dtype) == dtype
                np.testing.assert_array_equal(result.asnumpy(), expected)


def test_rows_and_splits_may_differ(rank: int, size: int) -> None:
    import mxnet

    import engine.mxnet as hvd

    gathered = hvd.allgather(mxnet.nd.ones((rank + 1, 2)) * rank)
    splits = mxnet.nd.array(range(1, size + 1), dtype="int32")
    sent = mxnet.nd.ones((size * (size + 1) // 2, 2)) * rank
    received, counts = hvd.alltoall(sent, splits)
    shares = hvd.reducescatter(mxnet.nd.ones((2 * size + 1, 2)))
    expected = np.repeat(np.arange(size), np.arange(size) + 1)
    np.testing.assert_array_equal(gathered.asnumpy()[:, 0], expected)
    np.testing.assert_array_equal(received.asnumpy()[:, 0], np.repeat(np.arange(size), rank + 1))
    assert counts.asnumpy().tolist() == [rank + 1] * size
    assert counts.dtype is np.int32
    assert shares.shape == (3 if rank == 0 else 2, 2)


def test_arrays_without_rows_and_without_dimensions(rank: int, size: int) -> None:
    import mxnet

    import engine.mxnet as hvd

    with mxnet.util.np_shape(True):
        empty = hvd.allgather(mxnet.np.zeros((0, 3)))
        some = hvd.allgather(mxnet.np.ones((rank, 3)))
        number = hvd.allreduce(mxnet.np.array(rank + 1.0), op=hvd.Sum)
        assert (empty.shape, some.shape, number.shape) == ((0, 3), (size * (size - 1) // 2, 3), ())
        assert number.item() == size * (size + 1) / 2


def test_an_array_that_is_still_computed_is_waited_for(size: int) -> None:
    """MXNet computes lazily: its pointer alone would give the memory's former content."""
    import mxnet

    import engine.mxnet as hvd

    unit = mxnet.nd.eye(700)
    result = mxnet.nd.ones((700, 700))
    mxnet.nd.waitall()
    for _ in range(30):
        result[:] = mxnet.nd.dot(result, unit) + 1
    hvd.allreduce_(result, op=hvd.Sum)
    after = result * 2
    result[:] = 0
    np.testing.assert_array_equal(after.asnumpy(), np.full((700, 700), 62 * size))


def test_an_array_that_is_still_read_is_not_written_to(rank: int, size: int) -> None:
    import mxnet

    import engine.mxnet as hvd

    weight = mxnet.nd.ones((700, 700)) * (rank + 1)
    unit = mxnet.nd.eye(700)
    mxnet.nd.waitall()
    chain = unit
    for _ in range(10):
        chain = mxnet.nd.dot(chain, unit)
    late = mxnet.nd.dot(chain, weight)
    hvd.broadcast_(weight, size - 1)
    assert late.asnumpy()[0, 0] == rank + 1
    assert weight.asnumpy()[0, 0] == size


def test_compressed_arrays_travel_as_float16(size: int) -> None:
    import mxnet

    import engine.mxnet as hvd

    third = mxnet.nd.ones((4,)) / 3
    result = hvd.allreduce(third, compression=hvd.Compression.fp16)
    packed, context = hvd.Compression.fp16.compress(third)
    opened = hvd.Compression.fp16.decompress(packed, context)
    assert np.dtype(packed.dtype) == "float16"
    for each in (result, opened):
        assert np.dtype(each.dtype) == "float32"
        np.testing.assert_array_equal(each.asnumpy(), np.float16(third.asnumpy()).astype("float32"))


def test_what_cannot_be_sent_is_refused_by_name(rank: int, parts: Parts) -> None:
    import mxnet

    import engine.mxnet as hvd

    sparse = mxnet.nd.sparse.row_sparse_array(([[1.0, 2.0]], [rank]), shape=(4, 2))
    half = mxnet.nd.ones((2,)).astype(mxnet.ndarray.ndarray._DTYPE_MX_TO_NP[12])
    calls = {
        "use tostype": lambda: hvd.allreduce(sparse),
        "bfloat16": lambda: hvd.broadcast_(half, 0),
        "expected a mxnet.nd.NDArray, not list": lambda: hvd.allgather([1.0]),
        "MXNet casts no array": lambda: hvd.Compression.bf16.compress(mxnet.nd.ones((2,))),
    }
    for said, call in calls.items():
        with parts.part(said), pytest.raises((TypeError, engine.errors.UnsupportedTensorError), match=said):
            call()
    assert hvd.allreduce(mxnet.nd.ones((2,)), op=hvd.Average).asnumpy().tolist() == [1, 1]


@on_ranks(2, 3, python=str(PYTHON))
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_disagree_are_told_both_sides(kind: str, rank: int) -> None:
    import engine.mxnet as hvd

    with pytest.raises(engine.errors.MismatchError, match=r"float32\[2, 3\]"):
        hvd.allreduce(array(kind, np.ones((2, 3 + rank)), "float32"), name="differs")
    assert hvd.allreduce(array(kind, [1.0], "float32"), name="goes on").asnumpy().tolist() == [1.0]
