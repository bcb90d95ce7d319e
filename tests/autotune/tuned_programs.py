"""Programs of ranks for the tests of tuning: steps whose time depends on the executed knobs, equal on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.tuning import trial_loop as tuning

from ..waiting import be_late, until

# Extra seconds of a step with a cycle time above 2 ms, such as the default: enough to be found in any noise.
SLOW = 0.02


def knobs() -> dict[str, Any]:
    """Return the knobs with which a job starts, as they were executed."""
    engine.init()
    engine.allreduce(np.ones(3, np.float32))
    return engine.knobs()


def one_step(number: int) -> None:
    """Reduce some tensors and compare the results with the exact ones, bit by bit."""
    rng = np.random.default_rng(number)
    parts = [rng.integers(-99, 99, (engine.size(), length)).astype(np.float32) for length in (3, 1000, 40_000)]
    handles = [
        engine.allreduce_async(part[engine.rank()], name=f"part{k}", op=engine.Sum) for k, part in enumerate(parts)
    ]
    for handle, part in zip(handles, parts, strict=True):
        np.testing.assert_array_equal(engine.synchronize(handle), part.sum(axis=0))
    if engine.knobs()["cycle_time_ms"] > 2.0:
        be_late(SLOW)


def steps_until(over: Callable[[], bool], mark: Callable[[], object], seconds: float = 90.0) -> int:
    """Run steps until rank 0 says that it is over, and return their number."""
    end, number, flag = time.monotonic() + seconds, 0, np.zeros(1, np.float32)
    while not flag[0]:
        one_step(number)
        mark()
        number += 1
        late = time.monotonic() > end
        flag[0] = engine.rank() == 0 and (late or over())
        flag = engine.allreduce(flag, name="over", op=engine.Max)
    assert engine.rank() != 0 or not late, f"not over within {seconds} s"
    return number


def tuner() -> tuning.Tuning:
    running = engine.session.runtime.owner.session
    assert running is not None and running.tuning is not None
    return running.tuning


def native_mark() -> None:
    engine.session.runtime.current_engine().mark_step()


def search(log: str) -> dict[str, Any]:
    """Train with an optimizer of torch until the search is over and its result has been observed once."""
    import torch

    tuning.WATCH = 0.3
    engine.init()
    parameter = torch.nn.Parameter(torch.zeros(8))
    optimizer = engine.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.125))

    def mark() -> None:
        optimizer.zero_grad()
        (parameter * torch.arange(8.0)).sum().backward()
        optimizer.step()

    number = steps_until(lambda: not tuner().searching and '"observe"' in Path(log).read_text(), mark)
    assert torch.equal(parameter.detach(), -0.125 * number * torch.arange(8.0))  # exact in float32
    return engine.knobs()


def compressed_step(number: int) -> str:
    """Reduce a compressible and a plain tensor; return the wire dtype of the first, judged by its bits."""
    import torch

    rng = np.random.default_rng(number)
    parts = rng.standard_normal((engine.size(), 5000)).astype(np.float32)
    mine = parts[engine.rank()]
    handles = [
        engine.allreduce_async(mine, name="tuned", op=engine.Sum, compression=engine.Compression.tuned),
        engine.allreduce_async(mine, name="plain", op=engine.Sum),
    ]
    tuned, plain = (engine.synchronize(handle) for handle in handles)
    halves = torch.from_numpy(parts).bfloat16().float().sum(dim=0).bfloat16().float().numpy()
    exact = parts.sum(axis=0)
    np.testing.assert_array_equal(plain, exact)
    travelled = "none" if np.array_equal(tuned, exact) else "bf16" if np.array_equal(tuned, halves) else "neither"
    if engine.knobs()["compression"] == "none":
        be_late(SLOW)
    return travelled


def search_compression(log: str) -> set[str]:
    """Train until the search is over, and return how tensors have travelled."""
    tuning.WATCH = 0.3
    engine.init()
    number, flag, seen, end = 0, np.zeros(1, np.float32), set(), time.monotonic() + 90.0
    while not flag[0]:
        seen.add(compressed_step(number))
        native_mark()
        number += 1
        flag[0] = engine.rank() == 0 and (not tuner().searching or time.monotonic() > end)
        flag = engine.allreduce(flag, name="over", op=engine.Max)
    assert engine.rank() != 0 or not tuner().searching, f"no end after {number} steps, log {Path(log).read_text()}"
    return seen


def compressed_from_the_start() -> str:
    engine.init()
    engine.barrier()
    return compressed_step(0)


def survive(answering: float) -> dict[str, Any]:
    """Give the test the tuner's pid during a search; train on when the tuner is gone."""
    engine.init()
    told: list[int] = []

    def over() -> bool:
        if tuner()._trials >= 3:  # from the next trial on: the tuner's start takes longest
            tuning.ANSWERING = answering
        if not told and tuner()._trials >= 5:
            Path("pid").write_text(str(tuner().pid))
            Path("ready").touch()
            told.append(1)
        return not tuner().searching

    steps_until(over, native_mark)
    after = steps_until(lambda: True, native_mark)
    assert after == 1
    return engine.knobs()


def until_over() -> None:
    """Train until no search is running."""
    engine.init()
    steps_until(lambda: not tuner().searching, native_mark)


def without_steps() -> list[str]:
    """Communicate a little and never end a step; return the warnings that were logged."""
    tuning.IDLE = 0.3
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("engine").addHandler(handler)
    engine.init()
    one_step(0)
    until(lambda: said, "something is said")
    engine.shutdown()
    return said
