"""Programs of elastic workers on Ray. Like `programs`, the module is pickled by value."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle

import engine
import engine.elastic
from engine.ray import ray_logger

from ..waiting import be_late, linger

cloudpickle.register_pickle_by_value(sys.modules[be_late.__module__])
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BATCH = 12  # samples of a step, whatever the number of ranks
PAUSE = 0.02  # seconds of a step


def expected(steps: int) -> float:
    """Sum of all samples of so many steps."""
    return float(sum(range(steps * BATCH)))


def add_up(home: str, stop: str = "stop") -> dict[str, Any]:
    """Add up samples, one batch per step shared by the current ranks, until the file `stop` exists.

    Each worker that takes part in a step writes its place to a file of its own.
    """
    engine.init()
    state = engine.elastic.ObjectState(step=0, total=0.0, stopped=False)

    @engine.elastic.run
    def train(state: Any) -> dict[str, Any]:
        while not state.stopped:
            rank, size = engine.rank(), engine.size()
            samples = range(state.step * BATCH + rank, (state.step + 1) * BATCH, size)
            wants_to_stop = float(os.path.exists(f"{home}/{stop}"))
            told = engine.allreduce(np.array([float(sum(samples)), wants_to_stop]), op=engine.Sum)
            state.total += float(told[0])
            state.step += 1
            state.stopped = bool(told[1])
            new = Path(home, f"new.{os.getpid()}")
            new.write_text(f"{rank} {size} {os.environ['ENGINE_HOST_NAME']}")
            new.rename(Path(home, f"worker.{os.getpid()}"))
            if state.step % 10 == 1:
                ray_logger.log({"step": state.step, "size": size})
            be_late(PAUSE)
            state.commit()
        return {"rank": engine.rank(), "size": engine.size(), "step": state.step, "total": state.total}

    return train(state) | {"pid": os.getpid(), "word": os.environ.get("WORD")}


def raise_in_rank_1() -> None:
    """Raise on rank 1, in each world at the same line."""
    engine.init()
    state = engine.elastic.ObjectState(step=0)

    @engine.elastic.run
    def train(state: Any) -> None:
        while True:
            engine.allreduce(np.ones(3), op=engine.Sum)
            if engine.rank() == 1:
                raise ValueError("bad batch")

    train(state)


def log_too_much() -> None:
    """Log a message that is too large, then the reason for its refusal."""
    engine.init()

    @engine.elastic.run
    def train(state: Any) -> None:
        engine.barrier()
        try:
            ray_logger.log(bytes(ray_logger.LIMIT))
        except ValueError as error:
            ray_logger.log(str(error))
        linger()

    train(engine.elastic.ObjectState(step=0))


def devices() -> list[str | None]:
    """GPUs visible to a rank, its slot's number, and its thread count."""
    engine.init()

    @engine.elastic.run
    def train(state: Any) -> list[str | None]:
        engine.barrier()
        return [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ENGINE_SLOT", "OMP_NUM_THREADS")]

    return train(engine.elastic.ObjectState(step=0))
