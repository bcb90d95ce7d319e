"""How tests of TensorFlow's ops mark their ranks, and what they count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import engine

from ..on_ranks import Ranks, on_ranks

# One thread between ops: whatever blocks it blocks the program.
ENV = {
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
}
PYTHON = Ranks(2, "python", (("ENGINE_TENSORFLOW_NATIVE", "0"),))
"""Two ranks whose collectives are calls of Python."""


def on_op_ranks(*ranks: int | Ranks) -> pytest.MarkDecorator:
    """Mark tests of the ops, which share jobs."""
    return on_ranks(*ranks, env=ENV, job="tensorflow-ops")


MODES: dict[str, Callable[[Any], Any]] = {"eager": lambda function: function, "function": tf.function}


def tensors() -> int:
    """How many tensors this rank has reduced or moved so far."""
    return int(engine.counters()["tensors"])
