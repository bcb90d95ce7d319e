"""Programs of ranks for the tests of failures, imported by every rank; most return what `observe` records."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import engine

from ..waiting import be_late, let_pass, linger, until, until_files

LONG = 120.0
BUSY = 0.1  # limit of processor seconds in 0.3 s after a world has failed
BIG = 4 << 20  # elements of float32: 16 MiB, many chunks


def touch(name: str) -> None:
    """Signal a state to the test or to another rank, by a file."""
    Path(name).touch()


def wait_for(*names: str) -> None:
    """Wait for files that the test or other ranks make."""
    until_files(*names)


def observe(call: Callable[[], Any]) -> dict[str, Any]:
    """Return the engine's error that `call` raises, with times on the monotonic clock."""
    begun = time.monotonic()
    try:
        call()
    except engine.errors.EngineError as error:
        return {
            "type": type(error).__name__,
            "rank": getattr(error, "rank", None),
            "text": str(error),
            "begun": begun,
            "at": time.monotonic(),
        }
    return {"type": None, "text": "no error", "begun": begun, "at": time.monotonic()}


def ones(elements: int = 1000) -> np.ndarray:
    return np.ones(elements, np.float32)


def touch_when_pending(name: str, operations: int = 1) -> None:
    """Start a thread that makes a file when this rank has that many operations in flight."""

    def look() -> None:
        native = engine.session.runtime.current_engine()
        until(lambda: len(native.pending()) >= operations, "operations in flight")
        touch(name)

    threading.Thread(target=look, daemon=True).start()


def stream(name: str, start: Callable[[int], None] = lambda step: None) -> None:
    """Run large allreduces for ever, and make a file once they flow."""
    values = ones(BIG)
    step = 0
    while True:
        engine.allreduce_(values, name="large")
        step += 1
        if step == 3:
            touch(name)
        start(step)


def killed(victim: int, moment: str) -> Any:
    """Wait until the test kills `victim`: the others are `blocked` or computing, or all are `streaming`."""
    engine.init()
    rank = engine.rank()
    for _ in range(3):
        engine.allreduce(ones(), name="known")
    if moment == "streaming":
        return observe(lambda: stream(f"ready.{rank}"))
    if rank == victim:
        touch(f"ready.{rank}")
        linger()
    if moment.startswith("blocked"):
        touch_when_pending(f"ready.{rank}")
        name = "known" if moment == "blocked" else "new"
        return observe(lambda: engine.allreduce(ones(), name=name))
    touch(f"ready.{rank}")
    total = 0
    while not Path("dead").exists():  # computing, without calls of the engine
        total += sum(range(1000))
    return observe(lambda: engine.allreduce(ones(), name="known"))


def killed_beside_child(victim: int) -> Any:
    """Wait as in `killed`, but with a forked child of the victim that lives on with all its open files."""
    engine.init()
    rank = engine.rank()
    engine.barrier()
    if rank == victim:
        if os.fork() == 0:
            touch("child")
            linger()
            os._exit(0)
        wait_for("child")
        touch(f"ready.{rank}")
        linger()
    touch_when_pending(f"ready.{rank}")
    return observe(lambda: engine.allreduce(ones(), name="x"))


def killed_in_init(victim: int, last: int) -> Any:
    """Call `init` on all ranks except `last`, which calls it when the victim is dead."""
    rank = int(os.environ["RANK"])
    touch(f"ready.{rank}")
    if rank == last:
        wait_for("dead")
    return observe(engine.init)


def many_threads(victim: int, threads: int) -> Any:
    """Wait on several threads of each rank, some of them for one handle, when the victim dies."""
    engine.init()
    rank = engine.rank()
    engine.barrier()
    if rank == victim:
        touch(f"ready.{rank}")
        linger()
    shared = engine.allreduce_async(ones(), name="shared")
    seen: list[dict[str, Any]] = []
    calls: list[Callable[[], Any]] = [shared.wait, shared.wait, engine.barrier]
    calls += [lambda k=k: engine.allreduce(ones(BIG if k % 2 else 10), name=f"thread.{k}") for k in range(threads - 3)]
    waiting = [threading.Thread(target=lambda call=call: seen.append(observe(call))) for call in calls]
    for thread in waiting:
        thread.start()
    until(lambda: len(engine.session.runtime.current_engine().pending()) == threads - 1, "all threads wait")
    touch(f"ready.{rank}")
    for thread in waiting:
        thread.join(20)
    if any(thread.is_alive() for thread in waiting):
        raise AssertionError(f"of {threads} threads only {len(seen)} came back")
    return seen


def stopped(victim: int, moment: str) -> Any:
    """Wait while the test stops `victim` beyond the stall limit, and resumes it when the others know."""
    engine.init()
    rank = engine.rank()
    shared = np.frombuffer(engine.session.runtime.current_engine().share(BIG * 4), np.float32)
    shared[:] = 1
    for name in ("known", "other"):
        engine.allreduce(ones(), name=name)
    if moment == "streaming":

        def work() -> None:
            step = 0
            while True:
                shared[:] = rank + 1
                engine.allreduce_(shared, engine.Sum, name="shared")
                step += 1
                if step == 3:
                    touch(f"ready.{rank}")

    elif rank == victim:

        def work() -> None:
            touch(f"ready.{rank}")
            wait_for("resumed")
            engine.allreduce(ones(), name="known")

    else:
        touch_when_pending(f"ready.{rank}")

        def work() -> None:
            engine.allreduce(ones(), name="known" if moment == "known" else "new")

    seen = observe(work)
    shared[:] = 7
    touch(f"failed.{rank}")
    # The resumed rank must not write to this memory.
    wait_for(*(f"failed.{other}" for other in range(engine.size())))
    seen["changed"] = int((shared != 7).sum())
    seen["again"] = observe(lambda: engine.barrier())["type"]
    # Reports of the failure may still be being written: one idle interval is enough.
    seen["busy"] = next((used for used in map(used_in, [0.3] * 3) if used < BUSY), BUSY)
    return seen


def used_in(seconds: float) -> float:
    """Return the processor seconds that this process uses in so many seconds."""
    begun = time.process_time()
    let_pass(seconds)
    return time.process_time() - begun


def chain(limit: float) -> Any:
    """Stay away on rank 2, for which rank 1 waits and so withholds what rank 0 waits for: rank 2 is to blame."""
    engine.init(stall_limit=limit)
    rank = engine.rank()
    for name in ("first", "second"):
        engine.allreduce(ones(), name=name)
    if rank == 0:
        engine.allreduce_async(ones(), name="first")
        return observe(lambda: engine.allreduce(ones(), name="second"))
    if rank == 1:
        be_late(limit / 4)  # so that rank 0 has waited longer at the limit
        return observe(lambda: engine.allreduce(ones(), name="first"))
    linger_until_failure()
    return observe(engine.barrier)


def full_ring(limit: float) -> Any:
    """Fill the request ring of rank 1 while the test stops rank 0; the next submission waits for room."""
    engine.init(stall_limit=limit)
    rank = engine.rank()
    engine.barrier()
    touch(f"ready.{rank}")
    if rank == 0:
        linger_until_failure()
        return observe(engine.barrier)
    wait_for("stopped")
    kept: list[Any] = []

    def work() -> None:
        kept.extend(engine.allreduce_async(ones(1), name=f"{k}." + "x" * 1000) for k in range(2000))

    return observe(work)


def linger_until_failure() -> None:
    """Wait outside of the engine until the world has failed."""
    until(lambda: engine.session.runtime.current_engine().failure is not None, "the failure", LONG)


def leaving(victim: int, manner: str, name: str) -> Any:
    """Have `victim` leave while the others wait for it."""
    engine.init()
    rank = engine.rank()
    engine.allreduce(ones(), name="known")
    if rank != victim:
        touch_when_pending(f"ready.{rank}")
        return observe(lambda: engine.allreduce(ones(), name=name))
    wait_for(*(f"ready.{other}" for other in range(engine.size()) if other != victim))
    Path("left").write_text(repr(time.monotonic()))
    if manner == "raise":
        raise ValueError("bad batch 17\nand more about it")
    if manner == "memory":
        raise MemoryError("no room for the activations")
    if manner == "_exit":
        os._exit(0)
    if manner == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if manner == "shutdown":
        engine.shutdown()
        wait_for("done")
    if manner.startswith("exit"):
        sys.exit(int(manner.removeprefix("exit")))
    return {"type": None}


def differing_names(kind: str) -> Any:
    """Wait for different names on different ranks: a defect of the program, which the stall report explains."""
    engine.init()
    rank = engine.rank()
    for name in ("even", "odd"):
        engine.allreduce(ones(), name=name)
    name = ("even", "odd")[rank % 2] if kind == "known" else f"new.{rank}"
    return observe(lambda: engine.allreduce(ones(), name=name))


def goes_on() -> Any:
    """Check that errors which are not fatal leave a working engine."""
    engine.init()
    rank, size = engine.rank(), engine.size()
    seen = []
    for step in range(20):
        seen.append(observe(lambda: engine.allreduce(ones(3 + rank % 2), name=f"shapes.{step % 3}"))["type"])  # noqa: B023
        if rank != 0:
            engine.barrier()  # The operation cannot complete until rank 0 is here.
        first = engine.allreduce_async(ones(), name="twice")
        if rank == 0:
            seen.append(observe(lambda: engine.allreduce(ones(), name="twice"))["type"])
            engine.barrier()
        first.wait()
        with contextlib.suppress(ValueError):
            engine.broadcast(ones(), size)
            seen.append("a root that is no rank was accepted")
        total = engine.allreduce(np.full(5, rank + step, np.float64), engine.Sum, name="after")
        assert total[0] == sum(other + step for other in range(size)), total
    return seen


def signalled() -> Any:
    """Train while SIGUSR1 arrives: every rank writes its flight record, and nothing else happens."""
    engine.init()
    rank, size = engine.rank(), engine.size()
    step = 0
    stop = np.zeros(1, np.int64)
    while True:
        total = engine.allreduce(np.full(100, rank + step, np.float32), engine.Sum, name="gradient")
        assert total[0] == sum(other + step for other in range(size))
        step += 1
        if step == 5:
            touch(f"ready.{rank}")
        stop[:] = rank == 0 and Path("stop").exists()
        if engine.allreduce(stop, engine.Max, name="stop")[0]:
            return step


def blocked_for_ever() -> Any:
    """Wait in `synchronize` on all ranks except rank 0, which never comes."""
    engine.init()
    rank = engine.rank()
    if rank == 0:
        touch("ready.0")
        linger()
    handle = engine.allreduce_async(ones(), name="never")
    touch_when_pending(f"ready.{rank}")
    return engine.synchronize(handle)
