"""NumPy reference for tensors that travel as float16 or bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import Compression

from .operation_table import Array, expected, narrow, scale, widen

MARKERS: dict[str, Any] = {"float16": Compression.fp16, "bfloat16": Compression.bf16}
KINDS = [(dtype, wire) for dtype in ("float32", "float64") for wire in MARKERS]
SCALES = ((1.0, 1.0), (0.3, -1.7))
LENGTHS = (37, 20_011)
MANY = 700_001  # several chunks, the last one odd


def sent(dtype: str, wire: str, values: Array, prescale: float = 1.0) -> Array:
    """Values of a rank in the dtype in which they travel."""
    with np.errstate(all="ignore"):
        return narrow(wire, scale(dtype, values, prescale).astype(np.float32))


def compressed(dtype: str, wire: str, op: str, values: list[Array], pre: float = 1.0, post: float = 1.0) -> Array:
    """Result of a compressed allreduce of one array of each rank."""
    return widen(wire, expected(wire, op, [sent(dtype, wire, each, pre) for each in values], 1.0, post)).astype(dtype)
