"""Programs of members of an elastic job's worlds with GPUs, which are stand-ins: functions of a `Member`.

A member that is started with KILLED_IN is killed in that call of CUDA or NCCL, once its world has trained.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest
import torch

import engine
import engine.torch
from engine.errors import EngineError, NotInitializedError
from engine.session import runtime

from ..elastic.member import Member
from ..waiting import until
from .allreduce_programs import allreduce, broadcast, compare, values, within
from .device_tensors import DeviceTensor, Framework
from .freeze_programs import Graph
from .frozen_optimizer_programs import Model
from .plane_programs import MADE, Rank
from .views_programs import Optimizer

KILL = -2  # code by which `stand_fail` kills the process in a call
COUNT = 1000
WAITS = ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize")  # wait for the device without a limit


class Trainer(Rank):
    """This process, over all its worlds."""

    def __init__(self, member: Member) -> None:
        Framework.start()
        super().__init__(0, 1)
        ctypes.CDLL(os.environ["KERNELS"])
        self.member = member
        self.truth = np.zeros(COUNT, np.float32)
        self.weights = DeviceTensor(self.truth)  # made once on the device, with the values of `truth`
        self.steps = 0  # number of steps made
        engine.init()
        self.note()

    def enter(self) -> None:
        """Report what is left of the last world, and take the state of the rank with the most steps."""
        self.rank, self.size = engine.rank(), engine.size()
        waits = sum(map(self.calls, WAITS)) - self.waited
        left = {made: self.calls(made) - self.calls(ended) for made, ended in MADE.items()}
        kept = bool(np.array_equal(self.weights.numpy(), self.truth))
        self.member.say("left", waits=waits, left=left, kept=kept, freed=self.calls("cuMemFree"))
        self.note()
        if os.environ.get("KILLED_IN") == "ncclCommInitRankConfig":
            self.arm()
        steps = engine.allgather_object(self.steps, "steps")
        root = steps.index(max(steps))
        broadcast(self.weights, self.weights, root, "weights").wait()
        self.truth, self.steps = self.weights.numpy(), steps[root]

    def step(self) -> None:
        """Make a step: add a sum over all ranks to the weights."""
        drawn = [values(rank + self.steps, COUNT, "float32") for rank in range(self.size)]
        gradient = DeviceTensor(drawn[self.rank], late=0.2)
        allreduce(gradient, gradient, "gradient", prescale=2.0).wait()
        got = gradient.numpy()
        compare(got, 2 * np.add.reduce(drawn), f"step {self.steps}")
        self.truth = self.truth + got
        self.weights.compute(self.truth, 0.2)
        self.steps += 1

    def arm(self) -> None:
        """Arrange to be killed within the call."""
        call = os.environ.get("KILLED_IN")
        self.member.say("armed")
        if call:
            self.fail(call, 1, KILL)

    def trained(self, **told: Any) -> None:
        """Report success, and prepare for the end."""
        reports = self.reports()
        assert reports == [], reports
        self.member.say("trained", steps=self.steps, **told)
        engine.barrier()
        self.arm()

    def note(self) -> None:
        """Count the calls that have waited for the device, before the next world."""
        self.waited = sum(map(self.calls, WAITS))


def training(member: Member) -> None:
    """Reduce tensors alone, in frozen batches side by side, and in a process set, until the world fails."""
    me = Trainer(member)
    pair = engine.add_process_set([0, 1])

    def step(optimizer: Optimizer) -> None:
        me.step()
        optimizer.train(me)
        if pair.included():
            with within(pair):
                tensor = DeviceTensor(values(me.rank, 10, "float32"))
                allreduce(tensor, tensor, "pair").wait()
                compare(tensor.numpy(), sum(values(rank, 10, "float32") for rank in (0, 1)), "pair")

    def body(_: Member) -> None:
        me.enter()
        Optimizer.made = 0
        optimizer = Optimizer((3, 100, 17, 1))
        for _ in range(3):
            step(optimizer)
        frozen = [row for row in runtime.current_engine().history() if row["frozen"]]
        me.trained(frozen=len(frozen) > 0)
        try:
            while True:
                step(optimizer)
        finally:
            me.note()

    member.run(body)


def frozen(member: Member) -> None:
    """Freeze and capture an optimizer in each world; it enters the next one unfrozen."""
    me = Trainer(member)
    model = Model(me)
    passes: list[Any] = []

    def body(_: Member) -> None:
        me.enter()
        for each in passes:
            with pytest.raises(NotInitializedError, match="frozen anew"):
                each.enqueue_pass(Framework.stream.value)
        freeze_anew(model)
        passes.append(model.optimizer._engine.reduction._pass)
        for step in (1, 2):
            model.optimizer.zero_grad()
            model.backward(step)
            model.step(step)
        model.optimizer.zero_grad()
        with Graph(me) as graph:
            model.loss(3, me.rank).backward()
        graph.launch()
        model.check(3)
        me.trained(frozen=model.optimizer._engine.is_frozen)
        try:
            while runtime.world_failure(0.0) is None:
                graph.launch()
                until(lambda: Framework.device.cuda.cuStreamQuery(Framework.stream) == 0, "the end of the graph")
            engine.barrier()
        finally:
            me.note()

    member.run(body)


def freeze_anew(model: Model) -> None:
    """Freeze an optimizer that has moved into this world: only after a step, and without the last world's hooks."""
    optimizer = model.optimizer
    with torch.no_grad():
        for name, parameter in model.layers.named_parameters():
            parameter.copy_(engine.torch.broadcast(parameter.detach(), 0, name))
    assert not optimizer._engine.is_frozen
    with pytest.raises(EngineError, match="run a step first"):
        optimizer.freeze()
    hooks = [each._post_accumulate_grad_hooks for each in model.layers.parameters()]
    assert all(len(each) == 1 for each in hooks), hooks
    model.backward(0)
    model.check(0)
    optimizer.step()
    model.addresses.clear()
    model.place()
    optimizer.freeze()
