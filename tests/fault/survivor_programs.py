"""Programs of ranks in which one rank fails in the middle of a training; imported by every rank."""

from __future__ import annotations

import io
import os
import signal
from typing import Any

import torch
from torch import nn

import engine
import engine.torch as hvd

FAILS_AT = 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def values(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: each.tolist() for name, each in state.items()}


def train(victim: int, manner: str, views: bool) -> Any:
    """Train until the victim fails; return a survivor's state then, and after the last complete step."""
    engine.init()
    torch.set_num_threads(1)
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(net())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), gradient_as_bucket_view=views
    )
    before: dict[str, Any] = {}
    for step in range(FAILS_AT + 1):
        try:
            optimizer.zero_grad(set_to_none=False)
            loss = model(batch(step, engine.rank())).square().mean()
            if step == FAILS_AT and engine.rank() == victim:
                if manner == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ArithmeticError("a bad sample")
            loss.backward()
        except hvd.HorovodInternalError as error:
            return goes_on_alone(model, optimizer, str(error)) | {"before": before, "step": step}
        optimizer.step()
        before = values(dict(model.named_parameters()))
    return None


def goes_on_alone(model: nn.Module, optimizer: Any, text: str) -> dict[str, Any]:
    """Save the state, load it in a plain program, and train on with the same optimizer in this process."""
    found: dict[str, Any] = {"error": text, "after": values(dict(model.named_parameters()))}
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    stored = torch.load(file)
    plain = net()
    plain.load_state_dict(stored["model"])
    other = torch.optim.Adam(plain.parameters(), lr=0.5)
    other.load_state_dict(stored["optimizer"])
    found["loaded"] = values(dict(plain.named_parameters()))
    model.load_state_dict(stored["model"])
    unwrapped = optimizer.unwrap()
    for module, owner in ((model.eval(), unwrapped), (plain.eval(), other)):
        owner.zero_grad()
        module(batch(9, 0)).square().mean().backward()
        owner.step()
    found["trained"] = values(dict(model.named_parameters())) == values(dict(plain.named_parameters()))
    found["moved"] = values(dict(plain.named_parameters())) != found["loaded"]
    return found
