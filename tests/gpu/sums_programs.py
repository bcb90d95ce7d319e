"""Programs of ranks for tests of sums on GPUs, which are stand-ins: their bits, and what travels together.

python -m tests.gpu.sums_programs NAME RANK SIZE KERNELS ...
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from engine.errors import DeviceError
from engine.native import gradients

from ..waiting import be_late
from .allreduce_programs import DTYPES, OPS, Binding, Parameter, allreduce, core, main, on_host, values
from .device_tensors import DeviceTensor
from .plane_programs import Rank, planes

try:
    from ml_dtypes import bfloat16

    ALL_DTYPES: tuple[Any, ...] = (bfloat16, *DTYPES)
except ImportError:
    ALL_DTYPES = DTYPES

HOW = [  # factors, and the wire dtype of floats
    {},
    {"prescale": 0.3, "postscale": -1.7},
    {"wire": "float16"},
    {"wire": "bfloat16", "prescale": 1.1, "postscale": 0.7},
]


def drawn(rank: int, count: int, dtype: Any) -> np.ndarray:
    """Return values whose sum depends on the order, with all special floats."""
    rng = np.random.default_rng([rank, count])
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    if kind.kind in "iu":
        return np.frombuffer(rng.bytes(count * kind.itemsize), kind).copy()
    values = rng.normal(size=count) * np.exp(rng.normal(size=count) * 3)
    special = rng.random(count)
    for k, each in enumerate((np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-7, 6e4)):
        values[(special > 0.01 * k) & (special < 0.01 * (k + 1))] = each
    with np.errstate(all="ignore"):
        return values.astype(kind)


def expect_bits(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Check that bits are equal, except those of NaNs, which must be NaNs on both sides."""
    if got.dtype.kind not in "iub":
        nan = np.isnan(wanted.astype(np.float64))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), nan, what)
        got, wanted = got[~nan], wanted[~nan]
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), wanted.view(f"u{got.itemsize}"), what)


def cases() -> list[tuple[Any, dict[str, Any]]]:
    """Return every dtype and reduction, with its factors and wire dtypes."""
    found = []
    for dtype, op, how in itertools.product(ALL_DTYPES, OPS, HOW):
        name = np.dtype(dtype).name
        if (name == "bool" and (op == "average" or how)) or ("wire" in how and name not in ("float32", "float64")):
            continue
        found.append((dtype, {"op": op, **how}))
    return found


def ordered(me: Rank) -> None:
    """Check that device_sums=ordered gives the bits of host memory for every dtype and reduction, however fused."""
    me.cuda.stand_hosts_are_one(1)  # waiters learn from memory what the CUDA thread has seen done
    planes.SLAB, planes.TABLES = 1 << 16, 1 << 12
    wanted: dict[tuple[int, int], np.ndarray] = {}
    counts = (1, 3, 501, 9001)
    for threshold in (0, 10_000, 64 << 20):
        with me.world(f"ordered {threshold}", cycle_time_ms=5.0, fusion_threshold=threshold, device_sums="ordered"):
            for k, (dtype, how) in enumerate(cases()):
                given = [DeviceTensor(drawn(me.rank, count, dtype), late=0.2) for count in counts]
                got = [each if k % 2 else DeviceTensor(np.zeros_like(each.like)) for each in given]
                pairs = enumerate(zip(given, got, strict=True))
                handles = [allreduce(*pair, f"tensor {k} {n}", **how) for n, pair in pairs]
                for n, (count, handle, tensor) in enumerate(zip(counts, handles, got, strict=True)):
                    handle.wait()
                    if (k, n) not in wanted:
                        wanted[k, n] = on_host(drawn(me.rank, count, dtype), **how)
                    expect_bits(tensor.numpy(), wanted[k, n], f"{np.dtype(dtype).name} {how} {count} {threshold}")
            group = [drawn(me.rank, 700 + n, dtype) for n, dtype in enumerate(ALL_DTYPES)]
            tensors = [DeviceTensor(each, late=0.5) for each in group]
            core().allreduce_group(tensors, tensors, "group", OPS["sum"], 1.0, 1.0).wait()
            for tensor, each in zip(tensors, group, strict=True):
                expect_bits(tensor.numpy(), on_host(each), f"group, {each.dtype}, {threshold}")


def differs(me: Rank) -> None:
    """Set ranks differently: the first tensor on a GPU reports it on all of them."""
    with me.world("differs", device_sums="ordered" if me.rank == 1 else "nccl"):
        tensor = DeviceTensor(np.zeros(3, np.float32))
        with pytest.raises(DeviceError) as caught:
            allreduce(tensor, tensor, "tensor")
        print(f"refused: {caught.value}")
        me.works()


def frozen(me: Rank) -> None:
    """Check sums of gradients, alone in the first pass and in equal batches afterwards, whichever rank is late."""
    drawn = random.Random(me.rank)
    counts = list(range(100, 140))
    with me.world("frozen", cycle_time_ms=1.0, fusion_threshold=8192):
        parameters = [Parameter(count) for count in counts]
        group = gradients.GradientGroup(core(), Binding(parameters), OPS["sum"])
        hooks = [group.add(each, f"gradient {each.count}", None) for each in parameters]
        passes: list[list[tuple[Any, ...]]] = []
        seen = 0
        for _ in range(6):
            for k in reversed(range(len(counts))):
                be_late(drawn.random() * 0.002)
                parameters[k].grad = DeviceTensor(values(me.rank, counts[k], "float32"), late=0.2)
                hooks[k](parameters[k])
            group.finish()
            for parameter in parameters:
                wanted = sum(values(rank, parameter.count, "float32") for rank in range(me.size))
                np.testing.assert_array_equal(parameter.grad.numpy(), wanted)
            rows = [row for row in core().history() if row["algorithm"] == "device" and row["entry"] >= seen]
            passes.append(sorted((row["name"], row["tensors"], row["bytes"], row["frozen"]) for row in rows))
            seen = 1 + max(row["entry"] for row in rows)
        assert len(passes[0]) == len(counts) and not any(row[3] for row in passes[0])
        assert 2 < len(passes[1]) < len(counts) / 2 and all(row[3] for row in passes[1])
        assert all(later == passes[1] for later in passes[1:]), passes


if __name__ == "__main__":
    main({program.__name__: program for program in (ordered, differs, frozen)})
