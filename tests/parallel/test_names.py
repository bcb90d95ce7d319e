"""Names, orders, threads and handles: in any order of the ranks' work, the n-th uses of a name meet."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import engine

from ..on_ranks import Ranks, on_ranks, per_size, spare
from ..waiting import be_late
from .arrays import check_equal, refused, small_numbers
from .marks import needs_memory_back
from .operation_table import expected

pytestmark = on_ranks(1, 2, 3, spare(4))

IDS = 16_384  # engine_ext/shared/layout.h
NAME_BYTES = 1024


def total(size: int, scale: float = 1.0, shift: float = 0.0) -> float:
    """Sum over ranks of rank * scale + shift."""
    return size * (size - 1) / 2 * scale + size * shift


# ---- many names


def test_1000_outstanding_without_a_name(rank: int, size: int) -> None:
    handles = [engine.allreduce_async(np.full(3, rank + k, np.float32), engine.Sum) for k in range(1000)]
    results = [engine.synchronize(handle)[0] for handle in handles]
    assert results == [total(size, 1, k) for k in range(1000)]
    assert len({handle.name for handle in handles}) == 256


def test_kinds_are_counted_apart(rank: int, size: int) -> None:
    handles = []
    for k in range(600):
        handles.append(engine.allreduce_async(np.full(1, rank, np.int64), engine.Sum))
        if k % 2:
            handles.append(engine.broadcast_async(np.full(2, rank + k, np.int64), k % size))
        if k % 3 == 0:
            handles.append(engine.allgather_async(np.full((rank % 2, 2), rank, np.int64)))
    for handle in reversed(handles):
        engine.synchronize(handle)
    assert engine.synchronize(handles[0]).tolist() == [total(size)]


@pytest.mark.sample(1)
def test_4000_names_in_flight_three_times_each_rank_in_its_own_order(rank: int, size: int) -> None:
    for turn in range(3):
        order = list(range(4000))
        random.Random(rank + 10 * turn).shuffle(order)
        found = {k: engine.allreduce_async(np.full(2, rank + k, np.float64), engine.Sum, f"m{k}") for k in order}
        random.Random(rank + 10 * turn + 5).shuffle(order)
        for k in order:
            assert engine.synchronize(found[k])[1] == total(size, 1, k)


@pytest.mark.sample(1)
def test_more_names_than_ids_one_window_after_another_and_the_first_ones_again(rank: int, size: int) -> None:
    for start in [*range(0, 20_000, 1000), 0, 1000, 19_000]:
        handles = [
            engine.allreduce_async_(np.full(1, rank * k, np.int64), engine.Sum, f"x{k}")
            for k in range(start, start + 1000)
        ]
        for k, handle in zip(range(start, start + 1000), handles, strict=True):
            assert engine.synchronize(handle)[0] == total(size, k), k


@pytest.mark.sample(1)
def test_more_names_in_flight_than_ids(rank: int, size: int) -> None:
    count = IDS + 2000
    order = list(range(count))
    if rank % 2:
        order.reverse()
    data = np.arange(count, dtype=np.int64) * rank
    found = {k: engine.allreduce_async_(data[k : k + 1], engine.Sum, f"y{k}") for k in order}
    for k in order:
        engine.synchronize(found[k])
    assert np.array_equal(data, np.arange(count) * int(total(size)))


@pytest.mark.sample(1)
def test_other_names_evict_while_shapes_change(rank: int, size: int) -> None:
    for turn in range(2):
        for start in range(0, IDS + 3000, 2000):
            handles = [
                engine.allreduce_async(np.full(1 + (k + turn) % 3, rank, np.float32), engine.Sum, f"x{k}")
                for k in range(start, start + 2000)
            ]
            for k, handle in zip(range(start, start + 2000), handles, strict=True):
                assert engine.synchronize(handle).tolist() == [total(size)] * (1 + (k + turn) % 3)


@pytest.mark.slow
@on_ranks(2, 3, world={"cycle_time_ms": 0.2})
def test_evictions_of_names_that_come_again(rank: int, size: int) -> None:
    """The least recently used names return, with other shapes, just when new names are about to evict them."""
    mine = random.Random(rank)

    def reduce(names: list[str], count: int) -> None:
        handles = [engine.allreduce_async(np.full(count, rank, np.float32), engine.Sum, name) for name in names]
        for handle in handles:
            assert engine.synchronize(handle).tolist() == [total(size)] * count

    known = [f"x{k}" for k in range(IDS)]
    for start in range(0, IDS, 4096):
        reduce(known[start : start + 4096], 1)
    for turn in range(80):
        fresh = [f"{turn} {k}" for k in range(60)]
        oldest = known[:400]
        known = [*known[400:], *oldest, *fresh][: IDS + 2000]
        mine.shuffle(oldest)
        reduce(fresh + oldest, 1 + turn % 5)


# ---- odd names


ODD = ("a", " ", "wörter/größe", "层.0.重み", "🙂" * 256, "x" * NAME_BYTES, "%s%n\n\t\\", "a" * 63, "a" * 64)


@pytest.mark.parametrize("text", ODD, ids=lambda text: f"{text[:20]!r} of {len(text)}")
def test_an_odd_name(text: str, rank: int, size: int) -> None:
    for _ in range(3):
        handle = engine.allreduce_async(np.full(2, rank, np.float32), engine.Sum, text)
        assert handle.name == text
        assert engine.synchronize(handle).tolist() == [total(size)] * 2


def test_names_that_differ_at_their_end_only(rank: int, size: int) -> None:
    names = ["x" * (NAME_BYTES - 4) + f"{k:04}" for k in range(600)]
    handles = [engine.allreduce_async(np.full(1, rank + k, np.int32), engine.Sum, n) for k, n in enumerate(names)]
    for k, handle in enumerate(handles):
        assert engine.synchronize(handle)[0] == total(size, 1, k)


def test_names_that_are_too_long_empty_or_no_text() -> None:
    kind: Any
    for text, kind in ((NAME_BYTES * "x" + "x", ValueError), ("🙂" * 257, ValueError), ("", ValueError)):
        refused(lambda text=text: engine.allreduce(np.ones(1), engine.Sum, text), "1024", kind)  # type: ignore[misc]
    refused(lambda: engine.allreduce(np.ones(1), engine.Sum, 3), "", TypeError)
    refused(lambda: engine.allreduce(np.ones(1), engine.Sum, b"x"), "", TypeError)
    refused(lambda: engine.allreduce(np.ones(1), engine.Sum, "\ud800"), "", ValueError)


def test_a_name_whose_meaning_changes_with_every_call(rank: int, size: int) -> None:
    for turn in range(40):
        dtype = ("float32", "int64", "float16", "bool")[turn % 4]
        op = ("Sum", "Max", "Min", "Product")[turn // 4 % 4]
        shape = [(turn,), (2, turn), (), (turn % 3, 5)][turn % 4]
        inputs = [small_numbers(dtype, shape, other, turn) for other in range(size)]
        if turn % 5 == 4:
            got = engine.broadcast(inputs[rank], turn % size, "changes")
            check_equal(dtype, got, inputs[turn % size])
        elif turn % 5 == 3 and shape:
            got = engine.allgather(inputs[rank], "changes")
            check_equal(dtype, got, np.concatenate(inputs))
        else:
            got = engine.allreduce(inputs[rank], getattr(engine, op), "changes")
            check_equal(dtype, got, expected(dtype, op, inputs).reshape(shape))
        if turn % 7 == 0:
            engine.barrier("changes")


def test_a_duplicate_is_refused_on_its_own_rank_and_the_first_goes_on(rank: int, size: int) -> None:
    tensor = np.full(4, rank, np.float32)
    if rank == 0:
        first = engine.allreduce_async(tensor, engine.Sum, "twice")
        if size > 1:  # on a single rank it may complete at once
            refused(
                lambda: engine.allreduce_async(tensor, engine.Sum, "twice"),
                "rank 0 submitted 'twice' again",
                engine.errors.DuplicateNameError,
            )
            refused(lambda: engine.barrier("twice"), "'twice'", engine.errors.DuplicateNameError)
        engine.barrier("go")
    else:
        engine.barrier("go")
        first = engine.allreduce_async(tensor, engine.Sum, "twice")
    assert engine.synchronize(first).tolist() == [total(size)] * 4
    assert engine.allreduce(tensor, engine.Sum, "twice").tolist() == [total(size)] * 4


# ---- orders


@dataclass(frozen=True)
class Plan:
    """Drawn steps, and their number among all draws."""

    number: int
    steps: list[dict[str, Any]]

    def __str__(self) -> str:
        return str(self.number)


PLANS = 40
SHAPES = ((), (1,), (0,), (3, 4), (257,), (5000,), (9000,), (70_001,), (300_000,))


def draw_step(dice: random.Random) -> dict[str, Any]:
    """Draw an operation; every second one is an allreduce."""
    return {
        "kind": dice.choice(("allreduce", "allreduce", "allreduce", "broadcast", "allgather", "barrier")),
        "dtype": dice.choice(("float32", "float32", "float16", "float64", "int8", "int64", "bool")),
        "op": dice.choice(("Sum", "Min", "Max", "Product")),
        "shape": dice.choice(SHAPES),
        "rows": [dice.randint(0, 3) for _ in range(dice.randint(1, 4))],
        "root": dice.randint(0, 3),
        "in_place": dice.random() < 0.5,
        "name": dice.choice("ab"),
    }


def drawn(seed: int) -> list[Plan]:
    """Return plans, the same in every run and on every rank."""
    dice = random.Random(seed)
    lengths = [dice.choice((1, 2, 3, 4, 6, 8, 12, 30)) for _ in range(PLANS)]
    return [Plan(number, [draw_step(dice) for _ in range(length)]) for number, length in enumerate(lengths)]


FUSED = (("ENGINE_FUSION_THRESHOLD", "100k"), ("ENGINE_CYCLE_TIME_MS", "0.5"))


@pytest.mark.sample(40)
@on_ranks(
    *(Ranks(size, spare=size == 2) for size in (1, 2, 3, 4, 8)),
    *(Ranks(size, "short cycles", FUSED, spare=size not in (3, 8)) for size in (1, 2, 3, 4, 8)),
)
@per_size("plan", drawn)
def test_every_order_of_submission(plan: Plan, rank: int, size: int) -> None:
    """Every rank submits the same named operations in an order of its own, and waits for them in another."""
    rng = random.Random(1000 * plan.number + rank)
    order = list(range(len(plan.steps)))
    rng.shuffle(order)
    handles: dict[int, Any] = {}
    for k in order:
        handles[k] = submit(plan.steps[k], k)
        if rng.random() < 0.1:
            handles[rng.choice(list(handles))].done  # noqa: B018  (polling disturbs nothing)
        if rng.random() < 0.02:
            be_late(0.001)
    rng.shuffle(order)
    results = {k: engine.synchronize(handles[k]) for k in order}
    for k, step in enumerate(plan.steps):
        check(step, k, results[k], size)


def inputs_of(step: dict[str, Any], k: int, rank: int) -> np.ndarray:
    shape = list(step["shape"])
    if step["kind"] == "allgather":
        shape = [step["rows"][rank % len(step["rows"])], *shape]
    return small_numbers(step["dtype"], shape, rank, k)


def submit(step: dict[str, Any], k: int) -> Any:
    mine = inputs_of(step, k, engine.rank())
    name = f"{step['name']}.{k}"
    if step["kind"] == "barrier":
        return engine.Handle(engine.session.runtime.current_engine().barrier(name), None, None)
    if step["kind"] == "allgather":
        return engine.allgather_async(mine, name)
    if step["kind"] == "broadcast":
        bring = engine.broadcast_async_ if step["in_place"] else engine.broadcast_async
        return bring(mine, step["root"] % engine.size(), name)
    bring = engine.allreduce_async_ if step["in_place"] else engine.allreduce_async
    return bring(mine, getattr(engine, step["op"]), name)


def check(step: dict[str, Any], k: int, got: Any, size: int) -> None:
    inputs = [inputs_of(step, k, rank) for rank in range(size)]
    dtype = step["dtype"]
    if step["kind"] == "allgather":
        check_equal(dtype, got, np.concatenate(inputs))
    elif step["kind"] == "broadcast":
        check_equal(dtype, got, inputs[step["root"] % size])
    elif step["kind"] == "allreduce":
        check_equal(dtype, got, expected(dtype, step["op"], inputs).reshape(inputs[0].shape))


# ---- threads and handles


@on_ranks(1, 2, 3, 4, world={"cycle_time_ms": 10_000})
def test_six_threads_none_of_which_waits_for_a_cycle(size: int) -> None:
    failures: list[str] = []
    taken: list[float] = []  # seconds of each turn

    def work(thread: int, turns: int) -> None:
        rank = engine.rank()
        rng = random.Random(100 * rank + thread)
        try:
            for turn in range(turns):
                start = time.monotonic()
                count = (1, 5, 3000, 40_000)[(thread + turn) % 4]
                mine = np.full(count, rank + turn, np.float32)
                name = f"t{thread}" if turn % 2 else f"t{thread}.{turn}"
                if turn % 3 == 0:
                    got = engine.allreduce(mine, engine.Sum, name)
                else:
                    handle = engine.allreduce_async(mine, engine.Sum, name)
                    if rng.random() < 0.5:
                        os.sched_yield()
                    got = engine.synchronize(handle)
                assert got[0] == got[-1] == total(size, 1, turn), (got, turn)
                taken.append(time.monotonic() - start)
        except BaseException as error:
            failures.append(f"thread {thread}: {error!r}")
            raise

    workers = [threading.Thread(target=work, args=(k, 40)) for k in range(6)]
    for worker in workers:
        worker.start()
    work(6, 40)
    for worker in workers:
        worker.join()
    assert not failures, failures
    assert max(taken) < 9, "somebody has waited for a cycle"


@on_ranks(1, 2, 3, 4, world={"cycle_time_ms": 10_000})
def test_one_handle_several_waiters(size: int) -> None:
    for turn in range(30):
        handle = engine.allreduce_async(np.full(20_000, turn, np.float32), engine.Sum, f"shared {turn}")
        seen: list[float] = []
        waiters = [
            threading.Thread(target=lambda h=handle, s=seen: s.append(float(engine.synchronize(h)[-1])))
            for _ in range(4)
        ]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join()
        assert seen == [turn * size] * 4


@on_ranks(1, 2, 3, 4, world={"cycle_time_ms": 10_000})
def test_submitted_by_one_thread_fetched_by_another(size: int) -> None:
    handles: list[Any] = []
    submitter = threading.Thread(
        target=lambda: handles.extend(
            engine.allreduce_async(np.full(10, k, np.int32), engine.Sum, f"given {k}") for k in range(300)
        )
    )
    submitter.start()
    submitter.join()
    assert [int(engine.synchronize(handle)[0]) for handle in handles] == [k * size for k in range(300)]


@pytest.mark.sample(1)
@needs_memory_back
@on_ranks(1, 3, world={"cycle_time_ms": 0})
def test_dropped_handles_leave_no_memory(rank: int) -> None:
    def memory() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4

    def turn(number: int) -> None:
        for k in range(300):
            engine.allreduce_async(np.full(25_000, rank, np.float32), engine.Sum)
            engine.allreduce_async_(np.full(25_000, rank, np.float32), engine.Sum, f"dropped {number} {k}")
            engine.broadcast_async_(np.full(25_000, rank, np.float32), 0)
            engine.allgather_async(np.full((100, 10), rank, np.float32))
            if k % 50 == 49:
                engine.allreduce(np.zeros(1, np.float32), engine.Sum)

    turn(0)
    before = memory()
    for number in range(1, 5):
        turn(number)
    # Leaked tensors would be 480,000 kB. The growth is that of the ranks' slots, counted when they are first touched:
    # 2 MB a rank at the default chunk, as far as one rank happens to run ahead of the others.
    assert memory() - before < 64_000, f"{before} kB, then {memory()} kB"
