"""Tensors of torch in every layout, and NumPy, torch and DLPack in one world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import CollectiveError

from ..on_ranks import on_ranks, spare
from ..parallel.arrays import refused, small_numbers

torch = pytest.importorskip("torch", reason="needs torch")

pytestmark = on_ranks(1, 2, 3, spare(4))

Make = Callable[[int], Any]


class Lent:
    """Tensor that offers DLPack and nothing else, as a library without a binding would."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def plain(*shape: int, dtype: str = "float32") -> Make:
    return lambda rank: torch.from_numpy(small_numbers(dtype, shape, rank).copy())


IMAGE, VOLUME = plain(2, 8, 5, 6), plain(2, 3, 4, 5, 6)
LAYOUTS: dict[str, Make] = {
    "0-d": plain(),
    "no elements": plain(0, 4),
    "two dimensions": plain(30, 40),
    "channels_last": lambda rank: IMAGE(rank).contiguous(memory_format=torch.channels_last),
    "channels_last, one channel": lambda rank: IMAGE(rank)[:, :1].contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda rank: VOLUME(rank).contiguous(memory_format=torch.channels_last_3d),
    "large channels_last": lambda r: plain(4, 64, 50, 51)(r).contiguous(memory_format=torch.channels_last),
    "transposed": lambda rank: plain(30, 40)(rank).t(),
    "a slice": lambda rank: plain(30, 40)(rank)[3:20],
    "columns": lambda rank: plain(30, 40)(rank)[:, 3:20],
    "expanded and copied": lambda rank: plain(30, 1)(rank).expand(30, 4).clone(),
    "offset by one": lambda rank: plain(3001)(rank)[1:],
    "bfloat16": lambda rank: plain(3001)(rank).bfloat16(),
    "a parameter": lambda rank: torch.nn.Parameter(plain(5, 6)(rank)).data,
    "negated lazily": lambda rank: torch.complex(plain(9)(rank), plain(9)(rank)).conj().imag,
    "negated lazily, contiguous": lambda rank: torch.complex(plain(1)(rank), plain(1)(rank) + 3).conj().imag,
    "fourteen dimensions": lambda rank: plain(*(1, 2) * 6, 3, 1)(rank),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout(layout: str, rank: int, size: int) -> None:
    """It is reduced out of place and in place."""
    make = LAYOUTS[layout]
    want = sum((make(other).double() for other in range(1, size)), make(0).double())
    mine = make(rank)
    apart = engine.allreduce(mine, engine.Sum)
    target = make(rank)
    strides = target.stride()
    result = engine.allreduce_(target, engine.Sum)
    assert torch.equal(mine, make(rank)), "the input was written to"
    assert result is target and target.stride() == strides
    assert apart.dtype == mine.dtype and not apart.requires_grad
    assert torch.equal(apart.double(), want)
    assert torch.equal(target.double(), want)


def test_requires_grad(size: int) -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert not engine.allreduce(leaf, engine.Sum).requires_grad
    assert engine.allreduce_(leaf, engine.Sum) is leaf and leaf.tolist() == [size] * 3


def test_layouts_that_differ_between_ranks_are_no_mismatch(rank: int, size: int) -> None:
    mine = IMAGE(rank) if rank == 0 else IMAGE(rank).contiguous(memory_format=torch.channels_last)
    want = sum((IMAGE(other) for other in range(1, size)), IMAGE(0))
    assert torch.equal(engine.allreduce(mine, engine.Sum, "layouts"), want)
    for turn in range(3):  # by every way, which a rank's earlier calls do not change
        given = mine.clone(memory_format=torch.preserve_format)
        way = (rank + turn) % 3
        if way == 0:
            given = engine.allreduce(given, engine.Sum, "layouts")
        elif way == 1:
            engine.allreduce_(given, engine.Sum, "layouts")
        else:
            engine.allreduce_(given, engine.Sum, "layouts", prescale_factor=1)
        assert torch.equal(given, want)


class Refusing(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined,misc]
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.is_neg:
            raise ValueError("this mode refuses to look")
        return function(*args, **(kwargs or {}))


@on_ranks(2, 3)
def test_what_a_mode_raises_is_told(rank: int, size: int) -> None:
    tensor = torch.ones(3)
    for _ in range(2):
        engine.allreduce_(tensor, engine.Sum)
    if rank == 0:
        with Refusing(), pytest.raises(ValueError, match="refuses to look"):
            engine.allreduce_(tensor, engine.Sum)
    else:
        with pytest.raises(CollectiveError, match="refuses to look"):
            engine.allreduce_(tensor, engine.Sum)
    after = torch.ones(2)
    assert engine.allreduce_(after, engine.Sum).tolist() == [size] * 2


def test_libraries_mixed_in_one_operation(rank: int, size: int) -> None:
    for index in range(3):
        mine = np.full(5, rank, np.float32)
        for kind in range(3):
            choice = (rank + kind) % 3
            value = (mine.copy(), torch.from_numpy(mine.copy()), Lent(mine.copy()))[choice]
            got = engine.allreduce(value, engine.Sum, f"mixed {index} {kind}")
            assert np.asarray(got).tolist() == [size * (size - 1) / 2] * 5
            assert isinstance(got, torch.Tensor) == (choice == 1)


def test_dlpack_in_place(rank: int, size: int) -> None:
    mine = np.full(5, rank, np.float32)
    lent = Lent(mine)
    assert engine.allreduce_(lent, engine.Sum) is lent
    assert mine.tolist() == [size * (size - 1) / 2] * 5


def test_dlpack_gathered_and_broadcast(rank: int, size: int) -> None:
    got = engine.allgather(Lent(np.full((2, 3), rank, np.int32)))
    assert np.asarray(got).tolist() == [[other] * 3 for other in range(size) for _ in range(2)]
    assert np.asarray(engine.broadcast(Lent(np.full(3, rank, np.int64)), size - 1)).tolist() == [size - 1] * 3


def test_refusals() -> None:
    refused(lambda: engine.allreduce(torch.ones(3, dtype=torch.complex64)), "dtype")
    refused(lambda: engine.allreduce(torch.ones(3).to(torch.float8_e5m2)), "float8_e5m2")
    refused(lambda: engine.allreduce(torch.ones(3).to_sparse()), "sparse")
    refused(lambda: engine.allreduce(torch.ones(3, device="meta")), "meta")
    unaligned = torch.frombuffer(bytearray(13), dtype=torch.float32, count=3, offset=1)
    refused(lambda: engine.allreduce(unaligned, engine.Sum), "copy it")


def test_a_float_environment_that_flushes_denormals(size: int) -> None:
    tiny = np.ones(200_000, np.uint32).view(np.float32)
    torch.set_flush_denormal(True)
    got = engine.allreduce(tiny[:2000], engine.Average)
    many = engine.allreduce(tiny, engine.Sum)
    flushed = float(torch.full((8,), 2e-38).mul(0.1).sum())
    torch.set_flush_denormal(False)
    assert got.view(np.uint32).tolist() == [1] * 2000
    assert (many.view(np.uint32) == size).all()
    assert flushed == 0.0, "the caller's environment was not restored"


# ---- what is moved only


MOVED = "complex32 complex64 complex128 uint32 uint64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"


@pytest.mark.parametrize("name", MOVED.split())
def test_a_dtype_that_is_moved_only(name: str, rank: int, size: int) -> None:
    """Dtypes of torch that cannot be reduced travel as bytes, also at addresses that are no multiple of their size."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("an old torch")

    def values(other: int) -> Any:
        count = 6 * size * dtype.itemsize
        anything = np.random.default_rng([other, dtype.itemsize]).integers(0, 256, count, np.uint8)
        return torch.from_numpy(anything).view(dtype).view(2 * size, 3)

    def same(got: Any, want: Any) -> None:
        assert got.dtype == want.dtype and got.shape == want.shape
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))

    mine, everyone = values(rank), [values(other) for other in range(size)]
    target = mine.clone()
    first, last = engine.broadcast_(target, 0), engine.broadcast(mine, size - 1)
    gathered, sent = engine.allgather(mine), engine.alltoall(mine, [2] * size)[0]
    both = engine.grouped_allgather([torch.ones(1), mine.t()])[1]
    same(last, everyone[-1])
    same(first, everyone[0])
    same(target, everyone[0])
    same(gathered, torch.cat([each.view(torch.uint8) for each in everyone]).view(dtype))
    rows = [each[2 * rank : 2 * rank + 2].contiguous().view(torch.uint8) for each in everyone]
    same(sent, torch.cat(rows).view(dtype))
    same(both, torch.cat([each.t().contiguous().view(torch.uint8) for each in everyone]).view(dtype))


def test_a_complex_view_that_begins_anywhere_and_one_that_is_conjugated_lazily(rank: int, size: int) -> None:
    memory = bytearray(np.arange(7, dtype=np.float32).tobytes())
    mine = torch.frombuffer(memory, dtype=torch.complex64, count=3, offset=4)
    assert engine.allgather(mine).tolist() == mine.tolist() * size
    assert engine.broadcast(mine.conj(), 0).tolist() == mine.conj().resolve_conj().tolist()
    lazy = torch.complex(torch.ones(2), torch.full((2,), float(rank))).conj()
    assert engine.broadcast_(lazy, size - 1).tolist() == [complex(1, 1 - size)] * 2


@on_ranks(2, 3, 4)
def test_moved_dtypes_that_differ(rank: int) -> None:
    kinds = [torch.float8_e5m2, torch.float8_e4m3fn]
    mine = torch.zeros(3).to(kinds[rank % 2])
    refused(lambda: engine.broadcast(mine, 0, "float8"), "float8_e4m3fn[3]", engine.errors.MismatchError)
    pair = [torch.zeros(3).to(kinds[rank % 2]), torch.ones(2)]
    said = refused(lambda: engine.grouped_allgather(pair, "pair8"), "2 tensors", engine.errors.MismatchError)
    assert "other dtypes 1 elements in a row" in said, said
