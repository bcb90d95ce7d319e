"""A change on rank 0 takes effect on every rank at the same schedule entry; other ranks may not change anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import engine
from engine.session import runtime

from ..on_ranks import on_ranks, spare
from ..waiting import meet
from .arrays import refused

pytestmark = on_ranks(1, 2, 3, spare(4), world={"cycle_time_ms": 1})

CHANGES: list[dict[str, Any]] = [
    {"fusion_threshold": 0},
    {"cycle_time_ms": 3},
    {"stores": "streaming"},
    {"chunk_bytes": 65536},
    {"fusion_threshold": 1 << 20, "cycle_time_ms": 0.0, "stores": "cached", "chunk_bytes": 1 << 20},
    {"stores": "auto"},
    {"compression": "bf16"},
]
KEYS = ("type", "kind", "knob_version", "tensors", "bytes", "name", "algorithm", "stores")


@on_ranks(1, 2, 3, 4, world={"cycle_time_ms": 1, "stores": "auto"})
def test_before_any_change() -> None:
    now = engine.knobs()
    assert now["version"] == 0 and now["cycle_time_ms"] == 1 and now["fusion_threshold"] == 64 << 20


@pytest.mark.sample(8)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()))
def test_a_change_is_at_one_entry_for_all_ranks(change: dict[str, Any], rank: int) -> None:
    before = engine.knobs()
    version = before["version"] + 1
    handles = [engine.allreduce_async(np.ones(1000, np.float32), engine.Sum, f"{k}") for k in range(100)]
    if rank == 0:
        assert engine.set_knobs(**change) == version
    handles += [engine.allreduce_async(np.ones(1000, np.float32), engine.Sum, f"{k}+") for k in range(100)]
    for handle in handles:
        engine.synchronize(handle)
    engine.barrier()
    seen = engine.knobs()
    rows = {row["entry"]: row for row in runtime.current_engine().history()}
    mine = {entry: [row[key] for key in KEYS] for entry, row in rows.items()}
    records = engine.allgather_object(mine)
    everybodys = engine.allgather_object(seen)
    assert seen == {**before, **change, "version": version, "entry": seen["entry"]}, (seen, before)
    assert {entry for entry, row in rows.items() if row["knob_version"] == version} == {
        entry for entry in rows if entry >= seen["entry"]
    }
    common = set.intersection(*(set(record) for record in records))
    assert seen["entry"] in common and len(common) > 100
    assert all(record[entry] == mine[entry] for entry in common for record in records)
    assert len({str(each) for each in everybodys}) == 1


@pytest.mark.parametrize("threshold", [0, 64 << 20])
def test_a_threshold_of_0_sends_every_tensor_alone_and_a_large_one_fuses(threshold: int, rank: int, size: int) -> None:
    if rank == 0:
        engine.set_knobs(fusion_threshold=threshold, cycle_time_ms=10_000)
    for name in ("before", "behind", *map(str, range(100))):
        engine.allreduce(np.ones(1000, np.float32), engine.Sum, name)
    engine.barrier("names are known")
    before = engine.counters()
    handles = [engine.allreduce_async(np.ones(1000, np.float32), engine.Sum, f"{k}") for k in range(100)]
    meet(f"all are brought.{threshold}", rank, size)  # no thread waits in the engine until then
    engine.barrier("names are known")  # Somebody waits: the batch closes with what all ranks have brought.
    for handle in handles:
        engine.synchronize(handle)
    after = engine.counters()
    entries, tensors = (after[key] - before[key] for key in ("entries", "tensors"))
    assert tensors == 101
    assert entries == 101 if threshold == 0 else entries <= 10, entries


def test_values_that_cannot_be_and_ranks_that_may_not(rank: int) -> None:
    if rank == 0:
        refused(lambda: engine.set_knobs(chunk_size=65536), "there is no knob 'chunk_size'", engine.errors.ConfigError)
        refused(lambda: engine.set_knobs(kernels="plain"), "there is no knob 'kernels'", engine.errors.ConfigError)
        refused(lambda: engine.set_knobs(fusion_threshold=-1), "fusion_threshold", engine.errors.ConfigError)
        refused(lambda: engine.set_knobs(cycle_time_ms=-1), "cycle_time_ms", engine.errors.ConfigError)
        refused(lambda: engine.set_knobs(stores="slow"), "stores", engine.errors.ConfigError)
        refused(lambda: engine.set_knobs(chunk_bytes=3), "chunk_bytes", engine.errors.ConfigError)
    else:
        said = f"was called on rank {rank}; rank 0 decides"
        refused(lambda: engine.set_knobs(cycle_time_ms=7), said, engine.errors.EngineError)
        refused(lambda: runtime.current_engine().set_knobs(cycle_time_ms=7.0), "rank 0", engine.errors.EngineError)
