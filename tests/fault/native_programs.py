"""Programs of ranks for the tests of native calls that fail; tests/parallel/native_calls.py makes the calls.

Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import engine

from ..parallel.native_calls import FOREVER, Call, Driver
from ..waiting import linger, until
from .life_programs import in_child
from .programs import observe, ones, touch, wait_for


def told(calls: Sequence[Call], since: float = 0.0) -> list[dict[str, Any]]:
    """Return the outcomes of calls; `late` is in seconds after `since`, or after the call if that was later."""
    return [
        {
            "status": call.status,
            "text": call.text,
            "times": call.outcome.times,
            "late": call.outcome.ended / 1e9 - max(since, call.outcome.begun / 1e9),
        }
        for call in calls
    ]


def moment(name: str) -> float:
    """Return the time that a rank has written to a file."""
    wait_for(name)
    until(lambda: Path(name).read_text(), f"{name} is written")
    return float(Path(name).read_text())


def note(name: str) -> None:
    Path(f"{name}.part").write_text(repr(time.monotonic()))
    os.replace(f"{name}.part", name)


# ---- ranks that leave, die and stand still


def leaving(cases: list[tuple[int, str, bool]]) -> list[Any]:
    """Have one rank leave in each world; the others submit before or after that, and no thread waits in the engine.

    A case is the leaving rank, the kind of name (known, new, or that of a call that failed on the ranks that stay), and
    whether the call is submitted before.
    """
    found: list[Any] = []
    for number, (victim, name, before) in enumerate(cases):
        engine.init()
        rank, size = engine.rank(), engine.size()
        driver = Driver()
        assert driver.run("allreduce", [ones()], name="known").status == "OK"
        engine.barrier()
        touch(f"through.{number}.{rank}")
        wait_for(*(f"through.{number}.{other}" for other in range(size)))
        others = [other for other in range(size) if other != victim]
        call = driver.call("allreduce", [ones()], name=name)
        if name == "failed" and rank != victim:
            refused = driver.call("allreduce", [ones()], name=name)
            refused.native.op = 99
            driver.submit(refused)
            assert refused.wait().status == "REFUSED"
        if rank == victim:
            wait_for(*(f"submitted.{number}.{other}" for other in others if before))
            note(f"left.{number}")
            engine.shutdown()
            found.append(None)
        else:
            if not before:
                moment(f"left.{number}")
                wait_for(f"gone.{number}")
            driver.submit(call)
            touch(f"submitted.{number}.{rank}")
            driver.wait([call], 20)
            found.append(told([call], moment(f"left.{number}"))[0])
            engine.shutdown()
        touch(f"gone.{number}")
        touch(f"over.{number}.{rank}")
        wait_for(*(f"over.{number}.{other}" for other in range(size)))
    return found


def disturbed(victim: int) -> Any:
    """Have more calls in flight than there is room for, with no thread in the engine, when a rank is disturbed."""
    engine.init()
    rank = engine.rank()
    driver = Driver()
    for _ in range(2):
        assert driver.run("allreduce", [ones()], name="known").status == "OK"
    engine.barrier()
    if rank == victim:
        touch(f"ready.{rank}")
        linger()
    names = ["known", *(f"new {k} {'x' * 200}" for k in range(1500))]
    calls = [driver.call("allreduce", [ones()], name=name) for name in names]
    calls.append(driver.call("allgather", [ones(), ones(3)], name="group", group=True))
    driver.submit(*calls)
    touch(f"ready.{rank}")
    driver.wait(calls, 30)
    later = driver.run("allreduce", [ones()], name="later")
    return [{**each, "at": call.outcome.ended / 1e9} for each, call in zip(told([*calls, later]), calls, strict=False)]


def withheld(limit: float) -> list[Any]:
    """Withhold a known name on rank 1, and in a second world a new one."""
    found = []
    for number, name in enumerate(("known", "new")):
        engine.init(stall_limit=limit, stall_warning=limit / 2)
        driver = Driver()
        driver.run("allreduce", [ones()], name="known")
        engine.barrier()
        if engine.rank() == 1:
            wait_for(f"over.{number}")
            found.append(observe(engine.barrier))
        else:
            call = driver.run("allreduce", [ones()], name=name)
            found.append(told([call])[0])
            touch(f"over.{number}")
        engine.shutdown()
    return found


def raised() -> list[Any]:
    """End the world on rank 1 with a message of its own."""
    engine.init()
    driver = Driver()
    call = driver.call("allreduce", [ones()], name="x")
    if engine.rank() == 0:
        driver.submit(call)
        touch("submitted")
        call.wait()
        found = told([call, driver.run("allgather", [ones()], name="y")])
    else:
        wait_for("submitted")
        engine.abort("bad batch 17")
        found = told([driver.run("allreduce", [ones()], name="x")])
    return found


# ---- the end of a world


def shut_down(worlds: int) -> list[Any]:
    """End each world while calls are in flight: known, new and unnamed ones, a group, and more than there is room for.

    Return the outcomes when shutdown returns, and those of calls between worlds.
    """
    found: list[Any] = []
    for number in range(worlds):
        part = engine.ProcessSet([0])
        engine.init(shutdown_timeout=0.2, process_sets=[part])
        assert part.process_set_id == 1
        rank = engine.rank()
        driver = Driver()
        known = driver.run("allreduce", [ones()], name="known")
        engine.barrier()
        calls = []
        if rank == 0:
            alone = driver.run("allreduce", [ones()], name="alone", set=part.call_number)
            assert alone.status == "OK" and alone.outcome.ranks == 1
            names = ["known", *(f"new {k} {'x' * 200}" for k in range(2000))]
            calls = [driver.call("allreduce", [ones(3)], name=name) for name in names]
            calls += [driver.call("allreduce", [ones(3)]) for _ in range(600)]
            calls += [driver.call("allgather", [ones(3), ones(4)], name="group", group=True)]
            driver.submit(*calls, threads=2)
        engine.barrier("all is submitted")
        alone_set = part.call_number
        begun = time.monotonic()
        engine.shutdown()
        took = time.monotonic() - begun
        after = [driver.call("allreduce", [ones(3)], name="after"), driver.call("allreduce", [ones(3)], set=alone_set)]
        for call in after:
            driver.submit_here(call)
        placed = driver.table.place(0, None, None) if number else 5
        found.append((took, told([*calls, *after]), known.status, placed))
        touch(f"over.{number}.{rank}")
        wait_for(*(f"over.{number}.{other}" for other in range(2)))
    return found


def shut_down_beside_a_done() -> Any:
    """Call shutdown while `done` callbacks run, for which it waits; one of them submits another call."""
    engine.init(shutdown_timeout=5.0)
    driver = Driver()
    closing = threading.Event()
    nested = driver.call("allreduce", [ones(3)], name="nested")

    def late(_: Call) -> None:
        closing.wait(10)
        driver.submit_here(nested)

    calls = [driver.call("allreduce", [ones(3)], name=f"gate {k}").then("at_gate", 1) for k in range(5)]
    calls.append(driver.call("allreduce", [ones(3)], name="late").then(late))
    driver.submit(*calls)
    until(lambda: all(call.outcome.times for call in calls), "they have begun")

    def go_on() -> None:
        driver.library.open_gate(1)
        closing.set()

    timer = threading.Timer(0.5, go_on)
    begun = time.monotonic()
    timer.start()
    engine.shutdown()
    took = time.monotonic() - begun
    finished = [call.outcome.finished for call in (*calls, nested)]
    timer.join()
    return took, finished, told([*calls, nested])


def racing(worlds: int, count: int) -> list[dict[str, int]]:
    """Submit on threads while the world is shut down; return counts of statuses. Each call must end exactly once."""
    found = []
    for number in range(worlds):
        engine.init(shutdown_timeout=0.2)
        driver = Driver()
        calls = [
            driver.call("allreduce", [ones(3)], name=f"name {k}" if k % 3 else None, linger=(0, 30_000, FOREVER)[k % 3])
            for k in range(count)
        ]
        for call in calls[::5]:
            call.then("again", left=3)
        thread = threading.Thread(target=lambda: driver.submit(*calls, threads=8))  # noqa: B023
        thread.start()
        until(lambda: sum(call.outcome.times for call in calls[:: count // 50]) > number, "it is under way")  # noqa: B023
        engine.shutdown()
        thread.join(20)
        assert not thread.is_alive(), "a submit does not return"
        for k, call in enumerate(calls):
            driver.wait([call], times=1 if k % 5 else 4)
        statuses = [call.status for call in calls]
        found.append({status: statuses.count(status) for status in set(statuses)})
        wrong = [k for k, call in enumerate(calls) if call.outcome.times != (1 if k % 5 else 4)]
        assert not wrong, wrong
        touch(f"over.{number}.{os.environ['RANK']}")
        wait_for(*(f"over.{number}.{other}" for other in range(2)))
    return found


# ---- forked children and signals


def forked(times: int) -> Any:
    """Fork while threads of the parent submit: calls in children are refused, and the parent's are unaffected."""
    engine.init()
    rank, size = engine.rank(), engine.size()
    driver = Driver()
    first = driver.run("allreduce", [np.full(3, rank)], name="first")
    held = driver.call("allreduce", [np.full(3, rank)], name="held").then("at_gate", 1)
    driver.submit(held)
    until(lambda: held.outcome.times, "a done is at work")
    calls = [driver.call("allreduce", [np.full(3, rank + k)], name=f"beside {k}") for k in range(4000)]
    thread = threading.Thread(target=lambda: driver.submit(*calls, threads=4))
    thread.start()

    def child() -> Any:
        seen = []
        for name, linger_ns, set in (("first", 0, 0), (None, FOREVER, 0), ("x", 30_000, 0), ("x", 0, 7)):
            call = driver.submit_here(driver.call("allreduce", [ones(3)], name=name, linger=linger_ns, set=set))
            seen.append((call.status, call.text.split(":")[0], call.outcome.times))
        return seen

    said = [in_child(child) for _ in range(times)]
    thread.join()
    driver.wait(calls)
    driver.library.open_gate(1)
    driver.wait([held])
    ranks = sum(range(size))
    right = all((call.targets[0] == ranks + k * size).all() for k, call in enumerate(calls))
    engine.shutdown()
    after = driver.submit_here(driver.call("allreduce", [ones(3)], name="first"))
    return said, right, first.status, after.status


def interrupted() -> Any:
    """Send SIGINT to the process while finishers idle and work: the main thread gets it, wherever it waits."""
    engine.init()
    driver = Driver()
    busy = [driver.call("allreduce", [ones(3)], name=f"gate {k}").then("at_gate", 1) for k in range(8)]
    driver.submit(*busy)
    until(lambda: all(call.outcome.times for call in busy), "finishers are busy")
    seen = []

    def interrupt() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        until(lambda: waits("main"), "the main thread sleeps")
        os.kill(os.getpid(), signal.SIGINT)

    def waits(_: str) -> bool:
        return Path("/proc/self/stat").read_text().rpartition(") ")[2][0] == "S"

    for step in range(4):
        if step == 2:
            driver.library.open_gate(1)
            driver.wait(busy)
        thread = threading.Thread(target=interrupt)
        begun = time.monotonic()
        try:
            thread.start()
            linger(20.0)
            seen.append(99.0)
        except KeyboardInterrupt:
            seen.append(time.monotonic() - begun)
        thread.join()
    return seen, {call.outcome.signals for call in busy if not call.outcome.inside}


def crashing() -> None:
    """Make a `done` callback write to unmapped memory, on a thread of the engine."""
    faulthandler.enable()
    engine.init()
    driver = Driver()
    driver.submit(driver.call("allreduce", [ones()], name="crash").then("crash", 8))
    linger()


# ---- resources that a process cannot get


def without_threads() -> Any:
    """Prevent rank 0 from starting threads for its first calls, of which other ranks are told; later it can."""
    engine.init()
    rank = engine.rank()
    driver = Driver()
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    superuser = os.geteuid() == 0
    refused = [driver.call("allreduce", [ones()], name=name) for name in ("first", None)]
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
        if superuser:  # not subject to the limit
            os.setresuid(65534, 65534, 0)
    for call in refused:
        driver.submit_here(call)
    if rank == 0:
        if superuser:
            os.setresuid(0, 0, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    driver.wait(refused)
    return told([*refused, *(driver.run("allreduce", [ones()], name=name) for name in ("first", None))])


def given_up(count: int) -> Any:
    """Have calls of rank 0 wait until failures of their names are settled, while rank 1 never calls these."""
    engine.init()
    driver = Driver()
    engine.barrier()
    calls = []
    if engine.rank() == 0:
        for k in range(count):
            failing = driver.call("allreduce", [ones()], name=f"x {k}")
            failing.native.op = 99
            driver.submit(failing)
            calls.append(driver.call("allreduce", [ones()], name=f"x {k}"))
        driver.submit(*calls)
        driver.wait(calls)
        touch("given up")
    wait_for("given up")
    return [(call.status, call.text, call.outcome.ended / 1e9) for call in calls]
