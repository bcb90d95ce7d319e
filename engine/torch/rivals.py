"""Finds models whose gradients torch's `DistributedDataParallel` or FSDP reduces too, and libraries without ranks.

Two libraries that reduce one gradient at the same time spoil it: one may send what the other has averaged already. And
the ranks stay equal, so that nobody notices.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch

from .. import logs, place
from ..errors import EngineError


def expect_no_rival(named: dict[str, torch.Tensor]) -> None:
    """Raise if a parameter belongs to a live model that is wrapped for torch.distributed.

    Also over one rank alone: at the end of backward it would put its own gradients back over the reduced ones.

    Without an initialised `torch.distributed` there is none. With it, all objects of the process are looked through,
    which takes some 10 ms: torch keeps no list of what it has wrapped.

    Raises
    ------
    EngineError
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    kinds = tuple(_kinds())
    names = {id(parameter): name for name, parameter in named.items()}
    for each in gc.get_objects():
        if not issubclass(type(each), kinds) or getattr(each, "process_group", None) is None:
            continue
        ignored = getattr(each, "parameters_to_ignore", ())  # those that DDP was told to leave alone
        for inner, parameter in each.module.named_parameters():
            if id(parameter) in names and inner not in ignored:
                kind = type(each).__name__
                raise EngineError(
                    f"parameter {names[id(parameter)]!r} belongs to a model in {kind}, which reduces its gradient too: "
                    f"both would change it at the same time. Use one of them: leave out {kind}, or "
                    "DistributedOptimizer. A library that wraps models by itself (transformers' Trainer, Accelerate) "
                    "does so because it finds RANK and WORLD_SIZE: start the job with enginerun "
                    "--no-torchrun-variables. engine.torch.libraries has a Trainer and an Accelerator that do not "
                    "wrap the model: see docs/libraries.md"
                )


def _kinds() -> Iterator[type]:
    """The classes that wrap models, of those modules that are loaded."""
    yield torch.nn.parallel.DistributedDataParallel
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield fsdp.FullyShardedDataParallel


def warn_of_lone_library(closure: Any) -> None:
    """Log a warning if the library that runs the training loop believes that this process is alone.

    Parameters
    ----------
    closure : optional
        Argument of the optimizer's step, which Lightning binds to its module.
    """
    size, library = place.size(), ""
    if size == 1:
        return
    accelerate = sys.modules.get("accelerate.state")
    state = getattr(getattr(accelerate, "PartialState", None), "_shared_state", {})
    if state.get("num_processes") == 1:
        library = "Accelerate, which transformers' Trainer uses, takes"
    modules = getattr(closure, "args", ())
    if any(getattr(getattr(each, "_trainer", None), "world_size", size) == 1 for each in modules):
        library = "Lightning takes"
    if library:
        logs.logger.warning(
            "%s this process for the only one, while the engine has %d ranks: each rank then divides its loss by its "
            "own number of tokens, and has metrics and checkpoints of its own, so that the result is not that of one "
            "process. Use engine.torch.libraries, as docs/libraries.md shows",
            library,
            size,
        )
