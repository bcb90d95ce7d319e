"""Programs of members for `tests/elastic/test_worlds.py`: functions of a `Member`."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import engine
import engine.torch as hvd
from engine.collectives.process_sets import ProcessSet
from engine.config.world import World
from engine.metrics import page
from engine.net.rendezvous import CancellationToken
from engine.session import runtime
from tests.elastic.member import Member


def resources() -> dict[str, int]:
    """Return the numbers of descriptors, threads and memory maps of this process."""
    with open("/proc/self/maps") as maps:
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "maps": len(maps.readlines()),
        }


def own_page() -> str | None:
    """Return the path of this process's counters page."""
    found = [entry for entry in os.listdir("/proc/self/fd") if page.NAME in held_by(os.getpid()).get(entry, "")]
    return f"/proc/{os.getpid()}/fd/{found[0]}" if found else None


def held_by(pid: int) -> dict[str, str]:
    """Return what the descriptors of a process refer to."""
    found = {}
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found[entry] = os.readlink(f"/proc/{pid}/fd/{entry}")
    return found


def counting(member: Member) -> None:
    """Reduce until the world fails, under names that each world counts from zero."""
    engine.init()

    def body(member: Member) -> Any:
        gc.collect()
        member.say("resources", **resources(), page=own_page())
        first = engine.allreduce(np.array([float(engine.rank())]), engine.Sum)
        member.say("reduced", value=float(first[0]), size=engine.size(), rank=engine.rank())
        while True:
            engine.allreduce(np.ones(8), engine.Sum)

    member.run(body)


def dying(member: Member) -> None:
    """Reduce in each world; on the way into one, die at the function call whose number a file contains."""
    engine.init()
    entered = runtime.enter_world
    place = Path(os.environ["DYING"]) / str(member.number)

    def enter(world: World, called_off: CancellationToken | None = None) -> None:
        dies_at = int(place.read_text()) if place.exists() else 0
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"
            if calls == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        try:
            entered(world, called_off)
        finally:
            sys.setprofile(None)
        member.say("calls", count=calls)

    runtime.enter_world = enter

    def body(member: Member) -> None:
        assert member.world is not None
        engine.allreduce(np.ones(1))
        member.say("reduced", world=member.world.number)
        while True:
            engine.allreduce(np.ones(1))

    member.run(body)


def compiled(member: Member) -> None:
    """Run a JAX program that is compiled in the first world, and whose shapes depend on the number of ranks."""
    import jax

    import engine.jax

    engine.init()

    @jax.jit
    def step(x: Any) -> Any:
        return engine.jax.allgather(x, name="rows"), engine.jax.allreduce(x, op=engine.Average, name="mean")

    def body(member: Member) -> None:
        for _ in range(2):
            rows, mean = step(jax.numpy.full((2, 3), engine.rank() + 1.0))
        member.say("stepped", rows=rows[:, 0].tolist(), mean=mean[0].tolist())
        while True:
            engine.allreduce(np.ones(1))

    member.run(body)


def alive(*kinds: str) -> dict[str, int]:
    """Return the number of objects of each class, by the class's name."""
    found = Counter(type(each).__name__ for each in gc.get_objects())
    return {kind: found[kind] for kind in kinds}


class Training:
    """A torch model, optimizers and schedulers, all made before the first world, and the state that ranks share."""

    def __init__(self, member: Member, make: Callable[[nn.Module], list[Any]], model: nn.Module) -> None:
        engine.init()
        self.member = member
        self.model = model
        self.optimizers = make(model)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 5, 0.9) for each in self.optimizers]
        self.steps = 0
        self.ids = [id(each) for each in self.optimizers]

    def sync(self) -> None:
        """Take the state of the rank with the most steps, like a state of elastic training."""
        steps = engine.allgather_object(self.steps, "steps")
        root = steps.index(max(steps))
        parts = [self.model, *self.optimizers, *self.schedulers]
        states = engine.broadcast_object([each.state_dict() for each in parts], root, "state")
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        self.steps = steps[root]

    def step(self, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        """Make one step on data of this rank's own."""
        generator = torch.Generator().manual_seed(1000 * self.steps + engine.rank())
        loss = forward(self.model, torch.randn(4, 8, generator=generator))
        for each in self.optimizers:
            each.zero_grad()
        loss.backward()
        for each in (*self.optimizers, *self.schedulers):
            each.step()
        self.steps += 1

    def train(self, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None, few: int = 4) -> None:
        """Make a few steps in each world, check that ranks agree, and then make steps until the world fails."""
        forward = forward or (lambda model, x: model(x).square().mean())

        def body(member: Member) -> None:
            self.sync()
            for _ in range(few):
                self.step(forward)
            engine.check_consistency(self.model.state_dict(), "parameters")
            same = self.ids == [id(each) for each in self.optimizers]
            member.say("trained", steps=self.steps, rate=self.optimizers[0].param_groups[0]["lr"], same=same)
            if member.worlds > 1:
                gc.collect()
                member.say("resources", **resources(), **alive("Engine", "GradientGroup", "TorchReducer"))
            while True:
                self.step(forward)

        self.member.run(body)


def perceptron() -> nn.Module:
    """Return a perceptron of two layers, with weights that depend on the process."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def adam(member: Member) -> None:
    """Train with one optimizer and its scheduler."""

    def make(model: nn.Module) -> list[Any]:
        return [hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 1e-3), model.named_parameters())]

    Training(member, make, perceptron()).train()


def views(member: Member) -> None:
    """Train with gradients side by side in shared memory."""

    def make(model: nn.Module) -> list[Any]:
        plain = torch.optim.Adam(model.parameters(), 1e-3)
        return [hvd.DistributedOptimizer(plain, gradient_as_bucket_view=True)]

    Training(member, make, perceptron()).train()


def two_optimizers(member: Member) -> None:
    """Train with one optimizer for each layer; some processes drop a third before the first world."""
    dropped = perceptron()

    def make(model: nn.Module) -> list[Any]:
        if member.number == 0:
            hvd.DistributedOptimizer(torch.optim.SGD(dropped.parameters(), 0.1))
        return [
            hvd.DistributedOptimizer(torch.optim.SGD(model[index].parameters(), 1e-3, momentum=0.9)) for index in (0, 2)
        ]

    Training(member, make, perceptron()).train()


def powersgd(member: Member) -> None:
    """Train with a scheme that counts its calls and remembers factors; most reductions are compressed."""

    def make(model: nn.Module) -> list[Any]:
        scheme = hvd.PowerSGD(rank=1, start_iter=3, min_compression_rate=0.1)
        return [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-2), compression=scheme)]

    Training(member, make, perceptron()).train(few=6)


def frozen(member: Member) -> None:
    """Train with a layer that is frozen at first, and thawed in the middle."""
    model = perceptron()
    model[0].requires_grad_(False)

    def make(model: nn.Module) -> list[Any]:
        return [hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 1e-3), model.named_parameters())]

    training = Training(member, make, model)

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model[0].requires_grad_(training.steps > 10)
        return model(x).square().mean()

    training.train(forward)


def adasum(member: Member) -> None:
    """Train with Adasum, which combines the changes of steps."""

    def make(model: nn.Module) -> list[Any]:
        return [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), op=hvd.Adasum)]

    Training(member, make, perceptron()).train()


def sparse(member: Member) -> None:
    """Train with the sparse gradients of an embedding."""
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4))

    def make(model: nn.Module) -> list[Any]:
        return [hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-2), model.named_parameters())]

    Training(member, make, model).train(lambda model, x: model((x.abs() * 3).long()).square().mean())


def passes(member: Member) -> None:
    """Train with gradients that three passes add up; worlds end in the middle of them."""
    model = perceptron()

    def make(model: nn.Module) -> list[Any]:
        plain = torch.optim.SGD(model.parameters(), 1e-2)
        return [hvd.DistributedOptimizer(plain, model.named_parameters(), backward_passes_per_step=3)]

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            model(x).square().mean().backward()
        return model(x).square().mean()

    Training(member, make, model).train(forward)


def batch_norm(member: Member) -> None:
    """Train two layers with batch normalization over all ranks, which a newcomer has never used."""
    plain = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4), nn.BatchNorm1d(4))
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(plain)

    def make(model: nn.Module) -> list[Any]:
        return [hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 1e-3), model.named_parameters())]

    Training(member, make, model).train()


def refused(call: Callable[[], Any]) -> str | None:
    """Return the error that a call raises, or None if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def pending_session(member: Member) -> None:
    """Make the calls that a script makes before `elastic.run`."""
    engine.init()
    model = perceptron()
    before = copy.deepcopy(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    part = engine.add_process_set([0, 1])
    optimizer.zero_grad()
    ones = torch.ones(2)
    calls: list[Callable[[], Any]] = [
        lambda: engine.allreduce(np.ones(2)),
        lambda: hvd.allgather(ones),
        lambda: hvd.broadcast(ones, 0),
        lambda: engine.barrier(),
        lambda: engine.join(),
        lambda: engine.broadcast_object(1),
        lambda: engine.allreduce(np.ones(2), process_set=part),
        lambda: model(torch.ones(1, 8)).sum().backward() or optimizer.step(),
        lambda: engine.knobs(),
    ]
    member.say(
        "waited",
        rank=engine.rank(),
        size=engine.size(),
        initialized=engine.is_initialized(),
        equal=all(torch.equal(value, before[name]) for name, value in model.state_dict().items()),
        refused=[refused(call) for call in calls],
    )


def process_sets(member: Member) -> None:
    """Use two process sets that are added before the first world."""
    low = ProcessSet([0, 1])
    engine.init(process_sets=[low])
    high = engine.add_process_set([2, 3])

    def total(part: ProcessSet) -> Any:
        try:
            if not part.included():
                return None
            return float(engine.allreduce(np.array([float(engine.rank())]), engine.Sum, process_set=part)[0])
        except engine.errors.NotInitializedError as error:
            return str(error)

    def body(member: Member) -> None:
        member.say("sums", low=total(low), high=total(high))
        while True:
            engine.allreduce(np.ones(1))

    member.run(body)


def late_wrapping(member: Member) -> None:
    """Wrap a new optimizer in each world, while the old one still exists."""
    engine.init()
    kept: list[Any] = []

    def body(member: Member) -> None:
        old = refused(kept[-1].step) if kept else None
        model = perceptron()
        kept.append(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)))
        model(torch.ones(1, 8)).sum().backward()
        kept[-1].step()
        member.say("stepped", old=old)
        while True:
            engine.allreduce(np.ones(1))

    member.run(body)


def forking(member: Member) -> None:
    """Fork a child in a world, and report which descriptors of the engine it holds."""
    engine.init()

    def body(member: Member) -> None:
        hvd.DistributedOptimizer(torch.optim.SGD(perceptron().parameters(), 0.1), gradient_as_bucket_view=True)
        begun, begins = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(begins, b"!")
            signal.pause()
        os.read(begun, 1)
        held = held_by(child)
        own = [name for name in held.values() if "engine-" in name or "pidfd" in name or "eventfd" in name]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        member.say("forked", held=own)
        while True:
            engine.allreduce(np.ones(1))

    member.run(body)


def knobs(member: Member) -> None:
    """Turn a knob in the first world."""
    engine.init()

    def body(member: Member) -> None:
        assert member.world is not None
        if member.world.number == 1 and engine.rank() == 0:
            engine.set_knobs(fusion_threshold=12345)
        for _ in range(3):
            engine.allreduce(np.ones(1))
        member.say("knobs", threshold=engine.knobs()["fusion_threshold"])
        while True:
            engine.allreduce(np.ones(1))

    member.run(body)


def tuned(member: Member) -> None:
    """Train under the tuner, and report the knobs at the start of a world and each trial."""
    engine.init()
    model = perceptron()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-4), model.named_parameters())

    def children() -> list[str]:
        found = []
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as of_thread:
                found += of_thread.read().split()
        return found

    def body(member: Member) -> None:
        engine.allreduce(np.ones(1))
        begun, tuning = engine.knobs(), runtime.current_session().tuning
        told = None
        for number in count():
            spent = None if tuning is None else tuning.spent.trials
            if number in (0, 20) or spent != told:
                told, searching = spent, tuning is not None and tuning.searching
                best = {} if tuning is None else tuning.best
                member.say("tuning", begun=begun, best=best, searching=searching, spent=spent, children=children())
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()

    member.run(body)


def leaving(member: Member) -> None:
    """End each world without a failure when all have made so many steps."""
    engine.init()

    def body(member: Member) -> dict[str, Any]:
        for _ in range(5):
            total = engine.allreduce(np.ones(1 << 16), engine.Sum)
        return {"total": float(total[0]), "size": os.environ["ENGINE_SIZE"], "rank": os.environ["ENGINE_RANK"]}

    member.run(body)
