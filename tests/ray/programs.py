"""Programs of the tests' ranks. The module is pickled by value: their processes need not find these tests."""

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
    """Rank, size, local rank and local size of this process."""
    return engine.rank(), engine.size(), engine.local_rank(), engine.local_size()


def add(*values: float, scale: float = 1.0) -> dict[str, Any]:
    """Sum a tensor over all ranks, in a world that stays open."""
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
        """Count on; return the rank and the count."""
        self.value += self.step
        return engine.rank(), self.value


def raise_in(rank: int) -> Any:
    """Raise on one rank while the others wait for it in a collective."""
    engine.init()
    if engine.rank() == rank:
        raise ValueError("bad batch")
    return engine.allreduce(np.ones(3))


class Strange(Exception):
    """Exception that cannot be unpickled; or, with a lock, cannot be pickled."""

    def __init__(self, way: str, _: str) -> None:
        super().__init__("of a kind")
        self.lock = threading.Lock() if way == "to" else None


def raise_something_strange(rank: int, way: str) -> Any:
    """Raise on one rank an exception that cannot be pickled or unpickled; the others wait for it."""
    engine.init()
    if engine.rank() == rank:
        raise Strange(way, "")
    return engine.allreduce(np.ones(3))


def die_in(rank: int, before_init: bool = False) -> Any:
    """Kill one rank while the others wait for it."""
    if before_init and int(os.environ["ENGINE_RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.init()
    if engine.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return engine.allreduce(np.ones(3))


def raise_while_others_compute() -> None:
    """Raise on rank 1 while the others run no collective and never end."""
    engine.init()
    if engine.rank() == 1:
        raise ValueError("bad batch")
    threading.Event().wait()


def stay_away_from(rank: int) -> Any:
    """Meet on all ranks but one."""
    if int(os.environ["ENGINE_RANK"]) != rank:
        engine.init()


class Fatal:
    """Object whose construction ends the process."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def variables(*names: str) -> list[str | None]:
    """Variables of this process's environment."""
    return [os.environ.get(name) for name in names]


def train(config: dict[str, str]) -> None:
    """Run six steps, each a sum over two workers; one worker is killed at the fifth, in the group's first run."""
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
    """Count steps until the file `stop` exists; each is reported with a checkpoint, and recorded."""
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
    """Use the engine beside PyTorch's process group; then one worker raises."""
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
    """Sum for ever; rank 0 creates a file once it has begun."""
    engine.init()
    while True:
        engine.allreduce(np.ones(3), name="sum")
        if engine.rank() == 0 and not os.path.exists(mark):
            open(mark, "w").close()


def raise_late(error: Exception, seconds: float) -> None:
    """Raise an exception after a while."""
    be_late(seconds)
    raise error


def train_by_torch(config: dict[str, Any]) -> None:
    """Take a step of DDP in a group that Ray has made, and write down what it was."""
    import ray.train.torch
    import torch
    import torch.distributed as dist

    model = ray.train.torch.prepare_model(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((3,), dist.get_rank() + 1.0)).sum().backward()
    group = type(dist.group.WORLD).__name__
    with open(os.path.join(config["directory"], f"rank.{dist.get_rank()}"), "w") as told:
        told.write(f"{dist.get_backend()} {group} {model.module.weight.grad.tolist()}")
