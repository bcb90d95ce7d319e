"""The native call's results, matching and refusals, tested by a C library without a framework."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import EngineError, MismatchError

from ..on_ranks import Parts, on_ranks
from ..waiting import until, until_files
from .arrays import check_equal, numbers, shares, small_numbers
from .native_calls import FOREVER, Call, Driver
from .operation_table import CELLS, DTYPES, MOVED, Array, expected

pytestmark = on_ranks(1, 2, 3, job="native calls")

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3,), (5, 0, 2), (4, 3, 2), (1001,))
MIXED = ("float32", "int8", "bool", "float64", "float16", "int64", "bfloat16")


def total(size: int) -> int:
    """Sum of 1 over the first rank, 2 over the second .."""
    return size * (size + 1) // 2


def works(driver: Driver, size: int) -> None:
    """Check that the engine still works, natively and in Python, with a name and without. Collective."""
    for name in (None, "still works"):
        assert (driver.run("allreduce", [np.ones(3)], name=name).targets[0] == size).all()
        assert (engine.allreduce(np.ones(3), engine.Sum, name) == size).all()


# ---- results


def test_allreduce(parts: Parts, rank: int, size: int) -> None:
    """All dtypes and operations are in flight together."""
    with Driver() as driver:
        calls = {}
        for (dtype, op), shape, in_place in itertools.product(CELLS, SHAPES, (False, True)):
            if CELLS[dtype, op].reduce is not None:
                label = f"{dtype} {op} {shape} {in_place}"
                mine = numbers(dtype, shape, rank).copy()
                calls[label] = (
                    driver.call("allreduce", [mine], dtypes=[dtype], op=op, name=label, in_place=in_place),
                    (dtype, op, shape),
                )
        driver.submit(*(call for call, _ in calls.values()), threads=2)
        driver.wait(call for call, _ in calls.values())
        for label, (call, (dtype, op, shape)) in calls.items():
            with parts.part(label):
                assert call.status == "OK" and call.text == "" and call.outcome.ranks == size
                want = expected(dtype, op, [numbers(dtype, shape, other) for other in range(size)])
                check_equal(dtype, call.targets[0], want.reshape(shape))


def test_factors_and_compression_have_the_bits_of_pythons(parts: Parts, rank: int) -> None:
    markers = {"fp16": engine.Compression.fp16, "bf16": engine.Compression.bf16, "tuned": engine.Compression.tuned}
    with Driver() as driver:
        for dtype, wire in itertools.product(("float32", "float64", "int32", "float16"), ("none", *markers)):
            mine = numbers(dtype, (1003,), rank)
            options: dict[str, Any] = {"op": "Average", "prescale": 0.5, "postscale": 3.0, "wire": wire}
            alone = driver.run("allreduce", [mine], name=f"{dtype} {wire}", **options)
            share = driver.run("reducescatter", [mine], name=f"share of {dtype} {wire}", **options)
            group = driver.run("allreduce", [mine, mine], name=f"two {dtype} {wire}", group=True, **options)
            want = engine.allreduce(mine, engine.Average, None, 0.5, 3.0, compression=markers.get(wire))
            part = engine.reducescatter(mine, engine.Average, None, 0.5, 3.0, compression=markers.get(wire))
            with parts.part(f"{dtype} {wire}"):
                for got in (alone.targets[0], *group.targets):
                    check_equal(dtype, got, want)
                check_equal(dtype, share.targets[0], part)


@on_ranks(1, 2, job="native calls")
def test_adasum(rank: int) -> None:
    mine = small_numbers("float32", (1003,), rank)
    with Driver() as driver:
        got = driver.run("allreduce", [mine], op="Adasum", name="adasum")
        check_equal("float32", got.targets[0], engine.allreduce(mine, engine.Adasum))


@pytest.mark.parametrize("linger", [0, FOREVER])
def test_large_tensors(linger: int, rank: int, size: int) -> None:
    with Driver() as driver:
        call = driver.run("allreduce", [np.full(1_000_003, rank + 1.0)], name="large", in_place=True, linger=linger)
        assert call.status == "OK" and (call.sources[0] == total(size)).all()
        gathered = driver.run("allgather", [np.full((300_001, 3), rank, np.int8)], name="rows", linger=linger)
        assert gathered.rows == [300_001] * size and (gathered.gathered[::300_001, 0] == range(size)).all()


def test_broadcast(parts: Parts, rank: int, size: int) -> None:
    with Driver() as driver:
        for dtype, shape, root in itertools.product((*DTYPES, *MOVED), ((), (0, 3), (7, 3)), range(size)):
            call = driver.run(
                "broadcast",
                [numbers(dtype, shape, rank).copy()],
                dtypes=[dtype],
                root=root,
                name=None if root else f"{dtype} {shape}",
                in_place=root % 2 == 0,
            )
            with parts.part(f"{dtype} {shape} from {root}"):
                assert call.status == "OK"
                check_equal(dtype, call.targets[0], numbers(dtype, shape, root))


ROWS: dict[str, Callable[[int], int]] = {
    "equal": lambda rank: 3,
    "uneven": lambda rank: 1 + 2 * rank,
    "none on rank 0": lambda rank: rank,
    "none anywhere": lambda rank: 0,
}


@pytest.mark.parametrize("name", ROWS)
def test_allgather(name: str, parts: Parts, rank: int, size: int) -> None:
    rows = [ROWS[name](other) for other in range(size)]
    with Driver() as driver:
        for dtype, rest in itertools.product((*DTYPES, *MOVED), ((), (3, 2), (0,))):
            mine = numbers(dtype, (rows[rank], *rest), rank)
            call = driver.run("allgather", [mine], dtypes=[dtype], name=f"{dtype} {rest}")
            with parts.part(f"{dtype} {rest}"):
                assert call.status == "OK" and call.rows == rows and call.outcome.count == 0
                want = np.concatenate([numbers(dtype, (rows[other], *rest), other) for other in range(size)])
                check_equal(dtype, call.gathered, want)


def test_alltoall(parts: Parts, rank: int, size: int) -> None:
    with Driver() as driver:
        for dtype, rest, uneven in itertools.product((*DTYPES, *MOVED), ((), (3,)), (0, 1)):
            splits = [[2 + uneven * (sender + to) for to in range(size)] for sender in range(size)]
            sent = [numbers(dtype, (sum(splits[other]) + 1, *rest), other) for other in range(size)]
            call = driver.run("alltoall", [sent[rank]], dtypes=[dtype], splits=splits[rank], name=f"{dtype} {rest}")
            parcels = [np.split(sent[other], np.cumsum(splits[other]))[rank] for other in range(size)]
            with parts.part(f"{dtype} {rest} {uneven}"):
                assert call.status == "OK" and call.rows == [splits[other][rank] for other in range(size)]
                check_equal(dtype, call.gathered, np.concatenate(parcels))


def test_reducescatter(parts: Parts, rank: int, size: int) -> None:
    with Driver() as driver:
        for (dtype, op), shape in itertools.product(CELLS, ((0,), (1, 3), (7, 3))):
            if CELLS[dtype, op].reduce is None:
                continue
            name = f"{dtype} {op} {shape}"
            call = driver.run("reducescatter", [numbers(dtype, shape, rank)], dtypes=[dtype], op=op, name=name)
            want = expected(dtype, op, [numbers(dtype, shape, other) for other in range(size)])
            begin, end = shares(shape[0], size)[rank : rank + 2]
            with parts.part(name):
                assert call.status == "OK"
                check_equal(dtype, call.targets[0], want[begin:end])


def test_barriers(rank: int, size: int) -> None:
    """A native barrier meets one of Python's, by name or by number."""
    with Driver() as driver:
        for name in ("gate", None):
            call = driver.call("barrier", [], name=name)
            if rank == 0:
                driver.submit(call)
                call.wait()
                assert call.status == "OK", call.text
            else:
                engine.session.runtime.current_engine().barrier(name).wait()
        works(driver, size)


# ---- groups


def members(count: int, rank: int, seed: int = 0) -> tuple[list[str], list[Array]]:
    """Dtypes and tensors of a group: of all dtypes, some empty, some scalars."""
    dtypes = [MIXED[k % len(MIXED)] for k in range(count)]
    shapes = [SHAPES[k % len(SHAPES)] for k in range(count)]
    return dtypes, [numbers(dtype, shape, rank, seed) for dtype, shape in zip(dtypes, shapes, strict=True)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", [1, 2, 9, 500])
def test_a_group_is_reduced(count: int, in_place: bool, parts: Parts, rank: int, size: int) -> None:
    dtypes, mine = members(count, rank)
    with Driver() as driver:
        call = driver.run(
            "allreduce",
            [each.copy() for each in mine],
            dtypes=dtypes,
            op="Max",
            name=f"group of {count}",
            group=True,
            in_place=in_place,
        )
        others = [members(count, other)[1] for other in range(size)]
        with parts.part("status"):
            assert call.status == "OK" and not call.outcome.memory
        for k, dtype in enumerate(dtypes):
            with parts.part(f"{k}: {dtype} {mine[k].shape}"):
                want = expected(dtype, "Max", [each[k] for each in others]).reshape(mine[k].shape)
                check_equal(dtype, call.targets[k], want)


def test_a_group_is_scattered(parts: Parts, rank: int, size: int) -> None:
    dtypes = ["float32", "int64", "float16", "int8", "bfloat16"]
    shapes = [(7, 3), (0, 2), (size, 2), (1,), (2 * size + 1, 5)]

    def of(other: int) -> list[Array]:
        return [small_numbers(dtype, shape, other) for dtype, shape in zip(dtypes, shapes, strict=True)]

    with Driver() as driver:
        call = driver.run("reducescatter", of(rank), dtypes=dtypes, op="Sum", name="scattered", group=True)
        for k, dtype in enumerate(dtypes):
            want = expected(dtype, "Sum", [of(other)[k] for other in range(size)])
            begin, end = shares(shapes[k][0], size)[rank : rank + 2]
            with parts.part(f"{k}: {dtype}"):
                check_equal(dtype, call.targets[k], want[begin:end])


@pytest.mark.parametrize("count", [1, 6, 300])
def test_a_group_is_gathered(count: int, parts: Parts, rank: int, size: int) -> None:
    """Rows are read by part_rows and part_copy, in any order; each rank has other rows of each tensor."""

    def of(other: int) -> list[Array]:
        return [
            small_numbers(MIXED[k % 3], ((other + k) % 4, *((), (3,), (2, 5), (0,))[k % 4]), other)
            for k in range(count)
        ]

    with Driver() as driver:
        brought = [of(other) for other in range(size)]
        call = driver.run("allgather", brought[rank], name=f"gathered {count}", group=True)
        assert call.status == "OK" and call.outcome.count == count
        for k, (got, rows) in enumerate(call.gathered_group):
            with parts.part(k):
                assert rows == [(other + k) % 4 for other in range(size)]
                check_equal(MIXED[k % 3], got, np.concatenate([each[k] for each in brought]))


# ---- the same operation for Python and natively


def f32(*shape: int) -> Array:
    return np.ones(shape, np.float32)


# Kind, tensors and options of a native call; the same call in Python, asynchronous; both by rank and size.
BOTH: dict[str, tuple[Callable[[Driver, str | None], Call], Callable[[str | None], Any]]] = {
    "allreduce": (
        lambda driver, name: driver.call("allreduce", [f32(3, 4)], op="Average", prescale=2.0, name=name),
        lambda name: engine.allreduce_async(f32(3, 4), engine.Average, name, 2.0),
    ),
    "many dimensions": (
        lambda driver, name: driver.call("allreduce", [f32(*(1, 2) * 6)], name=name),
        lambda name: engine.allreduce_async(f32(*(1, 2) * 6), engine.Sum, name),
    ),
    "group of many dimensions": (
        lambda driver, name: driver.call("allreduce", [f32(*(2, 1) * 6), f32()], name=name, group=True),
        lambda name: engine.grouped_allreduce_async([f32(*(2, 1) * 6), f32()], engine.Sum, name),
    ),
    "a scalar": (
        lambda driver, name: driver.call("allreduce", [np.float64(2.5)], name=name),
        lambda name: engine.allreduce_async(np.array(2.5), engine.Sum, name),
    ),
    "compressed": (
        lambda driver, name: driver.call("allreduce", [f32(5)], wire="bf16", name=name),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, compression=engine.Compression.bf16),
    ),
    "group": (
        lambda driver, name: driver.call(
            "allreduce", [f32(2, 2), np.arange(3), np.ones((0, 4), np.float16)], name=name, group=True
        ),
        lambda name: engine.grouped_allreduce_async(
            [f32(2, 2), np.arange(3), np.ones((0, 4), np.float16)], engine.Sum, name
        ),
    ),
    "group of one": (
        lambda driver, name: driver.call("allreduce", [f32(2, 2)], name=name, wire="fp16", group=True),
        lambda name: engine.grouped_allreduce_async([f32(2, 2)], engine.Sum, name, compression=engine.Compression.fp16),
    ),
    "group of integers, to be compressed": (
        lambda driver, name: driver.call("allreduce", [np.arange(3)], name=name, wire="fp16", group=True),
        lambda name: engine.grouped_allreduce_async(
            [np.arange(3)], engine.Sum, name, compression=engine.Compression.fp16
        ),
    ),
    "broadcast": (
        lambda driver, name: driver.call("broadcast", [np.arange(4.0)], root=0, name=name),
        lambda name: engine.broadcast_async(np.arange(4.0), 0, name),
    ),
    "allgather": (
        lambda driver, name: driver.call("allgather", [f32(driver.place()[0], 2)], name=name),
        lambda name: engine.allgather_async(f32(engine.rank(), 2), name),
    ),
    "allgather of a group": (
        lambda driver, name: driver.call("allgather", [f32(driver.place()[0], 2), np.arange(3)], name=name, group=True),
        lambda name: engine.grouped_allgather_async([f32(engine.rank(), 2), np.arange(3)], name),
    ),
    "alltoall": (
        lambda driver, name: driver.call("alltoall", [f32(8)], splits=[2] * driver.place()[1], name=name),
        lambda name: engine.alltoall_async(f32(8), [2] * engine.size(), name),
    ),
    "reducescatter": (
        lambda driver, name: driver.call("reducescatter", [f32(7, 2)], name=name),
        lambda name: engine.reducescatter_async(f32(7, 2), engine.Sum, name),
    ),
    "reducescatter of a group": (
        lambda driver, name: driver.call("reducescatter", [f32(7, 2), f32(1)], name=name, group=True),
        lambda name: engine.grouped_reducescatter_async([f32(7, 2), f32(1)], engine.Sum, name),
    ),
}


def results(call: Call) -> list[Array]:
    """Results of a native call in the form of Python's."""
    if call.kind == "allgather" and call.outcome.count:
        return [part for part, _ in call.gathered_group]
    if call.kind == "alltoall":
        return [call.gathered, np.array(call.rows, np.int32)]
    return [call.gathered] if call.kind == "allgather" else call.targets


@pytest.mark.parametrize("title", BOTH)
def test_a_native_call_meets_pythons(title: str, parts: Parts, rank: int, size: int) -> None:
    """They meet by name, new or known, and by number, whichever rank uses which."""
    natively, in_python = BOTH[title]
    with Driver() as driver:
        for turn, name in itertools.product(range(4), (title, None)):
            if (rank + turn) % 2:
                call = natively(driver, name)
                driver.submit(call)
                call.wait()
                got = results(call) if call.status == "OK" else []
                told = call.text
            else:
                try:
                    found = engine.synchronize(in_python(name))
                    got, told = list(found) if isinstance(found, (list, tuple)) else [found], ""
                except EngineError as error:
                    got, told = [], str(error)
            mean = engine.synchronize(in_python("all in Python"))
            want = list(mean) if isinstance(mean, (list, tuple)) else [mean]
            with parts.part(f"{name}, turn {turn}"):
                assert told == "" and len(got) == len(want), told
                for one, other in zip(got, want, strict=True):
                    assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all()


def outcome_of(call: Call | Any) -> str:
    """Error of a native or Python call, as the native call reports it."""
    if isinstance(call, Call):
        call.driver.submit(call)
        call.wait()
        assert call.status == "MISMATCH", call.status
        return call.text
    try:
        engine.synchronize(call())
    except MismatchError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@on_ranks(2, 3, job="native calls")
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_disagreements_are_told_in_one_way(known: bool, parts: Parts, rank: int, size: int) -> None:
    """Each operation of the table meets the next one, with either side native, both or none."""
    with Driver() as driver:
        for (one, other), name in zip(
            itertools.pairwise([*BOTH, "allreduce"]), map(str, itertools.count()), strict=False
        ):
            title = other if rank == size - 1 else one
            natively, in_python = BOTH[title]
            if known:
                engine.synchronize(BOTH[one][1](name))
            told = []
            for native in ((), (size - 1,), range(size - 1), range(size)):
                made = natively(driver, name) if rank in native else lambda: in_python(name)  # noqa: B023
                told.append(outcome_of(made))
            with parts.part(f"{one} and {other}"):
                assert f"ranks disagree on '{name}'" in told[0] and len(set(told)) == 1, told
        works(driver, size)


@on_ranks(2, 3, job="native calls")
@pytest.mark.parametrize("name", [None, "ö" * 512], ids=["unnamed", "long"])
def test_a_disagreement_on_another_name(name: str | None, rank: int, size: int) -> None:
    """Unnamed operations have Python's names in the text, which is complete however long the name."""
    mine = f32(4 + (rank == size - 1))
    with Driver() as driver:
        texts = []
        for turn in range(4):
            if (rank + turn) % 2:
                texts.append(outcome_of(driver.call("allreduce", [mine], name=name)))
            else:
                texts.append(outcome_of(lambda: engine.allreduce_async(mine, engine.Sum, name)))
        if name is None:
            texts = [re.sub(r"noname\.\d+'", "noname.N'", text) for text in texts]
            assert "'allreduce.noname.N'" in texts[0]
        assert len(set(texts)) == 1 and f"rank {size - 1} sent allreduce sum float32[5]" in texts[0], texts
        works(driver, size)


NAMES = [b"\xff\xfe no UTF-8", b"a\0zero", b"\0", b"x" * 1024, "größe".encode(), b"'quotes' and \"quotes\"", b"%s %n"]


def test_names_of_any_bytes(rank: int, size: int) -> None:
    """Such names are distinct, and reports with them do not fail."""
    native = engine.session.runtime.current_engine()
    with Driver() as driver:
        engine.start_timeline(f"names.{rank}.json")
        calls = [driver.call("allreduce", [np.full(3, rank + 1 + k)], name=name) for k, name in enumerate(NAMES)]
        if rank == 0:
            driver.submit(*calls)
            assert size == 1 or len(native.pending()) >= len(NAMES)
        engine.barrier("shown")
        if rank:
            driver.submit(*calls)
        driver.wait(calls)
        for k, call in enumerate(calls):
            assert call.status == "OK" and (call.targets[0] == total(size) + k * size).all()
        odd = [driver.call("allreduce", [f32(4 + (rank == size - 1))], name=name) for name in NAMES]
        driver.submit(*odd)
        driver.wait(odd)
        assert {call.status for call in odd} == {"MISMATCH" if size > 1 else "OK"}
        assert size == 1 or ("?? no UTF-8" in odd[0].text and "größe" in odd[4].text), [call.text for call in odd]
        assert native.history()
        engine.stop_timeline()
        works(driver, size)


def test_unnamed_calls_are_counted_with_pythons(rank: int, size: int) -> None:
    """More calls than the 256 unnamed names are in flight at once, alternately native and in Python."""
    with Driver() as driver:
        calls, handles = [], []
        for k in range(700):
            if (k + rank) % 3:
                calls.append((k, driver.call("allreduce", [np.full(2, rank + k, np.int64)], name=None)))
                driver.submit_here(calls[-1][1])
            else:
                handles.append((k, engine.allreduce_async(np.full(2, rank + k, np.int64), engine.Sum)))
        driver.wait(call for _, call in calls)
        for k, handle in handles:
            assert engine.synchronize(handle).tolist() == [total(size) + (k - 1) * size] * 2
        for k, call in calls:
            assert call.status == "OK" and call.targets[0].tolist() == [total(size) + (k - 1) * size] * 2, k


# ---- join and process sets


@on_ranks(2, 3, job="native calls")
def test_ranks_that_have_joined(rank: int, size: int) -> None:
    """They stand in for every kind; their own submissions are refused."""
    with Driver() as driver:
        if rank == 0:
            handle = threading.Thread(target=engine.join)
            handle.start()
            until(lambda: engine.session.runtime.current_engine().joined, "rank 0 has joined")
            late = driver.run("allreduce", [f32(2)], name="late")
            Path("late").touch()
            handle.join()
            assert late.status == "JOINED" and "after join()" in late.text, late.text
        else:
            rows = [0, *[2] * (size - 1)]
            alone = driver.run("allreduce", [f32(3)], name="alone")
            group = driver.run("allreduce", [f32(3), np.arange(2)], name="group", group=True)
            gathered = driver.run("allgather", [f32(2, 2)], name="rows")
            parts = driver.run("allgather", [f32(2, 2), np.arange(2)], name="parts", group=True)
            share = driver.run("reducescatter", [f32(size, 2), f32(1)], name="shares", group=True)
            assert (alone.targets[0] == size - 1).all() and (group.targets[0] == size - 1).all()
            assert group.targets[1].tolist() == [0, size - 1]
            assert gathered.rows == rows and gathered.gathered.shape == (2 * (size - 1), 2)
            assert [each for _, each in parts.gathered_group] == [rows, rows]
            assert (share.targets[0] == size - 1).all() and share.targets[0].shape == (1, 2)
            until_files("late")
            engine.join()
        works(driver, size)


@on_ranks(2, 3, job="native calls")
def test_process_sets_by_their_numbers(rank: int, size: int) -> None:
    """A set and the world are used at once; a number that belongs to no set, or no longer, is refused."""
    part = engine.add_process_set([0, size - 1]) if size > 2 else engine.add_process_set([1])
    number = part.call_number
    with Driver() as driver:
        assert driver.place() == (rank, size)
        if part.included():
            assert driver.place(number) == (part.rank(), part.size())
            inner = driver.call("allreduce", [np.full(3, rank)], name="x", set=number)
            rows = driver.call("allgather", [np.full(part.rank() + 1, rank)], name="x rows", set=number)
            outer = driver.call("allreduce", [np.full(3, rank)], name="x")
            root = driver.call("broadcast", [np.full(3, rank)], root=size - 1, name="root", set=number)
            driver.submit(inner, outer, rows, root)
            driver.wait([inner, outer, rows, root])
            assert (inner.targets[0] == sum(part.ranks)).all() and inner.outcome.ranks == len(part.ranks)
            assert (outer.targets[0] == sum(range(size))).all() and outer.outcome.ranks == size
            assert rows.gathered.tolist() == [each for k, each in enumerate(part.ranks) for _ in range(k + 1)]
            assert (root.targets[0] == size - 1).all()
        else:
            with pytest.raises(LookupError):
                driver.place(number)
            assert (driver.run("allreduce", [np.full(3, rank)], name="x").targets[0] == sum(range(size))).all()
        for unknown in (number + 1, 1000, -1, 2**31 - 1, -(2**31)):
            call = driver.run("allreduce", [f32(2)], name="x", set=unknown)
            assert call.status == "NOT_INITIALIZED" and call.text.startswith("NotInitializedError: "), call.text
        engine.remove_process_set(part)
        call = driver.run("allreduce", [f32(2)], name="x", set=number)
        assert call.status == "NOT_INITIALIZED", call.text
        with pytest.raises(LookupError, match="NOT_INITIALIZED"):
            driver.place(number)
        works(driver, size)
