"""Sums that travel block-scaled between hosts, `Compression.fp8`: equal bits on all ranks, and those of a formula.

Ranks are threads of this process, and hosts are segments in it (thread_world.py).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import engine
from engine import Compression
from engine.metrics import page
from engine.session import runtime

from ..block_reference import BLOCK, blocks_of_ranks
from ..waiting import be_late
from .arrays import refused
from .operation_table import Array
from .thread_world import ThreadWorld

FP8 = Compression.fp8
LAYOUTS = [
    (0, 1),
    (0, 0, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 1, 1, 2),
    (0, 1, 1, 1, 2, 2, 3, 3),
    (0, 1, 2, 3, 4),
    (0, 0, 0, 0, 1),
]
layouts = pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))
COUNTS = [0, 1, 2, 63, 64, 65, 127, 1000, 4096, 70_001]
PLANS: list[dict[str, Any]] = [
    {},
    {"fusion_threshold": 0, "chunk_bytes": 4096},
    {"fusion_threshold": 64 << 10, "chunk_bytes": 1 << 20, "sockets_per_lane": 2},
    {"fusion_threshold": 1 << 30, "chunk_bytes": 100_001, "cycle_time_ms": 0.0},
]


def values(count: int, rank: int, seed: int = 0, dtype: str = "float32") -> Array:
    """Numbers of a rank of very unequal sizes, with a few zeros among them."""
    rng = np.random.default_rng([count, rank, seed])
    sizes = np.exp2(rng.integers(-12, 12, count) if dtype != "float16" else rng.integers(-6, 4, count))
    return (rng.standard_normal(count) * sizes * (rng.random(count) > 0.05)).astype(dtype)


def check_bits(got: Sequence[Array], want: Array, about: object = "") -> None:
    """Raise unless all ranks' results have the same bytes, and those expected."""
    for rank, each in enumerate(got):
        assert each.tobytes() == got[0].tobytes(), f"ranks 0 and {rank} differ: {about}"
    assert got[0].dtype == want.dtype and got[0].shape == want.shape
    assert got[0].tobytes() == want.tobytes(), f"other bits than the formula's: {about}"


def algorithms(world: ThreadWorld) -> dict[str, tuple[str, str]]:
    """Algorithm and compression of the last entry of each name."""
    rows = [row for row in world.engines[0].history() if row["type"] == "batch"]
    return {row["name"]: (row["algorithm"], row["compression"]) for row in rows}


# ---- bits


@pytest.mark.sample(3)
@layouts
@pytest.mark.parametrize("plan", range(len(PLANS)))
def test_all_ranks_have_the_bits_of_the_formula_whatever_is_fused(hosts: tuple[int, ...], plan: int) -> None:
    """Rows 1 to 3: whoever owns a part, whatever travels together, in one shot or in chunks."""

    def work(rank: int) -> list[Array]:
        handles = [
            engine.allreduce_async(values(count, rank), op, f"{count} {op}", compression=FP8)
            for count in COUNTS
            for op in (engine.Sum, engine.Average)
        ]
        found = [engine.synchronize(handle) for handle in handles]
        alone = engine.allreduce(values(63, rank), engine.Sum, "alone", compression=FP8)
        large = engine.allreduce(values(2_700_000 if plan == 0 else 9, rank), engine.Average, "large", compression=FP8)
        return [*found, alone, large]

    with ThreadWorld(len(hosts), hosts, **PLANS[plan]) as world:
        found = world.run(work)
        assert ("blocks", "fp8") in algorithms(world).values()
        assert ("one-shot", "fp8") in algorithms(world).values() or plan == 3
    wanted = [(count, average) for count in COUNTS for average in (False, True)]
    wanted += [(63, False), (2_700_000 if plan == 0 else 9, True)]
    for k, (count, average) in enumerate(wanted):
        want = blocks_of_ranks([values(count, rank) for rank in range(len(hosts))], hosts, average)
        check_bits([each[k] for each in found], want, (count, average))


def drawn_plan(seed: int) -> tuple[tuple[int, ...], dict[str, Any], list[int]]:
    """A layout, settings and sizes of tensors, drawn."""
    rng = random.Random(seed)
    hosts = [0]
    while len(hosts) < rng.randint(2, 7) or max(hosts) == 0:
        hosts.append(rng.randint(0, max(hosts) + 1))
    settings = {
        "fusion_threshold": rng.choice([0, 64 << 10, 333_333, 1 << 30]),
        "chunk_bytes": rng.choice([4096, 65_536, 100_001, 1 << 20]),
        "sockets_per_lane": rng.randint(1, 3),
    }
    counts = [rng.choice([rng.randint(0, 200), rng.randint(0, 20_000), rng.randint(0, 600_000)]) for _ in range(9)]
    return tuple(hosts), settings, counts


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(16))
def test_drawn_layouts_plans_and_sizes(seed: int) -> None:
    hosts, settings, counts = drawn_plan(seed)
    size = len(hosts)

    def work(rank: int) -> list[Array]:
        order = list(range(len(counts)))
        handles = {
            k: engine.allreduce_async(values(counts[k], rank, k), engine.Average, f"{k}", compression=FP8)
            for k in order
        }
        return [engine.synchronize(handles[k]) for k in order]

    with ThreadWorld(size, hosts, **settings) as world:
        found = world.run(work)
    for k, count in enumerate(counts):
        want = blocks_of_ranks([values(count, rank, k) for rank in range(size)], hosts, True)
        check_bits([each[k] for each in found], want, (hosts, settings, count))


def test_small_tensors_have_the_same_bits_alone_and_fused_with_large_ones() -> None:
    """Row 3: one-shot is the same arithmetic."""
    hosts = (0, 1, 1)

    def work(rank: int) -> tuple[Array, Array]:
        mine = values(777, rank)
        alone = engine.allreduce(mine, engine.Average, "alone", compression=FP8)
        both = [values(2_500_000, rank), mine]
        return alone, engine.grouped_allreduce(both, engine.Average, "with a large one", compression=FP8)[1]

    with ThreadWorld(3, hosts) as world:
        found = world.run(work)
        assert algorithms(world) == {"alone": ("one-shot", "fp8"), "with a large one": ("blocks", "fp8")}
    want = blocks_of_ranks([values(777, rank) for rank in range(3)], hosts, True)
    check_bits([each for both in found for each in both], want)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1)], ids=["01", "001"])
def test_floats_of_every_dtype_and_factors(hosts: tuple[int, ...], dtype: str) -> None:
    """Row 21: halves and float64 by way of float32."""
    size = len(hosts)
    cases = [
        (count, average, pre, post)
        for count in (65, 40_001)
        for average in (False, True)
        for pre, post in ((1.0, 1.0), (0.3, -1.7))
    ]

    def work(rank: int) -> list[Array]:
        found = []
        for k, (count, average, pre, post) in enumerate(cases):
            op = engine.Average if average else engine.Sum
            mine = values(count, rank, k, dtype)
            found.append(engine.allreduce(mine, op, f"{k}", pre, post, compression=FP8))
            engine.allreduce_(mine, op, f"{k} in place", pre, post, compression=FP8)
            found.append(mine)
        return found

    with ThreadWorld(size, hosts) as world:
        found = world.run(work)
        assert set(algorithms(world).values()) == {("one-shot", "fp8"), ("blocks", "fp8")}
    for k, (count, average, pre, post) in enumerate(cases):
        want = blocks_of_ranks([values(count, rank, k, dtype) for rank in range(size)], hosts, average, pre, post)
        check_bits([each[j] for each in found for j in (2 * k, 2 * k + 1)], want, cases[k])


def test_bfloat16_goes_by_way_of_float32() -> None:
    """Row 21, for the dtype that NumPy lacks."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    hosts = (0, 1, 1)

    def mine(count: int, rank: int) -> Any:
        return values(count, rank).astype(bfloat16)

    def work(rank: int) -> list[Any]:
        return [
            engine.allreduce(mine(count, rank), engine.Average, f"{count}", compression=FP8) for count in (65, 40_001)
        ]

    with ThreadWorld(3, hosts) as world:
        found = world.run(work)
    for k, count in enumerate((65, 40_001)):
        wide = [mine(count, rank).astype(np.float32) for rank in range(3)]
        want = blocks_of_ranks(wide, hosts, True).astype(bfloat16)
        assert all(each[k].tobytes() == want.tobytes() for each in found)


def test_coding_twice_changes_nothing() -> None:
    """The average of equal results is what it was, where each host has a power of two of ranks."""

    def work(rank: int) -> bool:
        once = engine.allreduce(values(50_000, rank), engine.Average, "once", compression=FP8)
        again = engine.allreduce(once, engine.Average, "again", compression=FP8)
        return again.tobytes() == once.tobytes()

    with ThreadWorld(4, (0, 0, 1, 1)) as world:
        assert all(world.run(work))


# ---- what is not finite, tiny or huge


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1)], ids=["01", "0011"])
@pytest.mark.parametrize("count", [200, 30_000])
def test_what_is_not_finite_makes_its_block_a_nan_on_all_ranks(hosts: tuple[int, ...], count: int) -> None:
    """Row 5: on each rank, at each place of a block, in shares of each owner; neighbours keep their values."""
    size = len(hosts)
    places = [*range(0, count, 61 if count < 1000 else 3001), count - 1]
    cases = [(rank, at, wrong) for rank in range(size) for at in places for wrong in (np.inf, -np.inf, np.nan)]

    def brought(rank: int, k: int) -> Array:
        mine = values(count, rank)
        if cases[k][0] == rank:
            mine[cases[k][1]] = cases[k][2]
        return mine

    def work(rank: int) -> list[Array]:
        handles = [
            engine.allreduce_async(brought(rank, k), engine.Sum, f"{k}", compression=FP8) for k in range(len(cases))
        ]
        return [engine.synchronize(handle) for handle in handles]

    with ThreadWorld(size, hosts) as world:
        found = world.run(work)
    clean = blocks_of_ranks([values(count, rank) for rank in range(size)], hosts)
    for k, (_, at, _) in enumerate(cases):
        block = np.arange(count) // BLOCK == at // BLOCK
        for each in found:
            assert np.isnan(each[k][block]).all()
            assert each[k][~block].tobytes() == clean[~block].tobytes()
            assert each[k].tobytes() == found[0][k].tobytes()


def test_tiny_and_huge_numbers() -> None:
    """Rows 6 and 7: denormal blocks make no NaN, and what is no larger than 0.96 of the largest float32 no infinity."""
    sizes = (1e-44, 1e-40, 1e-37, 1e-30, 0.0, 3.26e38)

    def brought(size: float, count: int, rank: int) -> Array:
        if size > 1:
            return np.full(count, size * (rank == 0), np.float32)
        return (np.random.default_rng(rank).standard_normal(count) * size).astype(np.float32)

    def work(rank: int) -> list[Array]:
        return [
            engine.allreduce(brought(size, count, rank), engine.Sum, f"{size} {count}", compression=FP8)
            for size in sizes
            for count in (100, 20_000)
        ]

    with ThreadWorld(2, (0, 1)) as world:
        found = world.run(work)
    assert all(np.isfinite(each).all() for rank in found for each in rank)
    assert all(found[0][k].tobytes() == found[1][k].tobytes() for k in range(len(found[0])))
    assert (found[0][-1] > 3e38).all()


# ---- groups, ranks without tensors, ranks that have joined


def group_of(rank: int, seed: int = 0) -> list[Array]:
    """Tensors whose blocks would straddle members if these lay one behind the other."""
    return [values(count, rank, 10 * seed + k) for k, count in enumerate((1, 63, 65, 1, 5000, 64, 20_001, 3))]


@layouts
def test_each_member_of_a_group_has_blocks_of_its_own(hosts: tuple[int, ...]) -> None:
    """Row 4."""
    size = len(hosts)

    def work(rank: int) -> list[Array]:
        return engine.grouped_allreduce(group_of(rank), engine.Average, "group", compression=FP8)

    with ThreadWorld(size, hosts) as world:
        found = world.run(work)
    for k in range(len(group_of(0))):
        want = blocks_of_ranks([group_of(rank)[k] for rank in range(size)], hosts, True)
        check_bits([each[k] for each in found], want, k)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1), (0, 0, 1, 1, 2)], ids=["01", "0011", "00112"])
def test_groups_and_tensors_while_ranks_have_joined(hosts: tuple[int, ...], many: bool) -> None:
    """Rows 4 and 14: ranks that stand in plan the same blocks; whole hosts join, and averages divide by all."""
    size = len(hosts)
    gone = {rank for rank in range(size) if hosts[rank] == 1} if many else {size - 1}

    def brought(rank: int) -> list[Array]:
        return [each for each in group_of(rank) if many or each.size < 100]

    def work(rank: int) -> list[list[Array]]:
        found = []
        for turn in range(3):
            if rank in gone:
                engine.join()
                continue
            both = [
                engine.grouped_allreduce_async(brought(rank), engine.Average, f"group {turn} {k}", compression=FP8)
                for k in range(2)
            ]
            single = engine.allreduce(values(30_000, rank), engine.Average, f"single {turn}", compression=FP8)
            found += [*map(engine.synchronize, both), [single]]
            engine.join()
        return found

    with ThreadWorld(size, hosts) as world:
        found = [each for rank, each in enumerate(world.run(work)) if rank not in gone]

    def want(of: Any) -> Array:
        return blocks_of_ranks([None if rank in gone else of(rank) for rank in range(size)], hosts, True)

    for turn in range(3):
        for number in range(2):
            for k in range(len(brought(0))):
                results = [each[3 * turn + number][k] for each in found]
                check_bits(results, want(lambda rank, k=k: brought(rank)[k]), (turn, k))
        check_bits([each[3 * turn + 2][0] for each in found], want(lambda rank: values(30_000, rank)), turn)


def test_a_group_of_mixed_dtypes_sends_the_others_as_they_are() -> None:
    hosts = (0, 0, 1)
    dtypes = ("float32", "int32", "float64", "float16", "int64", "bool")

    def brought(rank: int, count: int) -> list[Array]:
        whole = [np.full(count + k, rank if dtype == "bool" else rank + 1, dtype) for k, dtype in enumerate(dtypes)]
        return [values(count + k, rank, k, dtype) if "float" in dtype else whole[k] for k, dtype in enumerate(dtypes)]

    def work(rank: int) -> list[list[Array]]:
        return [
            engine.grouped_allreduce(brought(rank, count), engine.Sum, f"{count}", compression=FP8)
            for count in (5, 300_001)
        ]

    with ThreadWorld(3, hosts) as world:
        found = world.run(work)
        assert set(algorithms(world).values()) == {("one-shot", "fp8")}
    for turn, count in enumerate((5, 300_001)):
        for k, dtype in enumerate(dtypes):
            tensors = [brought(rank, count)[k] for rank in range(3)]
            want = (
                blocks_of_ranks(tensors, hosts)
                if "float" in dtype
                else np.full_like(tensors[0], True if dtype == "bool" else 6)
            )
            check_bits([each[turn][k] for each in found], want, (count, dtype))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16", "float64"])
@pytest.mark.parametrize("first", range(3))
def test_a_group_of_mixed_dtypes_beside_others(first: int, dtype: str) -> None:
    """The first operation of an entry chooses how all travel, so a group that cannot travel so is in another."""

    def work(rank: int) -> None:
        room = np.full(3000, 7, dtype)  # what lies behind the tensor is nobody's
        odd, counts = room[:1000], np.full(100, rank + 1.0, np.float32)
        pure = [np.full(count, rank + 1.0, np.float32) for count in (50, 70)]
        plain = np.full(40_000, rank + 1.0, np.float32)
        odd[:] = rank + 1
        submit = [
            lambda name: engine.grouped_allreduce_async_([counts, odd], engine.Sum, name, compression=FP8),
            lambda name: engine.grouped_allreduce_async_(pure, engine.Sum, name, compression=FP8),
            lambda name: engine.allreduce_async_(plain, engine.Sum, name, compression=FP8),
        ]
        handles = [submit[(first + k) % 3](f"{(first + k) % 3}") for k in range(3)]
        for handle in reversed(handles):
            handle.wait()
        for tensor in (odd, counts, *pure, plain):
            assert (tensor == 3).all(), (rank, dtype, first, tensor.dtype, tensor[tensor != 3][:5])
        assert (room[1000:] == 7).all()

    with ThreadWorld(2, (0, 1), cycle_time_ms=30.0) as world:
        for _ in range(4):
            world.run(work)


# ---- where nothing is coded


def test_one_host_loses_nothing() -> None:
    """Row 12: neither bits, nor views in shared memory."""

    def work(rank: int) -> tuple[Array, Array]:
        mine = np.frombuffer(runtime.current_engine().share(4 * 50_000), np.float32)
        mine[:] = values(50_000, rank)
        plain = engine.allreduce(values(50_000, rank), engine.Average, "plain")
        coded = engine.allreduce(values(50_000, rank), engine.Average, "coded", compression=FP8)
        engine.allreduce_(mine, engine.Average, "shared", compression=FP8)
        assert np.array(mine).tobytes() == plain.tobytes()
        return plain, coded

    with ThreadWorld(3) as world:
        for plain, coded in world.run(work):
            assert plain.tobytes() == coded.tobytes()
        how = algorithms(world)
        assert how["coded"] == ("two-shot", "none")
        assert how["shared"] == ("shared", "none")


def test_plain_and_coded_tensors_do_not_travel_together() -> None:
    def work(rank: int) -> None:
        handles = [
            engine.allreduce_async(
                np.full(10, rank + 0.3, np.float32), engine.Sum, f"{k}", compression=(FP8, None)[k % 2]
            )
            for k in range(6)
        ]
        for k, handle in enumerate(handles):
            exact = np.float32(0.3) + np.float32(1.3)
            assert (engine.synchronize(handle) == exact).all() == bool(k % 2)

    with ThreadWorld(2, (0, 1), cycle_time_ms=100.0) as world:
        world.run(work)


def test_other_dtypes_travel_as_they_are() -> None:
    def work(rank: int) -> None:
        for dtype in ("int8", "int32", "int64", "bool"):
            got = engine.allreduce(np.full(10_000, 1, dtype), engine.Sum, dtype, compression=FP8)
            assert (got == (1 if dtype == "bool" else 2)).all()

    with ThreadWorld(2, (0, 1)) as world:
        world.run(work)
        assert {compression for _, compression in algorithms(world).values()} == {"none"}


def test_bytes_are_counted_as_they_travel() -> None:
    def work(rank: int) -> None:
        engine.allreduce(values(1 << 20, rank), engine.Sum, "counted", compression=FP8)

    with ThreadWorld(2, (0, 1)) as world:
        world.run(work)
        (row,) = [row for row in world.engines[0].history() if row["name"] == "counted" and row["type"] == "batch"]
        assert row["bytes"] == (1 << 20) + (1 << 14)


# ---- refusals and disagreements


@pytest.mark.parametrize("hosts", [None, (0, 1)], ids=["one host", "two hosts"])
def test_what_cannot_be_coded_is_refused(hosts: tuple[int, ...] | None) -> None:
    """Also on one host, where nothing is coded: so a program that runs there runs on several."""

    def work(rank: int) -> None:
        x = np.ones(3, np.float32)
        for op in (engine.Min, engine.Max, engine.Product):
            text = refused(lambda op=op: engine.allreduce(x, op, compression=FP8), "Compression.fp8", ValueError)
            assert op.name.title() in text and "Compression.bf16" in text
        refused(lambda: engine.grouped_allreduce([x], engine.Max, compression=FP8), "Compression.fp8", ValueError)
        refused(
            lambda: engine.reducescatter(x, engine.Sum, compression=FP8), "a reduce-scatter does not take", ValueError
        )
        refused(lambda: engine.grouped_reducescatter([x], engine.Sum, compression=FP8), "reduce-scatter", ValueError)
        refused(lambda: engine.allreduce(x, engine.Adasum, compression=FP8), "Adasum", ValueError)
        assert engine.allreduce(x, engine.Sum, "goes on", compression=FP8).tolist() == [2, 2, 2]

    with ThreadWorld(2, hosts) as world:
        world.run(work)


@pytest.mark.parametrize(
    ("other", "text"),
    [(None, "float32[3]"), (Compression.fp16, "compressed to float16"), (Compression.tuned8, "compressed as tuned8")],
)
def test_ranks_that_disagree_hear_who_sent_what(other: Any, text: str) -> None:
    """Rows 10 and 13: the number of a wire is no dtype's any more, and the text says fp8."""

    def work(rank: int) -> str:
        with pytest.raises(engine.errors.MismatchError) as told:
            engine.allreduce(np.ones(3, np.float32), engine.Sum, "x", compression=FP8 if rank else other)
        engine.allreduce(np.ones(3, np.float32), engine.Sum, "y", compression=FP8)
        return str(told.value)

    with ThreadWorld(2, (0, 1)) as world:
        for said in world.run(work):
            assert "compressed to fp8" in said and text in said


# ---- knobs


def test_a_knob_that_is_turned_while_entries_are_on_the_way() -> None:
    """Rows 11 and 12: an entry's own number counts, on all ranks; each kind of tensor gets what it permits."""
    hosts = (0, 1)
    names = ("none", "fp8", "bf16", "fp8", "none")

    def work(rank: int) -> list[Array]:
        found = []
        for turn, knob in enumerate(names * 2):
            if rank == 0:
                runtime.current_engine().set_knobs(compression=knob)
            for marker in (Compression.tuned, Compression.tuned8, FP8, None):
                for k in range(3):
                    label = "plain" if marker is None else marker.wire
                    handle = engine.allreduce_async(
                        values(3000, rank, k), engine.Sum, f"{label} {turn % 5} {k}", compression=marker
                    )
                    found.append(engine.synchronize(handle))
            halves = engine.allreduce(
                values(3000, rank, 1, "float16"), engine.Sum, f"h {turn}", compression=Compression.tuned8
            )
            least = engine.allreduce(values(3000, rank), engine.Min, f"m {turn}", compression=Compression.tuned8)
            part = engine.reducescatter(values(3000, rank), engine.Sum, f"r {turn}", compression=Compression.tuned8)
            found += [halves, least, engine.allgather(part, f"g {turn}")]
        return found

    with ThreadWorld(2, hosts) as world:
        found = world.run(work)
        rows = [row for row in world.engines[0].history() if row["type"] == "batch"]
        knobs = {row["compression"] for row in rows}
    assert knobs == {"none", "bf16", "fp8"}
    assert all(one.tobytes() == other.tobytes() for one, other in zip(*found, strict=True))
    for row in rows:
        label = row["name"].split()[0]
        allowed = {
            "float8": {"fp8"},
            "plain": {"none"},
            "tuned": {"none", "bf16"},
            "tuned8": {"none", "bf16", "fp8"},
            "h": {"none", "fp8"},
            "m": {"none", "bf16"},
            "r": {"none", "bf16"},
            "g": {"none"},
        }[label]
        assert row["compression"] in allowed, row


def test_a_knob_of_fp8_on_one_host_is_nothing() -> None:
    """Row 12."""

    def work(rank: int) -> list[bytes]:
        return [
            engine.allreduce(values(3000, rank), engine.Sum, f"{k}", compression=marker).tobytes()
            for k, marker in enumerate((None, Compression.tuned, Compression.tuned8, FP8))
        ]

    with ThreadWorld(2, compression="fp8") as world:
        for found in world.run(work):
            assert len(set(found)) == 1


# ---- what it does to training

PARAMETERS, STEPS = 1024, 250


def distance_of_small_parameters(rank: int, seed: int, ratio: float, compression: Any) -> float:
    """Train a separable problem, and return the mean square distance of its small parameters to their targets.

    Every other parameter of a block has gradients `ratio` times as large as its neighbours', and noise as large as the
    signal. Adam makes steps of one size of both, if the small ones survive.
    """
    rng = np.random.default_rng(seed)
    targets = rng.choice([-1.0, 1.0], PARAMETERS).astype(np.float32)
    sizes = np.where(np.arange(PARAMETERS) % 2, ratio, 1.0).astype(np.float32)
    noise = np.random.default_rng([seed, rank + 1])
    weights, first, second = (np.zeros(PARAMETERS, np.float32) for _ in range(3))
    for step in range(1, STEPS + 1):
        gradient = sizes * (weights - targets + noise.standard_normal(PARAMETERS).astype(np.float32))
        gradient = engine.allreduce(gradient.astype(np.float32), engine.Average, f"g {seed}", compression=compression)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        update = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-12)
        weights = (weights - 0.02 * (1 - step / (STEPS + 1)) * update).astype(np.float32)
    return float(((weights - targets)[1::2] ** 2).mean())


@pytest.mark.parametrize("ratio", [1e-2, 1e-3, 1e-4])
def test_small_parameters_beside_large_ones_learn_as_with_float32(ratio: float) -> None:
    """Row 18: losses of trainings would not show that small gradients are lost beside their block's largest."""
    hosts = (0, 1, 2, 3)

    def work(rank: int) -> list[tuple[float, float]]:
        return [
            (
                distance_of_small_parameters(rank, seed, ratio, FP8),
                distance_of_small_parameters(rank, seed, ratio, None),
            )
            for seed in range(3)
        ]

    with ThreadWorld(4, hosts) as world:
        found = world.run(work)
    assert all(each == found[0] for each in found), "ranks hold other parameters"
    coded, plain = (float(np.mean([pair[k] for pair in found[0]])) for k in range(2))
    assert plain < 0.1, "the problem is not solved without compression either"
    assert coded < 1.1 * plain, (coded, plain)


def test_infinities_make_a_loss_scaler_skip_the_step_on_all_ranks() -> None:
    """Row 5: whichever rank has one, all see a NaN."""

    def work(rank: int) -> list[bool]:
        found = []
        for culprit in range(3):
            mine = values(70_001, rank)
            if rank == culprit:
                mine[-1] = np.inf
            result = engine.allreduce(mine, engine.Average, f"scaled {culprit}", compression=FP8)
            found.append(bool(np.isfinite(result).all()))
        return found

    with ThreadWorld(3, (0, 1, 1)) as world:
        assert world.run(work) == [[False] * 3] * 3


# ---- slots


def connect_narrowly() -> tuple[socket.socket, socket.socket]:
    """Return connected sockets that take little at a time."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
    return ends


@pytest.mark.sample(2)
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1), (0, 1, 1, 2, 2)], ids=["01", "0011", "01122"])
@pytest.mark.parametrize("narrow", [False, True])
def test_slots_are_not_written_while_they_are_read(hosts: tuple[int, ...], narrow: bool) -> None:
    """Row 9: many chunks, new values in each turn, ranks that are late in turn, and connections that take little."""
    size, turns = len(hosts), 4
    counts = [1_100_000, 300_007]

    def work(rank: int) -> list[list[Array]]:
        found = []
        for turn in range(turns):
            if turn % size == rank:
                be_late(0.05)
            handles = [
                engine.allreduce_async(values(count, rank, turn), engine.Sum, f"{count}", compression=FP8)
                for count in counts
            ]
            found.append([engine.synchronize(handle) for handle in handles])
        return found

    with ThreadWorld(size, hosts, connect_narrowly if narrow else socket.socketpair, chunk_bytes=65_536) as world:
        found = world.run(work)
    for turn in range(turns):
        for k, count in enumerate(counts):
            want = blocks_of_ranks([values(count, rank, turn) for rank in range(size)], hosts)
            check_bits([each[turn][k] for each in found], want, (turn, count))


def test_gaps_between_tensors_send_nothing_that_anybody_reads() -> None:
    """Row 22: slots are full of NaN from an earlier entry, and tensors of odd lengths leave gaps in the next one."""
    counts = [1, 63, 65, 100, 4097, 30_001]
    hosts = (0, 0, 1, 1)

    def work(rank: int) -> list[Array]:
        assert np.isnan(
            engine.allreduce(np.full(3_000_000, np.nan, np.float32), engine.Sum, "NaN", compression=FP8)
        ).all()
        return engine.grouped_allreduce([values(count, rank) for count in counts], engine.Sum, "gaps", compression=FP8)

    with ThreadWorld(4, hosts) as world:
        found = world.run(work)
    for k, count in enumerate(counts):
        check_bits(
            [each[k] for each in found], blocks_of_ranks([values(count, rank) for rank in range(4)], hosts), count
        )


def test_results_after_a_change_of_hosts_are_those_of_the_new_ones() -> None:
    """Row 20: there is no state, so the same ranks on other hosts have other bits, and all the same."""
    for hosts in ((0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 2, 3)):
        with ThreadWorld(4, hosts) as world:
            found = world.run(lambda rank: engine.allreduce(values(40_001, rank), engine.Average, "x", compression=FP8))
        check_bits(found, blocks_of_ranks([values(40_001, rank) for rank in range(4)], hosts, True), hosts)


def test_counters_tell_what_was_saved_and_what_was_not_finite() -> None:
    def work(rank: int) -> None:
        for name, count in (("large", 100_000), ("small", 130)):
            mine = values(count, rank)
            mine[[3, 100]] = np.nan
            engine.allreduce(mine, engine.Sum, name, compression=FP8)
        engine.allreduce(np.ones(640, np.float32), engine.Sum, "half", compression=Compression.fp16)
        engine.allreduce(np.ones(640, np.float32), engine.Sum, "plain")

    with ThreadWorld(3, (0, 1, 1)) as world:
        world.run(work)
        pages = [page.read(each) for each in world.pages]
    coded = 4 * 100_000 - (100_000 + 100_000 // 64)  # what is small travels as float32
    assert all(each is not None for each in pages)
    assert [each["compression_saved_bytes"] for each in pages] == [coded + 2 * 640] * 3
    assert sum(each["compression_not_finite"] for each in pages) == 4, "each block is counted by one rank"
