"""Programs of ranks for the hunt for lost wake-ups: random steps with one plan for all ranks, each with its own timing.

Every wait looks again after 100 ms, so a lost wake-up does not hang. It shows as an operation that completes only a
tick after the last rank has submitted it. Each rank records the times that show this.
"""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import engine

from ..waiting import NotWithin, be_late, until

KINDS = ("allreduce", "allreduce", "allreduce", "broadcast", "allgather", "barrier")
MANNERS = ("blocking", "blocking", "waiting", "waiting", "polling", "threads")
POLL_LIMIT = 20.0


@dataclass(frozen=True)
class Operation:
    """One collective of a step, with the same plan on every rank."""

    kind: str
    name: str
    elements: int


@dataclass
class Times:
    """One operation on one rank; times are in seconds of the monotonic clock."""

    brought: float
    """Start of the call that submitted the operation."""
    wanted: float = 0.0
    """Start of this rank's wait for it."""
    done: float = 0.0


@dataclass
class Log:
    """Report of a rank."""

    steps: list[list[Times]] = field(default_factory=list)
    # Nanoseconds for which this process's threads have waited for a processor, before each step and at the end
    delays: list[int] = field(default_factory=list)
    manners: list[str] = field(default_factory=list)
    late_wakes: int = 0  # late wake-ups that the engine has counted


def plan(seed: int, step: int) -> list[Operation]:
    """Return the operations of a step, equal on all ranks."""
    chance = random.Random(seed * 1_000_003 + step)
    operations = []
    for place in range(chance.choice((1, 1, 2, 3, 6))):
        kind = chance.choice(KINDS)
        elements = chance.choice((1, 7, 300, 5000, 40_000))
        new = chance.random() < 0.1
        operations.append(Operation(kind, f"{kind}.{elements}.{place}" + (f".new.{step}" if new else ""), elements))
    return operations


class Starvation:
    """Time for which this process's present threads were ready to run, but had no processor."""

    def __init__(self) -> None:
        tasks = os.listdir("/proc/self/task")
        self.files = [os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY | os.O_CLOEXEC) for task in tasks]

    def so_far(self) -> int:
        """Return the nanoseconds up to now."""
        return sum(int(os.pread(file, 100, 0).split()[1]) for file in self.files)


class Steps:
    """Steps of one rank."""

    def __init__(self, seed: int, cycles: tuple[float, ...]) -> None:
        self.seed = seed
        self.cycles = cycles
        self.rank, self.size = engine.rank(), engine.size()
        self.pool = ThreadPoolExecutor(2)
        both = threading.Barrier(2)
        list(self.pool.map(lambda _: both.wait(60), range(2)))  # so that both threads exist
        self.starvation = Starvation()
        self.log = Log()

    def run(self, steps: int) -> Log:
        for step in range(steps):
            if self.rank == 0 and step % 50 == 0:
                engine.set_knobs(cycle_time_ms=self.cycles[step // 50 % len(self.cycles)])
            self.log.delays.append(self.starvation.so_far())
            self.step(step)
        self.log.delays.append(self.starvation.so_far())
        self.log.late_wakes = engine.counters()["late_wakes"]
        engine.barrier()
        return self.log

    def step(self, step: int) -> None:
        chance = random.Random((self.seed * 1_000_003 + step) * 257 + self.rank + 1)
        manner = chance.choice(MANNERS)
        operations = plan(self.seed, step)
        times = [Times(0.0) for _ in operations]
        self.log.manners.append(manner)
        self.log.steps.append(times)
        self.dawdle(chance)
        if manner == "blocking":
            for operation, at in zip(operations, times, strict=True):
                self.call(operation, at)
        elif manner == "threads":
            pairs = list(zip(operations, times, strict=True))
            halves = [self.pool.submit(lambda half: [self.call(*pair) for pair in half], pairs[k::2]) for k in range(2)]
            for half in halves:
                half.result()
        else:
            handles = []
            for operation, at in zip(operations, times, strict=True):
                at.brought = time.monotonic()
                handles.append(self.bring(operation))
                if chance.random() < 0.1:
                    self.dawdle(chance)
            order = list(range(len(operations)))
            chance.shuffle(order)
            for k in order:
                times[k].wanted = time.monotonic()
                if manner == "polling":
                    self.poll(handles[k], operations[k])
                result = handles[k].wait()
                times[k].done = time.monotonic()
                self.check(operations[k], result)

    @staticmethod
    def dawdle(chance: random.Random) -> None:
        """Be late, usually a little and sometimes much, asleep or busy."""
        draw = chance.random()
        if draw < 0.3:
            be_late(chance.random() * 0.001)
        elif draw < 0.4:
            end = time.monotonic() + chance.random() * 0.0003
            while time.monotonic() < end:
                pass
        elif draw < 0.41:
            be_late(chance.random() * 0.03)

    def bring(self, operation: Operation) -> Any:
        if operation.kind == "barrier":
            return engine.session.runtime.current_engine().barrier(operation.name)
        if operation.kind == "allgather":
            return engine.allgather_async(np.full(self.rank + 1, self.rank, np.float32), operation.name)
        values = np.full(operation.elements, self.rank + 1, np.float32)
        if operation.kind == "broadcast":
            return engine.broadcast_async_(values, self.size - 1, operation.name)
        return engine.allreduce_async_(values, engine.Sum, operation.name)

    def call(self, operation: Operation, at: Times) -> None:
        """Call the blocking form of an operation."""
        at.brought = at.wanted = time.monotonic()
        if operation.kind == "barrier":
            result: Any = engine.barrier(operation.name)
        elif operation.kind == "allgather":
            result = engine.allgather(np.full(self.rank + 1, self.rank, np.float32), operation.name)
        else:
            values = np.full(operation.elements, self.rank + 1, np.float32)
            if operation.kind == "broadcast":
                result = engine.broadcast_(values, self.size - 1, operation.name)
            else:
                result = engine.allreduce_(values, engine.Sum, operation.name)
        at.done = time.monotonic()
        self.check(operation, result)

    @staticmethod
    def poll(handle: Any, operation: Operation) -> None:
        """Poll until an operation is done: only the engine thread drives, so without its wake-up this never ends."""
        until(lambda: handle.done, f"{operation} is done, by polling", POLL_LIMIT, pause=0.0002)

    def check(self, operation: Operation, result: Any) -> None:
        if operation.kind == "allgather":
            expected = np.repeat(np.arange(self.size), np.arange(1, self.size + 1)).astype(np.float32)
        elif operation.kind == "barrier":
            return
        else:
            total = self.size if operation.kind == "broadcast" else self.size * (self.size + 1) // 2
            expected = np.full(operation.elements, total, np.float32)
        assert np.array_equal(result, expected), (operation, result, expected)


def random_steps(seed: int, steps: int, cycles: tuple[float, ...], **settings: Any) -> Log:
    """Run the steps of one rank."""
    engine.init(**settings)
    threading.current_thread().name = f"rank {engine.rank()}"
    log = Steps(seed, cycles).run(steps)
    engine.shutdown()
    return log


def tight_steps(seed: int, rounds: int, limit: float) -> list[str]:
    """Submit a tensor just when a rank whose wait has ended gives the driver's role back.

    In each round one rank submits two tensors and waits for the first. The others submit the first, and the second some
    microseconds later, at random. No thread waits for the second, so no tick can hide a lost wake-up.
    """
    engine.init(cycle_time_ms=0)
    rank, size = engine.rank(), engine.size()
    chance = random.Random(seed * 257 + rank)
    values = np.ones(8, np.float32)
    first, second = values.copy(), values.copy()
    slow = []
    for number in range(rounds):
        after = time.perf_counter() + chance.random() * 60e-6
        if number % size == rank:
            later = engine.allreduce_async_(second, name="second")
            while time.perf_counter() < after:
                pass
            engine.allreduce_(first, name="first")
        else:
            sooner = engine.allreduce_async_(first, name="first")
            while time.perf_counter() < after:
                pass
            later = engine.allreduce_async_(second, name="second")
        try:
            until(lambda done=later: done.done, f"round {number} is done", limit, pause=0)
        except NotWithin as error:
            slow.append(str(error))
        later.wait()
        if number % size != rank:
            sooner.wait()
    engine.shutdown()
    return slow
