"""Knobs that are tuned, and their ranges."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ..config import config
from ..config.forms import Bytes, Number, Whole, Words
from ..config.setting import Knob, Setting
from ..native import core

Knobs = dict[str, Any]


def describe_axis(setting: Setting) -> dict[str, Any]:
    """Describe a knob in the tuner's form (autotune/space.py): its search range if it has one, else its whole range."""
    form, knob = setting.parse, setting.knob or Knob()
    if isinstance(form, Words):
        return {"kind": "Choice", "values": list(knob.words or form.words)}
    if not isinstance(form, Bytes | Number | Whole):
        raise TypeError(f"the tuner knows no axis for {setting.name}, which is {form}")
    low, high = knob.low if knob.low is not None else form.low, knob.high if knob.high is not None else form.high
    about = {"kind": "Real" if isinstance(form, Number) else "Integer", "low": low, "high": high, "log": True}
    return about if knob.off is None else about | {"off": knob.off}


KNOBS = {name: describe_axis(setting) for name, setting in config.list_knobs().items()}


# These do not matter for tensors on a GPU: their pieces have a size of their own, and NCCL moves the bytes.
OF_HOST_MEMORY = {
    name for name, setting in config.list_knobs().items() if setting.knob is not None and setting.knob.host
}
NEARLY_ALL = 0.9  # share of bytes on GPUs above which the rest, such as a broadcast model, does not matter


def on_gpus(engine: core.Engine) -> bool:
    """Return whether nearly all bytes that the job reduces are in GPU memory."""
    counted = engine.counters()
    return counted["device_bytes"] >= NEARLY_ALL * counted["bytes"] > 0


def space_of(engine: core.Engine, held: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the knobs that can matter in a job, except those that the user has fixed.

    Whether compression matters is known only after tensors were reduced, and so is whether some of them can travel as
    `fp8`: those with `Compression.tuned8`, on several hosts. The setting `sockets_per_lane` fixes how many
    sockets are opened; the number in use is tuned nevertheless. The algorithm between hosts is not tuned if a chain of
    hosts would change bits of the results. Knobs of host memory are not tuned if tensors are on GPUs.
    """
    left = {name: knob for name, knob in KNOBS.items() if name not in held and name != "sockets_per_lane"}
    if engine.sockets_per_lane > 1:
        left["sockets_per_lane"] = KNOBS["sockets_per_lane"] | {"high": engine.sockets_per_lane}
    if not engine.compressible:
        left.pop("compression", None)
    elif "compression" in left and not engine.codable:
        left["compression"] = left["compression"] | {"values": ["none", "bf16"]}
    if not engine.chainable:
        left.pop("between_hosts", None)
    if on_gpus(engine):
        left = {name: knob for name, knob in left.items() if name not in OF_HOST_MEMORY}
    return left


def format_knobs(knobs: Mapping[str, Any]) -> str:
    """Format knobs for messages."""
    return " ".join(f"{name}={value}" for name, value in knobs.items())


def describe_misfit(name: str, value: Any) -> str:
    """Describe the type that a knob's value must have; return an empty text if it has it, within its range or not."""
    values = KNOBS[name].get("values")
    if values is not None:
        return "" if value in values else f"one of {', '.join(values)}"
    kinds = int if KNOBS[name]["kind"] == "Integer" else int | float
    of_kind = isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < math.inf
    return "" if of_kind else "a whole number" if kinds is int else "a number"


def clamp_knobs(knobs: Mapping[str, Any], space: Mapping[str, Mapping[str, Any]]) -> Knobs:
    """Return the knobs that are in a space, with numbers clamped to its ranges, and without words that it lacks."""
    found = {}
    for name, about in space.items():
        value = knobs.get(name)
        if isinstance(value, int | float) and "low" in about and value != about.get("off"):
            value = min(max(value, about["low"]), about["high"])
        if value is not None and value in about.get("values", (value,)):
            found[name] = value
    return found
