"""Training with many kinds of optimizers at once, for `tests/elastic/test_resets.py`: functions of a `Member`.

Optimizers, a scheduler and a gradient scaler are committed. With COMMITS each world begins from the commit in that
directory, like a run that is started again; otherwise it begins from the members' states.
"""

from __future__ import annotations

import gc
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import engine
import engine.torch as hvd
from engine.torch.elastic import TorchState

from .member import Member
from .programs import alive

STEPS = 3  # number of steps in each world before the commit
OVERFLOW = 7  # number of steps between infinite gradients, which the scaler notices


class Model(nn.Module):
    """Model with a layer that is sometimes frozen, sparse gradients, Adasum, and compressed gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.dense = nn.Linear(16, 4)
        self.embedding = nn.Embedding(20, 8, sparse=True)
        self.combined = nn.Linear(4, 4)
        self.thin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = self.embedding((x.abs() * 3).long().clamp(0, 19)[:, 0]) + x
        result: torch.Tensor = self.combined(self.thin(self.dense(torch.relu(self.hidden(known)))))
        return result


class Training:
    """Everything that is trained; it is made before the first world, and committed together."""

    def __init__(self) -> None:
        engine.init()
        self.model = model = Model()
        self.scheme = hvd.PowerSGD(rank=1, start_iter=2, min_compression_rate=0.1)
        adam = torch.optim.Adam([*model.hidden.parameters(), *model.dense.parameters()], 1e-2)
        self.optimizers: list[Any] = [
            hvd.DistributedOptimizer(adam, gradient_as_bucket_view=True),
            hvd.DistributedOptimizer(torch.optim.SGD(model.embedding.parameters(), 0.1)),
            hvd.DistributedOptimizer(torch.optim.SGD(model.combined.parameters(), 0.05), op=hvd.Adasum),
            hvd.DistributedOptimizer(torch.optim.SGD(model.thin.parameters(), 1e-3), compression=self.scheme),
        ]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 4, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
        first, second, third, fourth = self.optimizers
        more = {"scheme": self.scheme, "scheduler": self.scheduler, "scaler": self.scaler, "steps": 0}
        self.state: Any = TorchState(model, first, second=second, third=third, fourth=fourth, **more)
        self.parts = [model, *self.optimizers, self.scheme, self.scheduler, self.scaler]

    def step(self) -> None:
        """Make one step on data of this rank's own."""
        steps = self.state.steps
        self.model.hidden.requires_grad_(steps % 10 < 7)
        generator = torch.Generator().manual_seed(1000 * steps + engine.rank())
        loss = self.model(torch.randn(4, 8, generator=generator)).square().mean()
        if steps % OVERFLOW == OVERFLOW - 1:
            loss = loss * float("inf")
        for each in self.optimizers:
            each.zero_grad()
        first, second, third, fourth = self.optimizers
        self.scaler.scale(loss).backward()
        self.scaler.step(first)
        if torch.isfinite(loss):
            second.step()
            third.step()
            fourth.step()
        self.scaler.update()
        self.scheduler.step()
        self.state.steps += 1

    def digest(self) -> str:
        """Return a digest of everything that is committed."""
        held = hashlib.sha256()
        for value in self.parts:
            note(value.state_dict(), held)
        return held.hexdigest()


def note(value: Any, held: Any) -> None:
    """Add a state to a digest, with tensors by their bits."""
    if isinstance(value, torch.Tensor):
        held.update(value.detach().contiguous().view(-1).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            held.update(str(key).encode())
            note(value[key], held)
    elif isinstance(value, list | tuple):
        for each in value:
            note(each, held)
    else:
        held.update(repr(value).encode())


def everything(member: Member) -> None:
    """Make some steps and a commit in each world, and then steps that are undone."""
    training = Training()
    state, kept = training.state, os.environ.get("COMMITS")

    def body(member: Member) -> None:
        assert member.world is not None
        if kept is not None:
            load(training, Path(kept) / f"{(member.world.number or 0) - 1}")
        elif member.worlds > 1:
            state.restore()
        state.on_reset()
        state.sync()
        for _ in range(STEPS):
            training.step()
        state.save()
        if kept is not None and engine.rank() == 0:
            states = [each.state_dict() for each in training.parts]
            torch.save([state.steps, states], Path(kept) / f"{member.world.number}")
        told = {"steps": state.steps, "digest": training.digest(), "rate": training.scheduler.get_last_lr()}
        for _ in range(2):  # two, because the gradients of a single one may be infinite, and not be reduced
            training.step()
        gc.collect()
        held = alive("Engine", "GradientGroup", "TorchReducer", "Deltas")
        member.say("trained", held=held, **told)
        while True:
            training.step()

    member.run(body)


def load(training: Training, commit: Path) -> None:
    """Load a commit, if there is one."""
    if commit.exists():
        training.state.steps, states = torch.load(commit, weights_only=False)
        for part, state in zip(training.parts, states, strict=True):
            part.load_state_dict(state)
