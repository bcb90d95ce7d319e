"""Completion of native calls: time, thread and number of `done` callbacks, and what they may do."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.trace.reading import read

from ..on_ranks import on_ranks
from ..waiting import be_late, until, until_files
from . import counters_program
from .native_calls import FOREVER, MARKS_STEP, Call, Driver

pytestmark = on_ranks(1, 2, 3, job="native calls")

CYCLE_MS = 400.0  # so long that waiting for its end is noticed at once
LINGERS = {"none": 0, "30 us": 30_000, "forever": FOREVER}


def total(size: int) -> int:
    """Sum of 1 over the first rank, 2 over the second .."""
    return size * (size + 1) // 2


def sums(driver: Driver, names: list[str], rank: int, **options: Any) -> list[Call]:
    """Calls whose values all differ."""
    return [
        driver.call("allreduce", [np.full(3, rank + 1 + k, np.int64)], name=name, **options)
        for k, name in enumerate(names)
    ]


def check_sums(calls: list[Call], size: int) -> None:
    assert [(call.status, call.targets[0][-1]) for call in calls] == [
        ("OK", total(size) + k * size) for k in range(len(calls))
    ]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


# ---- where and how often


@pytest.mark.parametrize("linger", LINGERS)
def test_done_comes_once_on_no_thread_of_python_and_with_nothing_blocked(linger: str, rank: int, size: int) -> None:
    """Holds while the main thread drives, and while no thread does."""
    with Driver() as driver:
        calls = sums(driver, [f"here {linger} {k}" for k in range(20)], rank, linger=LINGERS[linger])
        thread = threading.Thread(target=lambda: driver.submit(*calls))
        thread.start()
        for k in range(20):
            assert (engine.allreduce(np.ones(3), engine.Sum, f"driven {k}") == size).all()
        engine.barrier("main threads drive")
        thread.join()
        driver.wait(calls)
        check_sums(calls, size)
        pythons = {thread.native_id, *(each.native_id for each in threading.enumerate())}
        for call in calls:
            noted = call.outcome
            assert noted.times == 1 and noted.held_gil == 0
            assert noted.thread not in pythons
            assert noted.inside or (noted.thread != noted.submitter and noted.signals == 0), "no finisher"
            assert noted.begun <= noted.ended


def test_a_submit_that_lingers_for_ever_returns_when_its_call_is_done(rank: int, size: int) -> None:
    with Driver() as driver:
        for k in range(5):
            call = driver.submit_here(
                driver.call("allreduce", [np.full(3, rank + 1)], name=f"alone {k}", linger=FOREVER)
            )
            assert call.outcome.finished == 1 and call.outcome.ended <= call.outcome.returned
            assert (call.targets[0] == total(size)).all()


@on_ranks(2, 3, job="native calls")
@pytest.mark.parametrize("linger", [0, 200_000])
def test_submit_returns_though_a_rank_is_late(linger: int, rank: int, size: int) -> None:
    with Driver() as driver:
        call = driver.call("allreduce", [np.full(3, rank + 1)], name=f"late {linger}", linger=linger)
        if rank != 0:
            driver.submit(call)
            assert call.outcome.times == 0, "rank 0 has not come"
        engine.barrier("the others have submitted it")
        if rank == 0:
            driver.submit(call)
        call.wait()
        assert (call.targets[0] == total(size)).all()
        if rank != 0:
            assert call.outcome.returned < call.outcome.ended and not call.outcome.inside


# ---- what a done may do


def test_a_done_may_call_collectives_of_python(rank: int, size: int) -> None:
    """These complete only if the thread that calls `done` holds neither the driver's role nor a lock."""
    found: list[Any] = []

    def inner(call: Call) -> None:
        found.append(engine.allreduce(np.full(3, rank + 1), engine.Sum, "in Python"))
        engine.barrier("in done")

    with Driver() as driver:
        for linger in (0, FOREVER):
            call = driver.call("allreduce", [np.ones(3)], name="outer", linger=linger).then(inner)
            driver.submit(call)
            call.wait()
        assert len(found) == 2 and all((each == total(size)).all() for each in found)


def test_as_many_finishers_as_it_takes(rank: int, size: int) -> None:
    """Each of many `done`s blocks until all have begun; afterwards the threads are gone."""
    count = 40
    with Driver() as driver:
        driver.run("allreduce", [np.ones(1)], name="first")
        calls = sums(driver, [f"gate {k}" for k in range(count)], rank)
        for call in calls:
            call.then("at_gate", 1)
        driver.submit(*calls)
        until(lambda: sum(call.outcome.times for call in calls) == count, "all have begun")
        before = threads()
        driver.library.open_gate(1)
        driver.wait(calls)
        driver.library.open_gate(0)
        check_sums(calls, size)
        if size == 2:  # It takes 5 s.
            until(lambda: threads() <= before - count + 8, "finishers without work end")
        works = driver.run("allreduce", [np.ones(1)], name="first")
        assert works.status == "OK"


def test_dones_that_are_each_blocked_in_a_collective(rank: int, size: int) -> None:
    """Each waits in a collective that the ranks reach in different orders."""
    count = 24
    with Driver() as driver:
        inner = sums(driver, [f"inner {k}" for k in range(count)], rank)
        outer = sums(driver, [f"outer {k}" for k in range(count)], rank)
        for k, call in enumerate(outer):
            call.then("into_another", inner[k if rank % 2 else count - 1 - k].address)
            inner[k].native.linger_ns = FOREVER if k % 2 else 0
        driver.submit(*outer)
        driver.wait(outer)
        check_sums(inner, size)


@pytest.mark.parametrize(("linger", "length"), [("none", 1000), ("30 us", 300), ("forever", 100)])
def test_a_done_that_submits_the_next_call(linger: str, length: int, rank: int, size: int) -> None:
    """Calls form chains, each of which begins in the `done` of the one before."""
    with Driver() as driver:
        chains = [
            driver.call("allreduce", [np.full(3, rank + 1 + k)], name=f"chain {linger} {k}", linger=LINGERS[linger])
            for k in range(3)
        ]
        for call in chains:
            call.then("again", left=length - 1)
        driver.submit(*chains, threads=len(chains))
        driver.wait(chains, times=length)
        assert [call.outcome.times for call in chains] == [length] * len(chains)
        check_sums(chains, size)


# ---- many


def test_10000_calls_of_8_threads(rank: int, size: int) -> None:
    with Driver() as driver:
        for turn in range(2):
            calls = sums(driver, [f"thread {k}" for k in range(5000)], rank)
            driver.submit(*calls, threads=8)
            driver.wait(calls)
            check_sums(calls, size)
            assert len({call.outcome.order for call in calls}) == len(calls), turn
            # A finisher that gets no processor counts as blocked, and gets a helper each millisecond.
            assert len({call.outcome.thread for call in calls}) < 1000, "as many threads as calls end at once"


def test_3000_new_names_at_once(rank: int, size: int) -> None:
    """The names exceed the request ring; a thread that does not wait submits them, in another order on each rank."""
    with Driver() as driver:
        for prefix in ("", "long " * 100):
            names = [f"new {k} {prefix}" for k in range(3000)]
            calls = sums(driver, names, rank)
            mixed = list(calls)
            random.Random(rank).shuffle(mixed)
            driver.submit(*mixed)
            driver.wait(calls)
            check_sums(calls, size)


def test_3000_new_names_natively_and_as_many_in_python(rank: int, size: int) -> None:
    """One thread alternates, then two run at once; half of the names are Python's on one rank and native on another."""
    with Driver() as driver:
        for label, apart in (("by turns", False), ("at once", True)):
            names = [f"{label} {k} {'x' * 60}" for k in range(6000)]
            calls = sums(driver, names, rank)
            native = [k for k in range(6000) if (k + rank) % 2]
            arrays = {k: np.full(3, rank + 1 + k, np.int64) for k in range(6000) if (k + rank) % 2 == 0}
            thread = threading.Thread(target=lambda: driver.submit(*(calls[k] for k in native)))  # noqa: B023
            if apart:
                thread.start()
            handles = {}
            for k in range(6000):
                if k in arrays:
                    handles[k] = engine.allreduce_async(arrays[k], engine.Sum, names[k])
                elif not apart:
                    driver.submit_here(calls[k])
            for k, handle in handles.items():
                assert engine.synchronize(handle)[0] == total(size) + k * size
            if apart:
                thread.join()
            driver.wait(calls[k] for k in native)
            for k in native:
                assert calls[k].status == "OK" and calls[k].targets[0][0] == total(size) + k * size, k


def test_10000_calls_without_a_name(rank: int, size: int) -> None:
    """One thread has them in flight at once: they meet in its order."""
    with Driver() as driver:
        calls = [driver.call("allreduce", [np.full(3, rank + 1 + k, np.int64)]) for k in range(10_000)]
        driver.submit(*calls)
        driver.wait(calls)
        check_sums(calls, size)


@on_ranks(2, job="native calls")
def test_python_waits_its_turn_behind_native_calls_and_uses_no_processor(rank: int, size: int) -> None:
    """The number of unnamed calls in flight is limited: later ones wait, including Python's."""
    with Driver() as driver:
        calls = [driver.call("allreduce", [np.full(3, rank + 1 + k, np.int64)]) for k in range(600)]
        if rank == 0:
            driver.submit(*calls)
            used = []

            def go_on(begun: float = time.process_time()) -> None:
                used.append(time.process_time() - begun)
                Path("go on").touch()

            threading.Timer(1.0, go_on).start()
            last = engine.allreduce(np.full(3, rank + 601), engine.Sum)
        else:
            until_files("go on")
            driver.submit(*calls)
            last = engine.allreduce(np.full(3, rank + 601), engine.Sum)
            used = [0.0]
        driver.wait(calls)
        check_sums(calls, size)
        assert last[0] == total(size) + 600 * size and used[0] < 0.3, used


@on_ranks(3, world={"cycle_time_ms": 2.0}, job="native calls")  # a new world: no other thread has called there
def test_what_a_done_submits_is_not_taken_for_left_out(rank: int, size: int) -> None:
    """The only thread of rank 0 waits in Python; the call that rank 1 waits for comes later, from a `done`."""
    with Driver() as driver:
        first = driver.call("allreduce", [np.ones(3)], name="before it")
        unnamed = driver.call("allreduce", [np.full(3, rank + 1)])
        if rank == 0:
            first.then("into_another", unnamed.address)
        if rank == 2:
            be_late(0.5)
        driver.submit_here(first)
        if rank == 0:
            engine.barrier()
            first.wait()
        else:
            first.wait() if rank == 2 else None
            assert (engine.allreduce(np.full(3, rank + 1), engine.Sum) == total(size)).all()
            engine.barrier()
        first.wait()
        assert rank or (unnamed.status, unnamed.text) == ("OK", "")


# ---- how soon


def entries() -> int:
    return engine.session.runtime.current_engine().counters()["entries"]


@on_ranks(1, 2, 3, world={"cycle_time_ms": CYCLE_MS}, job="native calls")
@pytest.mark.parametrize("linger", LINGERS)
def test_a_call_does_not_wait_for_the_end_of_a_cycle(linger: str, rank: int, size: int) -> None:
    """No thread waits in the engine, yet a native call counts as awaited; so does one with a new name."""
    with Driver() as driver:
        call = driver.call("allreduce", [np.ones(3)], name=f"soon {linger}", linger=LINGERS[linger])
        us = driver.timed(call, 8)
        new = [
            driver.run("allreduce", [np.ones(3)], name=f"new {linger} {k}", linger=LINGERS[linger]) for k in range(4)
        ]
        # Ranks begin together except for scheduling: most of the times are far below a cycle.
        assert sorted(us)[len(us) // 2] < CYCLE_MS * 1e3 / 4, us
        assert min(each.outcome.ended - each.outcome.begun for each in new) < CYCLE_MS * 1e6 / 4


@on_ranks(2, job="native calls")
def test_calls_that_come_together_are_fused(rank: int) -> None:
    """Calls that come while an entry is executed make the next one: here while a large one is."""
    count, least = 50, 1 << 30
    with Driver() as driver:
        for turn in range(12):
            large = driver.call("allreduce", [np.zeros(2 << 20, np.float32)], name="large", in_place=True)
            calls = sums(driver, [f"fused {k}" for k in range(count)], rank)
            engine.barrier("begin together")
            before = entries()
            driver.submit(large, *calls)
            driver.wait([large, *calls])
            check_sums(calls, 2)
            if turn > 1:  # Names are new in the first, and each is an entry.
                least = min(least, entries() - before)
    assert least < 15


# ---- what else is to be as in Python


def test_denormals_are_kept_whatever_the_callers_thread_does(rank: int, size: int) -> None:
    """The threads that call `done` have the default floating-point state, and the caller's own is unchanged."""
    with Driver() as driver:
        default = driver.library.default_floats()
        driver.library.flush_denormals(1)
        try:
            for k, linger in enumerate((0, FOREVER)):
                call = driver.call("allreduce", [np.full(3, 1e-40, np.float32)], name=f"small {k}", linger=linger)
                driver.submit_here(call)
                call.wait()
                bits = call.targets[0].view(np.uint32).tolist()
                assert bits == [int(np.float32(1e-40).view(np.uint32)) * size] * 3
                assert call.outcome.inside or call.outcome.floats & ~0x3F == default & ~0x3F, hex(call.outcome.floats)
            gates = sums(driver, [f"floats {k}" for k in range(6)], rank)
            for gated in gates:
                driver.submit_here(gated.then("at_gate", 2))
            until(lambda: all(each.outcome.times for each in gates), "new finishers")
            driver.library.open_gate(2)
            driver.wait(gates)
            driver.library.open_gate(0)
            spoiled = sums(driver, [f"spoiled {k}" for k in range(60)], rank)
            for each in spoiled:
                driver.submit(each.then("flushing"))
                each.wait()
            assert {each.outcome.floats & ~0x3F for each in (*gates, *spoiled)} == {default & ~0x3F}
        finally:
            driver.library.flush_denormals(0)


def test_native_calls_are_counted(rank: int, size: int) -> None:
    native = engine.session.runtime.current_engine()
    with Driver() as driver:
        before = native.counters()
        calls = sums(driver, [f"counted {k}" for k in range(30)], rank)
        group = driver.call("allgather", [np.ones((2, 2)), np.ones(3)], name="counted group", group=True)
        driver.submit(*calls, group)
        driver.wait([*calls, group])
        after = native.counters()
        assert after["tensors"] - before["tensors"] == 31
        assert after["bytes"] > before["bytes"]
        assert any(row["name"] == "counted group" for row in native.history())


@on_ranks(2, world={"metrics": True}, job="native calls")
def test_steps_are_marked(rank: int) -> None:
    native = engine.session.runtime.current_engine()
    native.record_steps()
    with Driver() as driver:
        before = counters_program.own()
        for k in range(12):
            driver.run("allreduce", [np.ones(3)], name="gradients", flags=MARKS_STEP * (k % 3 == 2), optimizer=1)
        fields = counters_program.own()
        assert fields["steps"][0] - before["steps"][0] == 4
        assert fields["submitted"] == fields["completed"]


@on_ranks(2, job="native calls")
def test_native_calls_are_on_the_timeline(rank: int) -> None:
    directory = Path(f"timeline.{rank}")
    with Driver() as driver:
        engine.start_timeline(directory / "t.json")
        for k in range(5):
            driver.run("allreduce", [np.ones(100)], name=f"drawn {k % 2}")
        driver.run("allgather", [np.ones((3, 2)), np.ones(2)], name="drawn group", group=True)
        engine.stop_timeline()
        notes: list[str] = []
        (recording,) = read(sorted(directory.glob("t.rank*.json")), notes)
        names = [name for _, name in recording.tensors]
        assert not notes and {name: names.count(name) for name in set(names)} == {
            "drawn 0": 3,
            "drawn 1": 2,
            "drawn group": 1,
        }
        for shown in recording.tensors.values():
            assert shown.submitted <= shown.ready <= shown.started <= shown.ended, shown


@on_ranks(2, job="native calls")
def test_what_is_in_flight_is_shown(rank: int) -> None:
    native = engine.session.runtime.current_engine()
    with Driver() as driver:
        call = driver.call("allreduce", [np.ones(3)], name="seen")
        if rank == 0:
            driver.submit(call)
            (shown,) = [each for each in native.pending() if each["name"] == "seen"]
            assert shown["kind"] == "allreduce" and shown["missing"] in ([1], None)
        engine.barrier("it was seen")
        if rank == 1:
            driver.submit(call)
        call.wait()
