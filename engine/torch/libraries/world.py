"""Rank and size of this process for libraries that use torch.distributed, and models and optimizers of theirs.

Gradients and parameters are sent by the engine. A library's own metrics, gathers and barriers use
`torch.distributed`, whose process group the library creates from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ...collectives import objects
from ...config.launchers import TORCHRUN_PLACE
from ...errors import EngineError
from ...host.machine import free_port
from ...session import runtime, topology
from ..optimizer import DistributedOptimizer
from ..state import broadcast_parameters


def export_place() -> None:
    """Set the variables from which libraries read their rank and the address for torch.distributed. Collective.

    Call it after `init()`, and before any object of the library is created, such as `TrainingArguments` or
    `Accelerator`. Without a GPU it also sets `ACCELERATE_USE_CPU`; otherwise Accelerate ignores the other ranks there.

    Raises
    ------
    EngineError
        The job is elastic: a process group of torch.distributed cannot move from one world into the next.
    NotInitializedError
    """
    world = runtime.current_session().world
    if world.workers:
        raise EngineError(
            "engine.torch.libraries does not go with elastic jobs: the process group that Trainer, Accelerate and "
            "Lightning make keeps its ranks; start the job without --min-np and --max-np, and resume from a checkpoint"
        )
    own = (topology.rank(), topology.local_rank(), topology.size(), topology.local_size())
    kept = [_is_told(own)] * (topology.size() == 1) or objects.allgather_object(_is_told(own))
    if not all(kept):
        host = world.hub.host if world.several_hosts and world.hub is not None else "127.0.0.1"
        port = objects.broadcast_object(free_port("") if topology.rank() == 0 else None)
        values = (*(str(number) for number in own), host, str(port))
        os.environ.update(zip(TORCHRUN_PLACE, values, strict=True))
    if not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _is_told(own: tuple[int, ...]) -> bool:
    """Return whether the environment has all variables, and they name this rank."""
    told = [os.environ.get(name, "") for name in TORCHRUN_PLACE]
    return all(told) and told[: len(own)] == [str(number) for number in own]


def expect_same_place(library: str, rank: int, size: int) -> None:
    """Raise EngineError unless a library has the rank and size of the engine."""
    if (rank, size) != (topology.rank(), topology.size()):
        raise EngineError(
            f"{library} takes this process for rank {rank} of {size}, and the engine for rank {topology.rank()} of "
            f"{topology.size()}: call engine.torch.libraries.export_place() after init() and before TrainingArguments, "
            "Accelerator, or anything else of these libraries is made; on a machine with a GPU that is not to be "
            "used, also give use_cpu=True (TrainingArguments) or cpu=True (Accelerator)"
        )


def broadcast_model(model: Any) -> None:
    """Broadcast rank 0's parameters and buffers of a model, each once. Collective."""
    broadcast_parameters(dict(model.named_parameters()) | dict(model.named_buffers()), root_rank=0)


def reduce_gradients_of(optimizer: Any, names: Mapping[torch.Tensor, str], options: Mapping[str, Any]) -> None:
    """Wrap an optimizer in `DistributedOptimizer`, with the names of its parameters if all have one. Collective."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    named = [(names[each], each) for each in parameters if each in names]
    DistributedOptimizer(optimizer, named if len(named) == len(parameters) else None, **options)
