"""Marks of the ranks for tests of TensorFlow's ops, and their count of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import engine

from ..on_ranks import Ranks, spare
from .backends import ENV, on_op_ranks

__all__ = ["ENV", "MODES", "PYTHON", "SIZES", "on_op_ranks", "tensors"]

SIZES = (spare(1), 2, spare(3))
PYTHON = Ranks(2, "python", (("ENGINE_TENSORFLOW_NATIVE", "0"),))
"""Two ranks whose collectives are calls of Python."""

MODES: dict[str, Callable[[Any], Any]] = {"eager": lambda function: function, "function": tf.function}


def tensors() -> int:
    """Return the number of tensors that this rank has reduced or moved so far."""
    return int(engine.counters()["tensors"])
