"""Stresses the windows in which a wake-up could be lost, and reports lost ones. Runs on every rank.

A lost wake-up costs a caller the rest of its tick, 100 ms, and the engine thread the time until the next event. So a
rank counts waits that a tick ended although there was work (the engine's own count), operations that were not done long
after every rank had submitted them, and waits that lasted although the operation was submitted everywhere.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..waiting import NotWithin, until

LATE = 0.09  # seconds; a tick lasts 0.1
LOST = 0.5  # seconds until a poller gives up on the engine thread, and waits instead
SUM, SAME = 1, 1.0
SIZES = (1, 1, 1, 1, 3000, 15_000, 50_000)  # float32: one-shot, one chunk, several
CHUNK = 1 << 16  # bytes, the smallest
NAMES = 5


@dataclass
class Report:
    """Counts of one rank. Times are of the host's monotonic clock, which all ranks share."""

    operations: int = 0
    late_wakes: int = 0  # the engine's count
    # Key and start of operations given up on by a poller
    lost_polls: list[tuple[str, float]] = field(default_factory=list)
    slow: list[tuple[str, float, float]] = field(default_factory=list)  # key, start and end of waits of `LATE` or more
    # Times at which this rank submitted the operations of blocks in which some rank was slow, by key
    starts: dict[str, float] = field(default_factory=dict)
    starved: float = 0.0  # seconds that threads of this rank were ready to run and did not, summed over those blocks


def hammer(seconds: float, cycle_time_ms: float, seed: int, blocks: tuple[str, ...] = ()) -> Report:
    """Run blocks of operations, `blocks` or all kinds in turn, until the time is over."""
    import engine
    from engine.session import runtime

    engine.init(spin_us=0.0, cycle_time_ms=cycle_time_ms, stall_limit=0.0)
    rank = _Rank(runtime.current_session().engine, engine.rank(), seed)
    if rank.engine.rank == 0:
        rank.engine.set_knobs(chunk_bytes=CHUNK)
    end = time.monotonic() + seconds
    kinds = [BLOCKS[name] for name in blocks or BLOCKS]
    block = 0
    while True:
        kind = kinds[block % len(kinds)]
        before = _starved()
        found = len(rank.report.slow) + len(rank.report.lost_polls)
        rank.starts = {}
        kind(rank, block)
        block += 1
        odd = len(rank.report.slow) + len(rank.report.lost_polls) > found
        # Blocking, and equal on every rank: whether some rank was slow, and whether the time is over.
        flags = np.array([odd, time.monotonic() >= end], np.float32)
        rank.engine.allreduce(flags, flags, "flags", SUM, SAME, SAME, True).wait()
        if flags[0]:
            rank.report.starts |= rank.starts
            rank.report.starved += _starved() - before
        if flags[1]:
            break
    rank.report.late_wakes = rank.engine.counters()["late_wakes"]
    engine.shutdown()
    return rank.report


class _Rank:
    def __init__(self, engine: Any, number: int, seed: int) -> None:
        self.engine = engine
        self.report = Report()
        self.starts: dict[str, float] = {}
        self.ours = random.Random(seed)  # the same on every rank
        self.mine = random.Random(seed * 1000 + number)

    def pause(self, dice: random.Random) -> None:
        """Pause for a few microseconds, so that ranks meet at every offset; now and then long enough to fall asleep."""
        length = dice.choice((0, 500, 2000, 5000, 10_000, 20_000))
        end = time.perf_counter_ns() + int(dice.random() * length)
        while time.perf_counter_ns() < end:
            pass

    def bring(self, name: str, size: int, key: str, blocking: bool) -> Any:
        tensor = np.ones(size, np.float32)
        self.starts[key] = time.monotonic()
        return self.engine.allreduce(tensor, tensor, name, SUM, SAME, SAME, blocking)

    def wait(self, handle: Any, key: str, start: float) -> None:
        handle.wait()
        end = time.monotonic()
        if end - start >= LATE:
            self.report.slow.append((key, start, end))
        self.report.operations += 1

    def call(self, name: str, size: int, key: str) -> None:
        handle = self.bring(name, size, key, True)
        self.wait(handle, key, self.starts[key])

    def poll(self, handle: Any, key: str) -> None:
        """Poll until the engine threads have completed the operation; if they never do, `wait` drives."""
        begun = time.monotonic()
        try:
            until(lambda: handle.done, key, LOST, pause=2e-5)
        except NotWithin:
            self.report.lost_polls.append((key, begun))
        self.wait(handle, key, time.monotonic())


def calls(rank: _Rank, block: int) -> None:
    """One thread, one blocking call after the other."""
    for turn in range(150):
        size = rank.ours.choice(SIZES) if turn % 8 == 0 else 1
        rank.pause(rank.mine)
        rank.call(f"call.{size}", size, f"{block}.{turn}")


def chunks(rank: _Rank, block: int) -> None:
    """Blocking calls of many chunks: the ranks go through the stages side by side, and may wait for each stage."""
    for turn in range(30):
        rank.call("chunks", 300_000, f"{block}.{turn}")


def polls(rank: _Rank, block: int) -> None:
    """No thread waits: the engine threads alone advance the operations."""
    for turn in range(60):
        handles = []
        for part in range(rank.ours.randint(1, 4)):
            size = rank.ours.choice(SIZES) if turn % 8 == 0 else 1
            rank.pause(rank.mine)
            key = f"{block}.{turn}.{part}"
            handles.append((key, rank.bring(f"poll.{size}.{part}", size, key, False)))
        for key, handle in handles:
            rank.poll(handle, key)


def pairs(rank: _Rank, block: int) -> None:
    """Rank 0 has submitted everything; of two submissions, the second meets its engine thread going back to sleep."""
    turns = [(f"{block}.{turn}", f"pair.{turn}") for turn in range(100)]
    if rank.engine.rank == 0:
        handles = [(key, rank.bring(name, 1, key, False)) for key, name in turns]
        rank.call("all brought", 1, f"{block}")
        for key, handle in handles:
            rank.poll(handle, key)
        return
    rank.call("all brought", 1, f"{block}")
    for number, ((first, name), (second, other)) in enumerate(zip(turns[::2], turns[1::2], strict=True)):
        if number % 4:
            rank.call(name, 1, first)
        else:
            handle = rank.bring(name, 1, first, False)
        rank.pause(rank.mine)
        rank.poll(rank.bring(other, 1, second, False), second)
        if number % 4 == 0:
            rank.poll(handle, first)


def returns(rank: _Rank, block: int) -> None:
    """A caller gives the role back just when work arrives for its engine thread.

    That work is a burst of barriers, for which rank 0 waits for no rank.
    """
    for turn in range(100):
        bursts = [f"returns.{number}" for number in range(rank.ours.randint(1, 4))]
        key = f"{block}.{turn}"
        handles = []
        if rank.engine.rank != 0:
            handles = [rank.engine.barrier(name, False) for name in bursts]
        rank.call("returns", 1, key)
        if rank.engine.rank == 0:
            for name in bursts:
                rank.pause(rank.mine)
                rank.engine.barrier(name, True).wait()
        rank.starts[key + ".after"] = time.monotonic()
        for handle in handles:
            rank.poll(handle, key + ".after")


def waits(rank: _Rank, block: int) -> None:
    """Submit, compute for a moment, wait: the driver's role changes hands all the time."""
    for turn in range(100):
        size = rank.ours.choice(SIZES) if turn % 8 == 0 else 1
        key = f"{block}.{turn}"
        rank.pause(rank.mine)
        handle = rank.bring(f"wait.{size}", size, key, False)
        rank.pause(rank.mine)
        rank.wait(handle, key, time.monotonic())


def threads(rank: _Rank, block: int) -> None:
    """Several threads of a rank wait at once, each for its own operations."""

    def work(number: int) -> None:
        dice = random.Random(f"{block}.{number}")
        mine = random.Random(f"{block}.{number}.{rank.mine.random()}")
        for turn in range(40):
            key, name = f"{block}.{number}.{turn}", f"thread.{number}.{turn % NAMES}"
            rank.pause(mine)
            if dice.random() < 0.5:
                rank.call(name, 1, key)
            else:
                handle = rank.bring(name, 1, key, False)
                rank.pause(mine)
                rank.wait(handle, key, time.monotonic())

    started = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


BLOCKS: dict[str, Callable[[_Rank, int], None]] = {
    block.__name__: block for block in (calls, chunks, pairs, returns, polls, waits, threads)
}


def _starved() -> float:
    """Seconds that the threads of this process have been ready to run and did not."""
    total = 0
    for path in Path("/proc/self/task").iterdir():
        try:
            total += int((path / "schedstat").read_text().split()[1])
        except OSError:
            continue
    return total / 1e9
