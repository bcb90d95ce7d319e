"""Programs of ranks with late steps."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.data import time_input
from engine.metrics import step_parts
from engine.trace.reading import read
from engine.trace.timeline import LATE_ROW

from ..parallel.counters_program import snapshot
from ..waiting import be_late

STEPS = 60


def load(delays: dict[int, float], steps: int = STEPS) -> Iterator[int]:
    """Make batches, one every 2 ms, some of them late."""
    for step in range(steps):
        be_late(0.002 + delays.get(step, 0.0))
        yield step


def train(batches: Any) -> None:
    """Make a step for each batch."""
    native = engine.session.runtime.current_engine()
    for _ in batches:
        engine.allreduce(np.ones(1000, np.float32), name="gradient")
        native.mark_step()


def delay_input(seconds: float, times: int) -> dict[str, Any]:
    """Delay some batches of rank 0, and return what this rank has counted, and the late steps of its timeline."""
    engine.init(metrics=True, timeline="late.json")
    delays = {STEPS - 1 - 5 * k: seconds for k in range(times)} if engine.rank() == 0 else {}
    train(time_input(load(delays)))
    page, rank = snapshot(), engine.rank()
    engine.barrier()
    engine.shutdown()
    events = json.loads(Path(f"late.rank{rank}.json").read_text())
    drawn = [event for event in events if event["ph"] == "X" and event["tid"] == LATE_ROW]
    (recording,) = read([f"late.rank{rank}.json"], notes := [])
    found = {"drawn": drawn, "read": len(recording.steps), "notes": notes}
    return {**page.late_steps, **found}


def look_while_off() -> dict[str, Any]:
    """Train without metrics, and look for traces of the clock; then in a world that counts, and after it."""
    before = len(gc.callbacks)
    engine.init(metrics=False)
    train(time_input(load({50: 0.1})))
    found = {
        "late": engine.session.runtime.current_engine().late_steps(),
        "callbacks": len(gc.callbacks) - before,
        "clocked": step_parts.is_clocked(),
    }
    engine.shutdown()
    engine.init(metrics=True)
    found["after"] = len(gc.callbacks) - before
    engine.shutdown()
    found["end"] = len(gc.callbacks) - before
    return found


def use_threads() -> dict[str, Any]:
    """Train with a timer in a timer, while another thread loads, collects garbage and waits in the engine."""
    before = len(gc.callbacks)
    engine.init(metrics=True)
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set():
            for _ in time_input(load({}, 2)):
                gc.collect(1)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        train(time_input(time_input(load({40: 0.3}))))
    finally:
        over.set()
        thread.join()
    late = [each for each in engine.session.runtime.current_engine().late_steps() if each["late"] > 200_000_000]
    engine.barrier()
    engine.shutdown()
    return {"late": len(late), "causes": sorted({each["cause"] for each in late}), "left": len(gc.callbacks) - before}


def count_clock_files() -> int:
    """Return the number of files with run delays that this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            count += os.readlink(f"/proc/self/fd/{name}").endswith("/schedstat")
    return count


def fork_a_child() -> dict[str, Any]:
    """Fork a process whose steps are clocked; return how many files of the clock are open there, and here."""
    engine.init(metrics=True)
    train(load({}, 3))
    found = {"rank": count_clock_files()}
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(send, bytes([count_clock_files()]))
        os._exit(0)
    found["child"] = os.read(receive, 1)[0]
    os.waitpid(child, 0)
    train(load({}, 3))
    found["after"] = count_clock_files()
    engine.barrier()
    engine.shutdown()
    os.close(receive)
    os.close(send)
    return found


def mark_in_turn() -> dict[str, Any]:
    """End 40 steps of the world, the 39th of them late, and 10 of a process set between them.

    All are of optimizers of number 0. Return the numbers of the late steps.
    """
    engine.init(metrics=True)
    native, several = engine.session.runtime.current_engine(), engine.add_process_set([0, 1])
    for step in range(40):
        be_late(0.002 + 0.2 * (step == 38))
        native.mark_step()
        if step % 4 == 3 and engine.rank() < 2:
            several.engine.mark_step()
    late = [each["step"] for each in native.late_steps() if each["late"] > 150_000_000]
    engine.barrier()
    engine.shutdown()
    return {"late": late}


def change_threads() -> dict[str, Any]:
    """End steps from 40 threads that follow one another, then from the first thread with a late batch."""
    engine.init(metrics=True)
    native = engine.session.runtime.current_engine()
    for _ in range(40):
        thread = threading.Thread(target=native.mark_step)
        thread.start()
        thread.join()
    files = count_clock_files()
    train(time_input(load({40: 0.3})))
    late = [each["cause"] for each in native.late_steps() if each["late"] > 200_000_000]
    engine.barrier()
    engine.shutdown()
    return {"files": files, "causes": sorted(set(late))}


def train_torch() -> dict[str, Any]:
    """Train with a DataLoader of torch whose data set is late once, on rank 0."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    import engine.torch

    class Late(Dataset[Any]):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> Any:
            be_late(0.002 + 0.2 * (index == 50 and engine.rank() == 0))
            return torch.ones(4)

    engine.init(metrics=True)
    model = torch.nn.Linear(4, 1)
    optimizer = engine.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    batches = 0
    for batch in DataLoader(Late()):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        batches += 1
    late = [
        each["cause"] for each in engine.session.runtime.current_engine().late_steps() if each["late"] > 150_000_000
    ]
    found = engine.allgather_object(late)
    engine.shutdown()
    return {"late": found, "batches": batches, "restored": sum(1 for _ in DataLoader(range(STEPS)))}  # type: ignore[arg-type]
