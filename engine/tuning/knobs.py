"""The knobs that are tuned, and their ranges."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ..native import core

Knobs = dict[str, Any]

# As the tuner describes a space (autotune/space.py).
KNOBS: dict[str, dict[str, Any]] = {
    "fusion_threshold": {"kind": "Integer", "low": 1 << 16, "high": 1 << 30, "log": True},
    "cycle_time_ms": {"kind": "Real", "low": 0.05, "high": 50.0, "log": True, "off": 0.0},
    "stores": {"kind": "Choice", "values": ["auto", "cached", "streaming"]},
    "chunk_bytes": {"kind": "Integer", "low": 1 << 12, "high": 1 << 20, "log": True},
    "compression": {"kind": "Choice", "values": ["none", "bf16"]},  # fp16 overflows: a user may choose it, not we
}


def space_of(engine: core.Engine, held: Collection[str]) -> dict[str, dict[str, Any]]:
    """Those of the knobs that can matter in a job, but for those that the user holds.

    Whether compression does is known only when tensors have been reduced.
    """
    left = {name: knob for name, knob in KNOBS.items() if name not in held}
    if not engine.compressible:
        left.pop("compression", None)
    return left


def words(knobs: Mapping[str, Any]) -> str:
    """Knobs for people."""
    return " ".join(f"{name}={value}" for name, value in knobs.items())


def misfit(name: str, value: Any) -> str:
    """What the value of a knob has to be, if this is of another kind. Empty: it is of that kind, in range or not."""
    values = KNOBS[name].get("values")
    if values is not None:
        return "" if value in values else f"one of {', '.join(values)}"
    kinds = int if KNOBS[name]["kind"] == "Integer" else int | float
    of_kind = isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < math.inf
    return "" if of_kind else "a whole number" if kinds is int else "a number"


def within(knobs: Mapping[str, Any], space: Mapping[str, Mapping[str, Any]]) -> Knobs:
    """Those of the knobs that are in a space, numbers moved into its ranges."""
    found = {}
    for name, about in space.items():
        value = knobs.get(name)
        if isinstance(value, int | float) and "low" in about and value != about.get("off"):
            value = min(max(value, about["low"]), about["high"])
        if value is not None:
            found[name] = value
    return found
