"""A small model with data and comparisons, for tests of the torch binding."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

import engine
from engine.session import runtime

from ..on_ranks import Ranks, spare
from ..waiting import let_pass, until

# Numbers of ranks: only three in `make test`, except for tests of pairs of pairs or process sets.
SIZES = (spare(1), spare(2), 3, spare(4))

# Ranks on which tensors lend their memory only by `__dlpack__`, like those of torch 2.2 to 2.9. It refuses tensors
# that require a gradient.
BY_METHOD = Ranks(2, "by a method", (("DLPACK_BY_METHOD", "1"),))

if "ENGINE_RANK" in os.environ:
    torch.set_num_threads(1)
    if "DLPACK_BY_METHOD" in os.environ and hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        del torch.Tensor.__dlpack_c_exchange_api__


class Interrupted(Exception):
    """Exception that a test's signal handler raises."""


def leave_waiting(call: Callable[[], object], operations: int = 1) -> None:
    """Interrupt the wait in `call` on rank 0 by an exception of a signal handler; the others call it after that.

    `operations` is the number of operations in flight when rank 0 waits.
    """

    def leave(*_: Any) -> None:
        raise Interrupted

    def interrupt() -> None:
        until(lambda: len(in_flight()) >= operations, "what is waited for is in flight", pause=0.01)
        let_pass(0.2)  # until the last submission is followed by the wait
        os.kill(os.getpid(), signal.SIGALRM)

    if engine.rank() != 0:
        engine.barrier("left")
        call()
        return
    before = signal.signal(signal.SIGALRM, leave)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        raises(Interrupted, call)
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)
    engine.barrier("left")


def mlp(dtype: torch.dtype = torch.float64, width: int = 16) -> nn.Sequential:
    """Return a small model, the same on every rank, in float64, so that rounding cannot hide other differences."""
    torch.manual_seed(1)
    layers = nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    return nn.Sequential(*layers).to(dtype)


def whole_batch(step: int, features: int = 8, per_rank: int = 4) -> torch.Tensor:
    """Return the input of all ranks in a step, of shape [per_rank * size, features]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(per_rank * engine.size(), features, generator=generator, dtype=torch.float64)


def shard(batch: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a batch."""
    return batch[engine.rank() :: engine.size()]


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """Return the mean over samples, so that the mean over equal shards equals that of the whole."""
    output = model(batch)
    wanted = batch.flatten(1)[:, : output.shape[1]].sin()
    return ((output - wanted) ** 2).sum(dim=1).mean()


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters, by name."""
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of existing gradients, by name."""
    return {name: each.grad.detach().clone() for name, each in module.named_parameters() if each.grad is not None}


def local_gradients(loss: torch.Tensor, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of this rank only, without any reduction."""
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
    return {name: each for name, each in zip(named, found, strict=True) if each is not None}


def check_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-11, atol: float = 1e-12
) -> None:
    """Check equality of names, and of values up to the rounding of float64."""
    assert found.keys() == expected.keys(), f"{sorted(found)} instead of {sorted(expected)}"
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def check_same_everywhere(tensors: dict[str, torch.Tensor]) -> None:
    """Check that all ranks hold the same bits; collective."""
    engine.check_consistency(tensors)


def averaged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean over ranks without the code under test: gather, and add in rank order; collective."""
    gathered = engine.allgather_object({name: each.tolist() for name, each in tensors.items()})
    return {
        name: sum(torch.tensor(rank[name], dtype=each.dtype) for rank in gathered) / len(gathered)
        for name, each in tensors.items()
    }


def reduced() -> int:
    """Return the number of tensors whose reduction this rank has seen."""
    return engine.counters()["tensors"]


def in_flight() -> list[str]:
    """Return the names of unfinished operations."""
    return [each["name"] for each in runtime.current_engine().pending()]


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], function: Callable[[], object]) -> str:
    """Return the text of the error that a call must raise, of one kind or of several."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"did not raise {kind}")


def train(
    model: nn.Module, optimizer: Any, batches: Iterable[torch.Tensor], after: Callable[[], object] | None = None
) -> list[float]:
    """Make plain training steps, and return the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if after is not None:
            after()
        optimizer.step()
        losses.append(loss.item())
    return losses


def shards(steps: int = 4, **shape: int) -> Iterator[torch.Tensor]:
    """Return this rank's input of each step."""
    return (shard(whole_batch(step, **shape)) for step in range(steps))


def wholes(steps: int = 4, **shape: int) -> Iterator[torch.Tensor]:
    """Return the input of all ranks of each step."""
    return (whole_batch(step, **shape) for step in range(steps))
