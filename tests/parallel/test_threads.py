"""Ranks as threads of one process: the random programs again, and cases that only this harness reaches.

`make sanitize-threads` runs this file under ThreadSanitizer, which is blind across processes.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import engine
from engine.native import core

from ..waiting import until
from . import drawn_operations
from .drawn_operations import Walk, problems
from .native_calls import FOREVER, Call, Driver, library
from .thread_world import CALLS, ThreadWorld

EXAMPLES = int(os.environ.get("DRAWN_EXAMPLES", "0"))
# The host of each rank.
LAYOUTS = [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 2, 1)]
layouts = pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))


@pytest.mark.timeout(120 + EXAMPLES)
@pytest.mark.sample(4)
@layouts
def test_drawn_programs(hosts: tuple[int, ...]) -> None:
    size = len(hosts)
    with ThreadWorld(size, hosts) as world:

        @hypothesis.settings(
            max_examples=EXAMPLES or 15,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(drawn_operations.program(st, size))
        def run(program: drawn_operations.Program) -> None:
            found = problems(world.run(lambda rank: Walk(rank, size).run(program)))
            assert not found, "\n".join(found)

        run()


def steps(rank: int, count: int, elements: int) -> None:
    """Train on a small scale: many gradients submitted one by one, then awaited in another order, in place."""
    native = engine.session.runtime.current_engine()
    gradients = [np.empty(elements + k, np.float32) for k in range(8)]
    for step in range(count):
        for k, gradient in enumerate(gradients):
            gradient[:] = rank + step + k
        handles = [engine.allreduce_async_(each, engine.Sum, f"gradient.{k}") for k, each in enumerate(gradients)]
        for k in range(7, -1, -1):
            handles[k].wait()
        native.mark_step()
        for k, gradient in enumerate(gradients):
            assert (gradient == sum(range(native.size)) + native.size * (step + k)).all()


@pytest.mark.parametrize("spin_us", [0.0, 25.0])
@layouts
def test_steps(hosts: tuple[int, ...], spin_us: float) -> None:
    with ThreadWorld(len(hosts), hosts, spin_us=spin_us) as world:
        for elements, chunk in ((1, 1 << 19), (3000, 1 << 19), (30_000, 4096)):
            world.engines[0].set_knobs(chunk_bytes=chunk)
            world.run(steps, 40, elements)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 1)])
def test_steps_over_several_sockets(hosts: tuple[int, ...]) -> None:
    with ThreadWorld(len(hosts), hosts, sockets_per_lane=4) as world:
        for used in (4, 1, 3):
            world.engines[0].set_knobs(sockets_per_lane=used)
            world.run(steps, 4, 100_000)


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Call a function in so many threads at once, each with its number; raise the first error."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 0), (0, 1, 1)])
def test_several_threads_of_a_rank(hosts: tuple[int, ...]) -> None:
    """Each waits for operations of its own, so that the driver's role changes hands."""

    def rank_of_threads(rank: int) -> None:
        native = engine.session.runtime.current_engine()

        def work(number: int) -> None:
            tensor = np.empty(100, np.float64)
            for turn in range(40):
                tensor[:] = rank + turn
                native.allreduce(tensor, tensor, f"thread.{number}", engine.Sum, 1.0, 1.0, turn % 2 == 0).wait()
                assert (tensor == sum(range(size)) + size * turn).all()
                native.counters(), native.history(), native.pending(), native.knobs()

        in_threads(work, 3)

    size = len(hosts)
    with ThreadWorld(size, hosts) as world:
        world.run(rank_of_threads)


def notified_steps(rank: int, size: int, group: core.Engine) -> None:
    """Have threads of the engine take results, while this one drops some handles, sets some aside and waits for others.

    They go into given outputs, in the world and in a set of the same ranks.
    """
    world = engine.session.runtime.current_engine()
    told: list[int] = []
    for turn in range(30):
        outputs = [np.zeros(size * (1000 * (turn % 3) + 1)) for _ in range(4)]
        for k, output in enumerate(outputs):
            native = (world, group)[k % 2]
            rows = np.full(len(output) // size, rank + 1.0)
            if k < 2:
                handle = native.allgather(rows, f"rows {k}", False, None, output)
            else:
                handle = native.alltoall(np.tile(rows, size), [len(rows)] * size, f"rows {k}", False, None, output)
            handle.set_aside(turn % 2 == 0)
            handle.set_aside(False)
            handle.notify(lambda handle=handle: told.append(len(handle.gathered[1]) if handle.wait() is None else 0))
            if k % 3 == 0:
                handle.wait()
        until(lambda: len(told) == 4 * (turn + 1), "all are told")  # noqa: B023
        for output in outputs:
            assert (output == np.repeat(np.arange(size) + 1.0, len(output) // size)).all()
    assert told == [size] * len(told)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_notifications_with_given_outputs_in_world_and_set(size: int) -> None:
    with ThreadWorld(size) as world:
        for _ in range(3):
            offset, ranks = world.engines[0].claim(size), tuple(range(size))
            groups = [each.enter_set(ranks, 2 * CALLS + rank, offset) for rank, each in enumerate(world.engines)]
            world.run(lambda rank: notified_steps(rank, size, groups[rank]))  # noqa: B023
            world.run(lambda rank: groups[rank].close(5.0))  # noqa: B023


def messages_in_turn(rank: int, pair: core.Engine) -> None:
    """Have threads send and receive messages under names that recur, both ways, by all that a handle can do."""
    told: list[int] = []
    sizes = [0, 3, 5000, 200_000]

    def exchange(thread: int) -> None:
        sends = rank == thread % 2
        for turn in range(4):
            handles, outputs = [], [np.zeros(sizes[(k + turn) % 4]) for k in range(12)]
            for k, output in enumerate(outputs):
                name = f"{thread} {k % 3}"
                if sends:
                    handles.append(pair.send_bytes(np.full(len(output), k + 1.0), name, k % 2 == 0))
                else:
                    handles.append(pair.receive_bytes(None if k % 4 == 1 else output, name))
                handles[-1].set_aside(k % 5 == 0)
                handles[-1].set_aside(False)
                if k % 4 == 3:
                    handles[-1].release_tensor()
                if k % 3 == 0:
                    handles[-1].notify(lambda k=k: told.append(k))
            if turn == 3 and sends:
                continue  # nobody keeps the last ones
            second = threading.Thread(target=lambda: [each.wait_within(60.0) for each in handles[::2]])  # noqa: B023
            second.start()
            for k, (handle, output) in enumerate(zip(handles, outputs, strict=True)):
                assert handle.wait_within(60.0) and handle.done
                data = handle.gathered[0]
                found = output if data is None else np.frombuffer(data)
                assert sends or (len(found) == len(output) and (found == k + 1).all()), (k, turn)
            second.join()

    in_threads(exchange, 4)
    until(lambda: len(told) == 4 * 4 * 4, "all are told")


def test_messages_of_threads() -> None:
    with ThreadWorld(3) as world:
        for ranks in ((0, 1), (1, 2)):
            offset = world.engines[0].claim(2)
            alone = {"ends_alone": True, "stall_limit": 0.0}
            pairs = {
                rank: world.engines[rank].enter_set(ranks, 2 * CALLS + rank, offset, settings=alone) for rank in ranks
            }
            world.run(lambda rank: messages_in_turn(pairs[rank].rank, pairs[rank]) if rank in pairs else None)  # noqa: B023
            world.run(lambda rank: pairs[rank].close(5.0) if rank in pairs else None)  # noqa: B023


def test_a_rank_leaves_a_pair_under_messages_of_threads() -> None:
    """Sends, receives and notifications of one rank end, while the other one leaves."""
    with ThreadWorld(2) as world:
        offset = world.engines[0].claim(2)
        pairs = [
            each.enter_set((0, 1), 2 * CALLS + rank, offset, settings={"ends_alone": True, "stall_limit": 0.0})
            for rank, each in enumerate(world.engines)
        ]
        told: list[int] = []

        def leave(rank: int) -> None:
            if rank == 1:
                pairs[1].receive_bytes(None, "0").wait()
                pairs[1].close(0.0)
                return

            def send(thread: int) -> None:
                for k in range(10_000):
                    handle = pairs[0].send_bytes(np.ones(5000), f"{(thread + k) % 3}", False)
                    handle.notify(lambda: told.append(1))
                    if k % 8 == 7:
                        handle.wait_within(60.0)

            def send_until_left(thread: int) -> None:
                with pytest.raises(engine.errors.CollectiveError, match="rank 1 has left"):
                    send(thread)
                told.append(0)

            threads = [threading.Thread(target=send_until_left, args=(thread,)) for thread in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            until(lambda: pairs[0].idle and told.count(0) == 3, "all threads have heard of it")

        world.run(leave)
        pairs[0].close(5.0)


def native_steps(rank: int, size: int, count: int) -> None:
    """Run native calls of several threads among Python's: all kinds, unnamed, from a `done`, and in a backlog."""
    total = size * (size + 1) // 2
    with Driver() as driver:

        def call(kind: str, tensors: list[Any], **options: Any) -> Call:
            return driver.call(kind, tensors, set=CALLS + rank, **options)

        for turn in range(2):
            calls = [
                call(
                    "allreduce",
                    [np.full(3, rank + 1 + k)],
                    name=f"{k} {'x' * 300}",
                    linger=(0, 0, 30_000, FOREVER)[k % 4],
                )
                for k in range(count)
            ]
            unnamed = [call("allreduce", [np.full(3, rank + 1)]) for _ in range(300)]
            inner = [
                call("allreduce", [np.full(3, rank + 1)], name=f"inner {k}", linger=FOREVER * (k % 2)) for k in range(4)
            ]
            outer = [
                call("allgather", [np.full((rank + 1, k), rank), np.full(k, rank)], name=f"outer {k}", group=True)
                for k in range(4)
            ]
            chain = call("broadcast", [np.full(30_000, rank)], name="chain").then("again", left=20)
            refused = call("allreduce", [np.ones(3)], name="refused")
            refused.native.op = 99
            for one, other in zip(outer, inner, strict=True):
                one.then("into_another", other.address)
            thread = threading.Thread(target=lambda: driver.submit(*calls, *outer, chain, refused, threads=4))  # noqa: B023
            thread.start()
            driver.submit(*unnamed)
            for k in range(20):
                assert (engine.allreduce(np.full(3, rank + 1), engine.Sum, f"Python {k}") == total).all()
            thread.join()
            driver.wait([*calls, *unnamed, *inner, *outer, refused])
            driver.wait([chain], times=21)
            for k, each in enumerate(calls):
                assert each.status == "OK" and (each.targets[0] == total + k * size).all(), (turn, k, each.text)
            assert all((each.targets[0] == total).all() for each in (*unnamed, *inner))
            assert (chain.targets[0] == 0).all() and refused.status in ("REFUSED", "DUPLICATE"), refused.text
            for k, each in enumerate(outer):
                rows = [rows for _, rows in each.gathered_group]
                assert rows == [[other + 1 for other in range(size)], [k] * size]


@pytest.mark.sample(3)
@layouts
def test_native_calls(hosts: tuple[int, ...]) -> None:
    library()
    with ThreadWorld(len(hosts), hosts) as world:
        world.run(lambda rank: native_steps(rank, len(hosts), 1500))


@pytest.mark.skipif(
    "tsan" in os.environ.get("LD_PRELOAD", ""), reason="64 ranks take a sanitizer longer than the stall limit"
)
def test_native_calls_of_64_ranks() -> None:
    library()
    with ThreadWorld(64) as world:
        world.run(lambda rank: native_steps(rank, 64, 8))


def test_engines_close_with_native_calls_in_flight() -> None:
    """Some calls begin while the engines close."""

    def leave(rank: int) -> None:
        driver = drivers[rank]
        calls = [
            driver.call("allreduce", [np.ones(3)], name=f"{rank % 2} {k}", set=CALLS + rank, linger=30_000 * (k % 2))
            for k in range(2000)
        ]
        thread = threading.Thread(target=lambda: driver.submit(*calls, threads=3))
        thread.start()
        world.engines[rank].close(0.05)
        thread.join()
        driver.wait(calls)
        ended.update(call.status for call in calls)

    for _ in range(3):
        ended: set[str] = set()
        world = ThreadWorld(3)
        drivers = [Driver() for _ in range(3)]
        world.run(leave)
        for driver in drivers:
            with driver:
                assert all(call.outcome.times == 1 for call in driver.calls)
        assert "NOT_INITIALIZED" in ended and ended <= {"OK", "NOT_INITIALIZED", "FAILED_WORLD"}
        for descriptor in world.pages:
            os.close(descriptor)


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 1), (0, 1, 2)])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_an_abort_in_the_middle_reaches_every_thread(victim: int, hosts: tuple[int, ...]) -> None:
    def loop(rank: int) -> Any:
        native = engine.session.runtime.current_engine()
        tensor = np.ones(50_000, np.float32)
        for turn in range(10_000):
            if rank == victim and turn == 20:
                native.abort("enough")
            try:
                native.allreduce(tensor, tensor, "loop", engine.Max, 1.0, 1.0, rank == 0).wait()
            except engine.errors.RankRaisedError as error:
                return error.rank, str(error)
        return None

    with ThreadWorld(3, hosts) as world:
        for answer in world.run(loop):
            assert answer is not None and answer[0] == victim and "enough" in answer[1]


def test_worlds_come_and_go_and_leave_nothing() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("engine-" in line for line in maps)

    gc.collect()  # other tests' engines
    before = descriptors(), threading.active_count(), mapped()
    for size, hosts in ((1, None), (2, None), (3, (0, 1, 1)), (4, None), (4, (0, 1, 2, 0)), (2, None), (1, None)):
        with ThreadWorld(size, hosts) as world:
            world.run(steps, 3, 100)
            # Some leave with an operation in flight that no other rank will submit any more.
            world.engines[0].allreduce(np.ones(3), np.ones(3), "alone", engine.Sum, 1.0, 1.0) if size > 1 else None
            world.close(0.05)
    del world
    gc.collect()
    after = descriptors(), threading.active_count(), mapped()
    assert all(now <= then for now, then in zip(after, before, strict=True)), f"{before}, then {after}"


def test_each_wait_for_others_to_join_is_reported() -> None:
    with ThreadWorld(2, stall_warning=0.2) as world:

        def reported() -> bool:
            return any("join has waited" in line and "for rank 1" in line for line in world.engines[0].overdue())

        def work(rank: int) -> None:
            for turn in range(2):
                if rank:
                    until(reported, f"a report of join {turn}", seconds=20.0)
                engine.join()

        world.run(work)
