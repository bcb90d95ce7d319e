"""Programs of ranks for the soak: a training loop without a framework, on late ranks, or until one rank ends."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import engine

from ..waiting import be_late
from .programs import observe, touch

SHAPES = ((1,), (17,), (300, 7), (64, 64), (5,), (40_000,), (2, 3, 4))
STOP_EVERY = 10  # steps
WARM = 0.25  # share of the time after which memory must not grow


class Training:
    """Training with predictable gradients: after any number of steps all ranks hold the same, known parameters."""

    def __init__(self) -> None:
        self.rank, self.size = engine.rank(), engine.size()
        self.parameters = [np.zeros(shape, np.float64) for shape in SHAPES]
        self.steps = 0

    def step(self, dice: random.Random) -> None:
        order = list(range(len(SHAPES)))
        dice.shuffle(order)  # a different order on each rank
        gradients = [np.full(shape, float(self.rank + self.steps % 97 + k)) for k, shape in enumerate(SHAPES)]
        handles = {}
        for k in order:
            if dice.random() < 0.05:
                be_late(dice.random() * 0.002)
            handles[k] = engine.allreduce_async_(gradients[k], engine.Sum, f"gradient.{k}")
        for k in dice.sample(order, len(order)):
            handles[k].wait()
        for k, gradient in enumerate(gradients):
            want = self.size * (self.size - 1) // 2 + self.size * (self.steps % 97 + k)
            assert (gradient == want).all(), f"step {self.steps}, gradient {k}: {gradient.flat[0]}, expected {want}"
            self.parameters[k] += 0.1 * gradient
        self.steps += 1

    def digest(self) -> str:
        whole = hashlib.blake2b(digest_size=8)
        for each in self.parameters:
            whole.update(each.tobytes())
        return whole.hexdigest()


def private_kib() -> int:
    """Return this process's memory without what it shares, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def late(seed: int, seconds: float) -> dict[str, Any]:
    """Train for some seconds with ranks late at random; return what the test compares."""
    engine.init()
    training = Training()
    dice = random.Random(seed * 1009 + training.rank)
    begun = time.monotonic()
    warm: tuple[int, int] | None = None
    longest = 0.0
    touch(f"ready.{training.rank}")
    over = False
    while not over:
        before = time.monotonic()
        training.step(dice)
        longest = max(longest, time.monotonic() - before)
        if training.steps % STOP_EVERY == 0:
            elapsed = time.monotonic() - begun
            over = bool(engine.allreduce(np.array(elapsed > seconds), engine.Max, "over"))
            if warm is None and elapsed > WARM * seconds:
                warm = private_kib(), descriptors()
    touch(f"trained.{training.rank}")
    assert warm is not None
    found = {
        "steps": training.steps,
        "digest": training.digest(),
        "grown_kib": private_kib() - warm[0],
        "grown_descriptors": descriptors() - warm[1],
        "longest": longest,
    }
    engine.shutdown()
    return found


def doomed(seed: int, victim: int, end: str, last: int) -> dict[str, Any]:
    """Train until `victim` is `killed`, `raises`, `exits` or `vanishes` at step `last`; return what others are told."""
    engine.init()
    training = Training()
    dice = random.Random(seed * 1009 + training.rank)

    def go() -> None:
        Path("gone").write_text(str(time.monotonic()))
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif end == "raises":
            raise ValueError("the soak wants it so")
        elif end == "exits":
            sys.exit(0)
        else:
            os._exit(3)

    def loop() -> None:
        while True:
            if training.rank == victim and training.steps == last:
                if dice.random() < 0.5:  # in the middle of a step
                    engine.allreduce_async_(np.ones(SHAPES[-2]), engine.Sum, f"gradient.{len(SHAPES) - 2}")
                go()
            training.step(dice)

    return {**observe(loop), "steps": training.steps}
