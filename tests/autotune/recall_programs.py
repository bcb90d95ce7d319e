"""Programs of ranks for the tests of recalled results: several searches that have something to find."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

import engine

from . import tuned_programs
from .tuned_programs import native_mark, steps_until, tuner


def searches(home: str, models: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Search to the end for each model, given by tensors' lengths, and return the knobs that each search deployed."""
    tuned_programs.SLOW = 0.03
    ranks, found = int(os.environ["WORLD_SIZE"]), []
    for number, lengths in enumerate(models):
        engine.init(autotune_log=f"{home}/{ranks}.{number}.jsonl", autotune_warmup=3)
        # Names and their order do not identify a model, nor do unnamed tensors or tensors outside of steps.
        tensors = {f"{number}.{k}": np.ones(length, np.float32) for k, length in enumerate(lengths)}
        engine.allreduce(np.ones(99 + number), name=f"once{number}")

        def mark(tensors: dict[str, Any] = tensors) -> None:
            engine.allreduce(np.ones(7))
            for name, tensor in tensors.items():
                engine.allreduce(tensor, name=name)
            native_mark()

        steps_until(lambda: not tuner().searching, mark)
        others = {"version", "entry", "between_hosts", "compression", "sockets_per_lane"}  # none is tuned
        found.append({name: value for name, value in engine.knobs().items() if name not in others})
        engine.shutdown()
    return found
