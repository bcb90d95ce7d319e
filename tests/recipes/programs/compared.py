"""Frame of a program that trains on a backend of torch.distributed and saves its parameters.

`torchrun PROGRAM.py BACKEND DIRECTORY [WORDS]` calls the program's function on each rank, in a directory of the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

Parameters = dict[str, torch.Tensor]


def run_program(train: Callable[..., nn.Module], make_group: Callable[[str], object] = dist.init_process_group) -> None:
    """Make a group of a backend, call a function with the further words, and save the parameters of its model.

    Each rank saves what it has, sharded parameters whole.
    """
    backend, directory, *words = sys.argv[1:]
    os.chdir(directory)
    torch.use_deterministic_algorithms(True)
    make_group(backend)
    torch.manual_seed(0)
    after = read_parameters(train(*words))
    made = type(dist.group.WORLD).__module__
    torch.save({"backend": dist.get_backend(), "module": made, "parameters": after}, f"result.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


def read_parameters(model: nn.Module) -> Parameters:
    """Return copies of a model's parameters by name, whole. Collective where they are sharded."""
    named: dict[str, Any] = {name: each.detach() for name, each in model.named_parameters()}
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).float().clone()
        for name, each in named.items()
    }


def save_start(model: nn.Module) -> None:
    """Save the parameters with which the training begins."""
    torch.save(read_parameters(model), Path(f"start.{dist.get_rank()}"))


def make_tokens(samples: int, length: int, words: int) -> torch.Tensor:
    """Return token numbers [samples, length] in which each word follows from the one before, but for some noise."""
    source = torch.Generator().manual_seed(1)
    first = torch.randint(0, words, (samples, 1), generator=source)
    noise = torch.randint(0, 3, (samples, length), generator=source)
    return (first + 5 * torch.arange(length) + noise) % words
