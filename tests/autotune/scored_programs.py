"""Programs of ranks for the tests of scores: steps of several optimizers, traffic without steps, late ranks."""

from __future__ import annotations

import logging
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.tuning import listener
from engine.tuning import trial_loop as tuning

from ..waiting import be_late, until
from .tuned_programs import native_mark, steps_until, tuner

SHORT, LONG = 0.002, 0.006  # least seconds of a discriminator's and of a generator's step
LATE = 0.03
STEPS = 24


def init() -> None:
    """Start the engine as a job does, but treat it sooner as one without steps."""
    listener.ACTIVE = 5
    engine.init()


def traffic() -> dict[str, Any]:
    """Reduce the same tensors again and again, and never mark the end of a step."""
    init()
    steps_until(lambda: not tuner().searching, lambda: None)
    return engine.knobs()


def unnamed_traffic() -> dict[str, Any]:
    """Reduce tensors without names, which stay pending until the cycle ends or a caller waits for them."""
    init()

    def reduce() -> None:
        handles = [engine.allreduce_async(np.ones(length, np.float32)) for length in (3, 1000, 40_000)]
        be_late(0.004)
        for handle in handles:
            engine.synchronize(handle)

    end, flag = time.monotonic() + 90.0, np.zeros(1, np.float32)
    while not flag[0]:
        reduce()
        late = time.monotonic() > end
        flag[0] = engine.rank() == 0 and (late or not tuner().searching)
        flag = engine.allreduce(flag, op=engine.Max)
    assert engine.rank() != 0 or not late
    return engine.knobs()


def steps_after_traffic(logs: list[str]) -> None:
    """Mark steps only after the search by traffic has begun."""
    init()
    steps_until(lambda: tuner()._trials >= 2, lambda: None)
    steps_until(lambda: Path(logs[1]).exists() and not tuner().searching, native_mark)


def alternation() -> float:
    """Alternate two steps of a discriminator and a two-pass one of a generator; return the median seconds of a turn."""
    import torch

    engine.init()
    sides = []
    for seconds, passes in ((SHORT, 1), (LONG / 2, 2)):
        parameter = torch.nn.Parameter(torch.zeros(8))
        optimizer = engine.DistributedOptimizer(torch.optim.SGD([parameter]), backward_passes_per_step=passes)
        sides.append((parameter, optimizer, seconds, passes))
    discriminator, generator = sides
    times = []

    def alternate() -> None:
        for parameter, optimizer, seconds, passes in (discriminator, discriminator, generator):
            optimizer.zero_grad()
            for _ in range(passes):
                be_late(seconds)
                parameter.sum().backward()
            optimizer.step()
        times.append(time.monotonic())

    steps_until(lambda: not tuner().searching, alternate)
    return statistics.median(after - before for before, after in pairwise(times))


def late_ranks() -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds of this rank's steps, and their shares spent waiting, for each choice of the late rank."""
    engine.init()
    native = engine.session.runtime.current_engine()
    native.record_steps()
    who = {
        "nobody": lambda step: -1,
        "rank 0": lambda step: 0,
        "rank 1": lambda step: 1,
        "in turn": lambda step: step % 2,
    }
    found = {}
    for name, late in who.items():
        since = native.steps(1 << 60)[0]
        for step in range(STEPS):
            if late(step) == engine.rank():
                be_late(LATE)
            engine.allreduce(np.ones(1000, np.float32), name="gradient")
            native_mark()
        _, marks = native.steps(since)
        gaps = [after[0] - before[0] for before, after in pairwise(marks)]
        waits = [after[3] - before[3] for before, after in pairwise(marks)]
        found[name] = [gap / 1e9 for gap in gaps], [wait / gap for wait, gap in zip(waits, gaps, strict=True)]
    return found


def only_process_sets() -> list[str]:
    """Reduce in a process set only, and return the warnings that were logged."""
    tuning.IDLE = 1.0
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("engine").addHandler(handler)
    part = engine.ProcessSet([0])
    engine.init(process_sets=[part])
    if engine.rank() == 0:

        def reduce_and_look() -> list[str]:
            engine.allreduce(np.ones(3, np.float32), name="inside", process_set=part)
            return said

        until(reduce_and_look, "something is said", pause=0)
    engine.barrier()
    engine.shutdown()
    return said
