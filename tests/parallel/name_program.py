"""Names: many, none, long, changing, coming back; orders and threads that differ between ranks. Runs on every rank."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import numpy as np

import engine

from .on_ranks import Cases, check_equal, refused, small_numbers
from .operation_table import expected

IDS = 16_384  # engine_ext/shared/layout.h
NAME_BYTES = 1024


def total(size: int, scale: float = 1.0, shift: float = 0.0) -> float:
    """The sum over ranks of rank * scale + shift."""
    return size * (size - 1) / 2 * scale + size * shift


def many_names() -> int:
    """Unnamed beyond the 256 that can be outstanding, thousands of names, and more names than ids."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    with cases.case("1000 outstanding without a name"):
        handles = [engine.allreduce_async(np.full(3, rank + k, np.float32), engine.Sum) for k in range(1000)]
        results = [engine.synchronize(handle)[0] for handle in handles]
        assert results == [total(size, 1, k) for k in range(1000)]
        assert len({handle.name for handle in handles}) == 256
    with cases.case("kinds are counted apart"):
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
    with cases.case("4000 names in flight, three times, each rank in its own order"):
        for turn in range(3):
            order = list(range(4000))
            random.Random(rank + 10 * turn).shuffle(order)
            found = {k: engine.allreduce_async(np.full(2, rank + k, np.float64), engine.Sum, f"m{k}") for k in order}
            random.Random(rank + 10 * turn + 5).shuffle(order)
            for k in order:
                assert engine.synchronize(found[k])[1] == total(size, 1, k)
    with cases.case("more names than ids, one window after another, and the first ones again"):
        for start in [*range(0, 20_000, 1000), 0, 1000, 19_000]:
            handles = [
                engine.allreduce_async_(np.full(1, rank * k, np.int64), engine.Sum, f"x{k}")
                for k in range(start, start + 1000)
            ]
            for k, handle in zip(range(start, start + 1000), handles, strict=True):
                assert engine.synchronize(handle)[0] == total(size, k), k
    with cases.case("more names in flight than ids"):
        count = IDS + 2000
        order = list(range(count))
        if rank % 2:
            order.reverse()
        data = np.arange(count, dtype=np.int64) * rank
        found = {k: engine.allreduce_async_(data[k : k + 1], engine.Sum, f"y{k}") for k in order}
        for k in order:
            engine.synchronize(found[k])
        assert np.array_equal(data, np.arange(count) * int(total(size)))
    with cases.case("other names evict while shapes change"):
        for turn in range(2):
            for start in range(0, IDS + 3000, 2000):
                handles = [
                    engine.allreduce_async(np.full(1 + (k + turn) % 3, rank, np.float32), engine.Sum, f"x{k}")
                    for k in range(start, start + 2000)
                ]
                for k, handle in zip(range(start, start + 2000), handles, strict=True):
                    assert engine.synchronize(handle).tolist() == [total(size)] * (1 + (k + turn) % 3)
    return cases.done(6)


def evictions() -> None:
    """The names used longest ago come again, with other shapes, just when new names are about to evict them."""
    engine.init(cycle_time_ms=0.2)
    rank, size = engine.rank(), engine.size()
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


def odd_names() -> int:
    """Long names, names of other alphabets, names that change what they mean, and names that are refused."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    for text in ("a", " ", "wörter/größe", "层.0.重み", "🙂" * 256, "x" * NAME_BYTES, "%s%n\n\t\\", "a" * 63, "a" * 64):
        with cases.case(f"name {text[:20]!r} of {len(text)}"):
            for _ in range(3):
                handle = engine.allreduce_async(np.full(2, rank, np.float32), engine.Sum, text)
                assert handle.name == text
                assert engine.synchronize(handle).tolist() == [total(size)] * 2
    with cases.case("names that differ at their end only"):
        names = ["x" * (NAME_BYTES - 4) + f"{k:04}" for k in range(600)]
        handles = [engine.allreduce_async(np.full(1, rank + k, np.int32), engine.Sum, n) for k, n in enumerate(names)]
        for k, handle in enumerate(handles):
            assert engine.synchronize(handle)[0] == total(size, 1, k)
    with cases.case("too long, empty, no text"):
        kind: Any
        for text, kind in ((NAME_BYTES * "x" + "x", ValueError), ("🙂" * 257, ValueError), ("", ValueError)):
            refused(lambda text=text: engine.allreduce(np.ones(1), engine.Sum, text), "1024", kind)  # type: ignore[misc]
        refused(lambda: engine.allreduce(np.ones(1), engine.Sum, 3), "", TypeError)
        refused(lambda: engine.allreduce(np.ones(1), engine.Sum, b"x"), "", TypeError)
        refused(lambda: engine.allreduce(np.ones(1), engine.Sum, "\ud800"), "", ValueError)
    with cases.case("a name whose meaning changes with every call"):
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
    with cases.case("a duplicate is refused on its own rank, and the first goes on"):
        tensor = np.full(4, rank, np.float32)
        if rank == 0:
            first = engine.allreduce_async(tensor, engine.Sum, "twice")
            if size > 1:  # alone it may be done at once
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
    return cases.done(13)


def plans(cases_of_plans: list[list[dict[str, Any]]]) -> int:
    """Every rank submits the same named operations in an order of its own and waits for them in another."""
    engine.init()
    cases, rank, size = Cases(), engine.rank(), engine.size()
    for number, plan in enumerate(cases_of_plans):
        rng = random.Random(1000 * number + rank)
        order = list(range(len(plan)))
        rng.shuffle(order)
        handles: dict[int, Any] = {}
        for k in order:
            handles[k] = _submit(plan[k], k)
            if rng.random() < 0.1:
                handles[rng.choice(list(handles))].done  # noqa: B018  (polling disturbs nothing)
            if rng.random() < 0.02:
                time.sleep(0.001)  # A late rank; nothing is waited for.
        rng.shuffle(order)
        results = {k: engine.synchronize(handles[k]) for k in order}
        with cases.case(f"plan {number}: {plan}"):
            for k, step in enumerate(plan):
                _check(step, k, results[k], size)
        assert rank < size
    return cases.done(len(cases_of_plans))


def _inputs(step: dict[str, Any], k: int, rank: int) -> np.ndarray:
    shape = list(step["shape"])
    if step["kind"] == "allgather":
        shape = [step["rows"][rank % len(step["rows"])], *shape]
    return small_numbers(step["dtype"], shape, rank, k)


def _submit(step: dict[str, Any], k: int) -> Any:
    mine = _inputs(step, k, engine.rank())
    name = f"{step['name']}.{k}"
    if step["kind"] == "barrier":
        return engine.collectives.Handle(engine.runtime.engine().barrier(name), None, None)
    if step["kind"] == "allgather":
        return engine.allgather_async(mine, name)
    if step["kind"] == "broadcast":
        submit = engine.broadcast_async_ if step["in_place"] else engine.broadcast_async
        return submit(mine, step["root"] % engine.size(), name)
    submit = engine.allreduce_async_ if step["in_place"] else engine.allreduce_async
    return submit(mine, getattr(engine, step["op"]), name, step["prescale"])


def _check(step: dict[str, Any], k: int, got: Any, size: int) -> None:
    inputs = [_inputs(step, k, rank) for rank in range(size)]
    dtype = step["dtype"]
    if step["kind"] == "allgather":
        check_equal(dtype, got, np.concatenate(inputs))
    elif step["kind"] == "broadcast":
        check_equal(dtype, got, inputs[step["root"] % size])
    elif step["kind"] == "allreduce":
        check_equal(dtype, got, expected(dtype, step["op"], inputs, step["prescale"]).reshape(inputs[0].shape))


def threads() -> int:
    """Several threads of each rank submit and wait, blocking and not; with a cycle that nobody must wait for."""
    engine.init(cycle_time_ms=10_000)
    cases, size = Cases(), engine.size()
    failures: list[str] = []

    def work(thread: int, turns: int) -> None:
        rank = engine.rank()
        rng = random.Random(100 * rank + thread)
        try:
            for turn in range(turns):
                count = (1, 5, 3000, 40_000)[(thread + turn) % 4]
                mine = np.full(count, rank + turn, np.float32)
                name = f"t{thread}" if turn % 2 else f"t{thread}.{turn}"
                if turn % 3 == 0:
                    got = engine.allreduce(mine, engine.Sum, name)
                else:
                    handle = engine.allreduce_async(mine, engine.Sum, name)
                    if rng.random() < 0.5:
                        time.sleep(0)
                    got = engine.synchronize(handle)
                assert got[0] == got[-1] == total(size, 1, turn), (got, turn)
        except BaseException as error:
            failures.append(f"thread {thread}: {error!r}")
            raise

    with cases.case("six threads"):
        start = time.monotonic()
        workers = [threading.Thread(target=work, args=(k, 40)) for k in range(6)]
        for worker in workers:
            worker.start()
        work(6, 40)
        for worker in workers:
            worker.join()
        assert not failures, failures
        assert time.monotonic() - start < 9, "somebody has waited for a cycle"
    with cases.case("one handle, several waiters"):
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
    with cases.case("submitted by one thread, fetched by another"):
        handles: list[Any] = []
        submitter = threading.Thread(
            target=lambda: handles.extend(
                engine.allreduce_async(np.full(10, k, np.int32), engine.Sum, f"given {k}") for k in range(300)
            )
        )
        submitter.start()
        submitter.join()
        assert [int(engine.synchronize(handle)[0]) for handle in handles] == [k * size for k in range(300)]
    return cases.done(3)


def dropped() -> list[int]:
    """Handles that nobody waits for; kilobytes of memory before and after."""
    engine.init(cycle_time_ms=0)
    rank = engine.rank()

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
    return [before, memory()]
