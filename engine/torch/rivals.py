"""Finds models whose gradients torch's own `DistributedDataParallel` or FSDP reduces as well.

Two libraries that reduce one gradient at the same time spoil it: one may send what the other has averaged already. And
the ranks stay equal, so that nobody notices.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import torch

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
                    "--no-torchrun-variables, or take them out of os.environ after engine.init() and before that "
                    "library is imported, as docs/libraries.md shows"
                )


def _kinds() -> Iterator[type]:
    """The classes that wrap models, of those modules that are loaded."""
    yield torch.nn.parallel.DistributedDataParallel
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        yield fsdp.FullyShardedDataParallel
