"""What ranks of the tests run. It travels by value: their processes need not find these tests."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np
from ray import cloudpickle

import engine

from ..waiting import be_late

cloudpickle.register_pickle_by_value(sys.modules[be_late.__module__])
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def place() -> tuple[int, int, int, int]:
    """Where the engine says that this rank is."""
    return engine.rank(), engine.size(), engine.local_rank(), engine.local_size()


def add(*values: float, scale: float = 1.0) -> dict[str, Any]:
    """Sum a tensor over all ranks, in a world that goes on."""
    engine.init()
    total = engine.allreduce(np.full(3, engine.rank() + sum(values)) * scale, op=engine.Sum)
    main = threading.current_thread() is threading.main_thread()
    return {"place": place(), "total": total.tolist(), "main": main, "pid": os.getpid()}


class Counter:
    """An object that a rank keeps between calls."""

    def __init__(self, start: int, step: int = 1) -> None:
        engine.init()
        self.value, self.step = start, step

    def count(self) -> tuple[int, int]:
        """Count on; the rank and the number."""
        self.value += self.step
        return engine.rank(), self.value


def raise_in(rank: int) -> Any:
    """One rank raises, the others wait for it in a collective."""
    engine.init()
    if engine.rank() == rank:
        raise ValueError("bad batch")
    return engine.allreduce(np.ones(3))


class Strange(Exception):
    """It cannot be made again from its pickle; or, with a lock, not be pickled."""

    def __init__(self, way: str, _: str) -> None:
        super().__init__("of a kind")
        self.lock = threading.Lock() if way == "to" else None


def raise_something_strange(rank: int, way: str) -> Any:
    """One rank raises what cannot be pickled, or not be unpickled; the others wait for it."""
    engine.init()
    if engine.rank() == rank:
        raise Strange(way, "")
    return engine.allreduce(np.ones(3))


def die_in(rank: int, before_init: bool = False) -> Any:
    """One rank is killed, the others wait for it."""
    if before_init and int(os.environ["ENGINE_RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.init()
    if engine.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return engine.allreduce(np.ones(3))


def raise_while_others_compute() -> None:
    """Rank 1 raises; the others ask nobody for anything, and never end."""
    engine.init()
    if engine.rank() == 1:
        raise ValueError("bad batch")
    threading.Event().wait()


def stay_away_from(rank: int) -> Any:
    """All but one rank want to meet."""
    if int(os.environ["ENGINE_RANK"]) != rank:
        engine.init()


class Fatal:
    """An object whose making ends the process."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def variables(*names: str) -> list[str | None]:
    """Variables of this process's environment."""
    return [os.environ.get(name) for name in names]


def train(config: dict[str, str]) -> None:
    """Six steps, each a sum over two workers; one is killed at the fifth, in the first run of a group."""
    import json
    import tempfile

    from ray import train as ray_train

    engine.init()
    first, former = 0, ray_train.get_checkpoint()
    if former is not None:
        with former.as_directory() as directory, open(f"{directory}/state.json") as file:
            first = json.load(file)["step"] + 1
    with open(config["log"], "a") as log:
        log.write(f"{engine.rank()} {ray_train.get_context().get_world_rank()} {engine.size()} {first}\n")
    for step in range(first, 6):
        total = float(engine.allreduce(np.full(1, step), op=engine.Sum)[0])
        if step == 4 and former is None and engine.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as directory:
            with open(f"{directory}/state.json", "w") as file:
                json.dump({"step": step}, file)
            saved = ray_train.Checkpoint.from_directory(directory) if engine.rank() == 0 else None
            ray_train.report({"step": step, "total": total, "first": first}, checkpoint=saved)


def train_on(config: dict[str, str]) -> None:
    """Count steps, each of which is reported with a checkpoint, until there is a file `stop`; all are written down."""
    import json
    import tempfile

    from ray import train as ray_train

    engine.init()
    step, former = 0, ray_train.get_checkpoint()
    if former is not None:
        with former.as_directory() as directory, open(f"{directory}/state.json") as file:
            step = json.load(file)["step"] + 1
    stopped = False
    while not stopped:
        wants_to_stop = float(os.path.exists(f"{config['home']}/stop"))
        told = engine.allreduce(np.array([1.0, wants_to_stop]), op=engine.Sum)
        stopped = bool(told[1])
        with tempfile.TemporaryDirectory() as directory:
            with open(f"{directory}/state.json", "w") as file:
                json.dump({"step": step}, file)
            saved = ray_train.Checkpoint.from_directory(directory) if engine.rank() == 0 else None
            ray_train.report({"step": step, "total": float(told[0])}, checkpoint=saved)
        with open(f"{config['home']}/steps", "a") as log:
            log.write(f"{step} {engine.size()} {engine.rank()} {os.getpid()}\n")
        be_late(0.1)
        step += 1


def train_and_raise(config: dict[str, str]) -> None:
    """The engine and PyTorch's process group side by side; then one worker raises."""
    import torch
    import torch.distributed

    import engine.torch as hvd

    hvd.init()
    ours, theirs = torch.full((2,), float(hvd.rank())), torch.full((2,), float(hvd.rank()))
    ours = hvd.allreduce(ours, op=hvd.Sum)
    torch.distributed.all_reduce(theirs)
    with open(config["log"], "a") as log:
        log.write(f"{hvd.rank()} {torch.distributed.get_rank()} {ours.tolist()} {theirs.tolist()}\n")
    if hvd.rank() == 1:
        raise ValueError("bad batch")
    hvd.allreduce(ours)


def work_until_it_fails(mark: str) -> None:
    """Sum and sum; rank 0 makes a file once it has begun."""
    engine.init()
    while True:
        engine.allreduce(np.ones(3), name="sum")
        if engine.rank() == 0 and not os.path.exists(mark):
            open(mark, "w").close()


def raise_late(error: Exception, seconds: float) -> None:
    """Raise something, after a while."""
    be_late(seconds)
    raise error
