"""Work to be shown on a timeline. Runs on every rank."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.trace.reading import events_of
from engine.trace.timeline import path_of

from ..waiting import be_late, let_pass

STEPS = 12
SET_STEPS = 4
NAMES = ("first", 'a "name"\\\n', "größe", "last")


def ones(count: int = 100) -> np.ndarray[Any, Any]:
    return np.ones(count, np.float32)


def step(late: float = 0.0) -> None:
    """Submit some tensors at once, after `late` seconds, and one by a blocking call."""
    be_late(late)
    handles = [engine.allreduce_async(ones(), name=name) for name in NAMES]
    for handle in handles:
        engine.synchronize(handle)
    engine.broadcast_(ones(300_000), 0, name="broadcast")
    engine.session.runtime.current_engine().mark_step()


def steps(slow_rank: int, seconds: float) -> dict[str, int]:
    """Run steps in every second of which a rank is late; return the engine's counters."""
    engine.init()
    for number in range(STEPS):
        step(seconds if engine.rank() == slow_rank and number % 2 else 0.0)
    counted = engine.counters()
    engine.shutdown()
    return counted


def overlapping(seconds: float) -> None:
    """Compute while the engine reduces, recorded in `a.json`; then wait for it all the time, in `b.json`."""
    engine.init()
    engine.allreduce(ones(), name="known")
    engine.barrier()
    engine.start_timeline("a.json")
    for _ in range(5):
        handle = engine.allreduce_async(ones(500_000), name="known.large")
        be_late(seconds)  # shows on the timeline as time in which no thread waits
        engine.synchronize(handle)
    engine.stop_timeline()
    engine.barrier()
    engine.start_timeline("b.json")
    for _ in range(20):
        engine.allreduce(ones(500_000), name="known.large")
    engine.stop_timeline()
    engine.shutdown()


def twice() -> None:
    """Start and stop timelines while the job runs, on every rank, then on rank 0 alone."""
    engine.init()
    rank = engine.rank()
    step()
    engine.stop_timeline()  # Nothing to stop.
    counts = []
    for name in ("one.json", "two.json"):
        engine.barrier()
        engine.start_timeline(name, mark_cycles=name == "two.json")
        refused = ""
        try:
            engine.start_timeline("three.json")
        except engine.errors.EngineError as error:
            refused = str(error)
        assert f"{name[:3]}.rank{rank}.json" in refused
        engine.barrier()
        step()
        step()
        engine.barrier()  # Behind it, all operations are done on this rank and on the others.
        engine.stop_timeline()
        path = path_of(name, rank)
        before = path.read_bytes()
        step()
        let_pass(0.25)  # time for two checks of a thread that should be gone
        assert path.read_bytes() == before, "it goes on"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        counts.append(len(events_of(path, [])))
    assert not Path("three.json").exists() and not path_of("three.json", rank).exists()
    if rank == 0:
        engine.start_timeline("alone")
    step()
    step()
    if rank == 0:
        engine.stop_timeline()
        engine.stop_timeline()
    engine.shutdown()


def endless() -> None:
    """Work until the end of the job; `ready.N` shows that the timeline has events."""
    engine.init()
    path = path_of(os.environ["ENGINE_TIMELINE"], engine.rank())
    ready = Path(f"ready.{engine.rank()}")
    while True:
        step()
        be_late(0.001)
        if not ready.exists() and path.stat().st_size > 20_000:
            ready.touch()


def many(names: int, rounds: int) -> None:
    engine.init()
    for _ in range(rounds):
        for handle in [engine.allreduce_async(ones(4), name=f"tensor.{k}") for k in range(names)]:
            engine.synchronize(handle)
    engine.shutdown()


def at_once(names: int, rounds: int, timeline: str | None = None) -> None:
    """Make each round one entry: the cycle is long, and the barrier closes it when all ranks have submitted all."""
    engine.init(cycle_time_ms=5000)
    for number in range(rounds):
        if timeline is not None and number == 1:  # all names are known
            engine.start_timeline(timeline)
        handles = [engine.allreduce_async(ones(4), name=f"tensor.{k}") for k in range(names)]
        engine.barrier()
        for handle in handles:
            engine.synchronize(handle)
    engine.shutdown()


def compressed() -> None:
    engine.init()
    for knob in ("none", "bf16", "fp16"):
        if engine.rank() == 0:
            engine.set_knobs(compression=knob)
        engine.barrier()
        engine.allreduce(ones(), name="tuned", compression=engine.Compression.tuned)


def in_sets() -> dict[int, dict[str, int]]:
    """Run steps in the world and in two overlapping sets, one of which is removed and added again; the last rank lags.

    Returns the engine's counters, by the number of the set.
    """
    size = int(os.environ["WORLD_SIZE"])
    engine.init(process_sets=[[rank for rank in range(size) if rank != 1]])
    counted = {}
    sets = [engine.global_process_set, engine.session.runtime.current_session().sets._sets[1]]
    for number in (2, 3):
        sets[2:] = [engine.add_process_set(range(1, size))]
        for turn in range(SET_STEPS):
            for chosen in sets if number == 2 else sets[2:]:
                if chosen.included():
                    be_late(0.05 if engine.rank() == size - 1 and turn % 2 else 0.0)
                    handles = [engine.allreduce_async(ones(), name=name, process_set=chosen) for name in NAMES]
                    for handle in handles:
                        engine.synchronize(handle)
        if sets[2].included():
            counted[number] = sets[2].engine.counters()
        engine.remove_process_set(sets[2])
    if size & (size - 1) == 0:
        engine.allreduce(ones(), engine.Adasum, "adasum")
    if sets[1].included():
        counted[1] = sets[1].engine.counters()
    return counted


def started_among_sets() -> None:
    """Start a timeline while a set exists, and stop it before that set ends; do this twice."""
    engine.init()
    mine = engine.add_process_set([engine.size() - 1])
    for name in ("one.json", "two.json"):
        engine.barrier()
        engine.start_timeline(name)
        other = engine.add_process_set([0])
        for chosen in (mine, other):
            if chosen.included():
                engine.allreduce(ones(), name=name, process_set=chosen)
        if name == "two.json":
            engine.remove_process_set(mine)
        engine.stop_timeline()
        engine.remove_process_set(other)
    engine.shutdown()


def endless_in_sets() -> None:
    """Work until the end of the job as `endless`, in a set of ranks 1 and 2 as well."""
    engine.init()
    part = engine.add_process_set([1, 2])
    path = path_of(os.environ["ENGINE_TIMELINE"], engine.rank())
    ready = Path(f"ready.{engine.rank()}")
    while True:
        step()
        if part.included():
            engine.allreduce(ones(), name="part", process_set=part)
        be_late(0.001)
        if not ready.exists() and path.stat().st_size > 20_000:
            ready.touch()


def at_once_in_sets(names: int, rounds: int) -> None:
    """Make each round an entry in the world and one in a set of this rank alone."""
    engine.init(cycle_time_ms=5000)
    alone = [engine.add_process_set([rank]) for rank in range(engine.size())][engine.rank()]
    for _ in range(rounds):
        for chosen in (engine.global_process_set, alone):
            handles = [engine.allreduce_async(ones(4), name=f"{k}", process_set=chosen) for k in range(names)]
            engine.barrier(process_set=chosen)
            for handle in handles:
                engine.synchronize(handle)
    engine.shutdown()


def many_sets(count: int) -> None:
    """Make and remove sets faster than the file is written."""
    engine.init()
    for _ in range(count):
        each = engine.add_process_set([0])
        if each.included():
            engine.allreduce(ones(4), name="x", process_set=each)
        engine.remove_process_set(each)
    engine.shutdown()


def refusals() -> dict[str, str]:
    """Errors for paths that cannot be written, while the engine goes on."""
    engine.init()
    Path("file").touch()
    (Path("taken") / f"rank.{engine.rank()}.trace.json").mkdir(parents=True)
    Path(f"link.rank{engine.rank()}.json").symlink_to("elsewhere")
    said = {}
    for name, target in (
        ("empty", ""),
        ("blank", "  "),
        ("number", 5),
        ("none", None),
        ("bytes", b"t.json"),
        ("nul", "a\0b.json"),
        ("below a file", "file/t.json"),
        ("taken", Path("taken")),
        ("link", "link.json"),
    ):
        try:
            engine.start_timeline(target)  # type: ignore[arg-type]
        except (TypeError, ValueError, OSError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    engine.start_timeline("new/directory/t.json")
    engine.allreduce(ones(), name="after")
    engine.stop_timeline()
    engine.shutdown()
    try:
        engine.init(timeline=5)
    except engine.errors.ConfigError as error:
        said["setting"] = str(error)
    return said


def unwritable() -> str:
    try:
        engine.init(timeline="/proc/nowhere/timeline.json")
    except engine.errors.ConfigError as error:
        return str(error)
    return "no error"
