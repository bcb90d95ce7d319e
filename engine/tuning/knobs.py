"""The knobs that are tuned, and their ranges."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from .. import config
from ..forms import Bytes, Number, Whole, Words
from ..native import core
from ..setting import Knob, Setting

Knobs = dict[str, Any]


def axis(setting: Setting) -> dict[str, Any]:
    """A knob as the tuner describes it (autotune/space.py): its search range, or else its whole range."""
    form, knob = setting.parse, setting.knob or Knob()
    if isinstance(form, Words):
        return {"kind": "Choice", "values": list(knob.words or form.words)}
    if not isinstance(form, Bytes | Number | Whole):
        raise TypeError(f"the tuner knows no axis for {setting.name}, which is {form}")
    low, high = knob.low if knob.low is not None else form.low, knob.high if knob.high is not None else form.high
    about = {"kind": "Real" if isinstance(form, Number) else "Integer", "low": low, "high": high, "log": True}
    return about if knob.off is None else about | {"off": knob.off}


KNOBS = {name: axis(setting) for name, setting in config.knobs().items()}


# Tensors on a GPU go in pieces of a size of their own, and NCCL moves the bytes.
OF_HOST_MEMORY = {name for name, setting in config.knobs().items() if setting.knob is not None and setting.knob.host}
NEARLY_ALL = 0.9  # share of the bytes on GPUs from which the rest, such as a model that was broadcast, does not matter


def on_gpus(engine: core.Engine) -> bool:
    """Whether nearly all that the job reduces is in the memory of GPUs."""
    counted = engine.counters()
    return counted["device_bytes"] >= NEARLY_ALL * counted["bytes"] > 0


def space_of(engine: core.Engine, held: Collection[str]) -> dict[str, dict[str, Any]]:
    """Those of the knobs that can matter in a job, but for those that the user holds.

    Whether compression does is known only when tensors have been reduced. Whoever sets `sockets_per_lane` says how many
    are opened; how many of them are used is tuned all the same.
    Where a chain of hosts would change bits, the tuner leaves the way between hosts alone. Where tensors are on GPUs,
    it leaves alone what is about host memory.
    """
    left = {name: knob for name, knob in KNOBS.items() if name not in held and name != "sockets_per_lane"}
    if engine.sockets_per_lane > 1:
        left["sockets_per_lane"] = KNOBS["sockets_per_lane"] | {"high": engine.sockets_per_lane}
    if not engine.compressible:
        left.pop("compression", None)
    if not engine.chainable:
        left.pop("between_hosts", None)
    if on_gpus(engine):
        left = {name: knob for name, knob in left.items() if name not in OF_HOST_MEMORY}
    return left


def words(knobs: Mapping[str, Any]) -> str:
    """Knobs for people."""
    return " ".join(f"{name}={value}" for name, value in knobs.items())


def misfit(name: str, value: Any) -> str:
    """The kind that a knob's value must have, if this one has another; empty: it has that kind, in range or not."""
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
