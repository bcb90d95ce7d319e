"""Knobs in force: their fields in a page of counters, and their labels `name` of the gauge `engine_knob`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import config
from ..config.setting import Setting

# Suffixes by a setting's unit: of its name, of the field, of the label; and units of the field in one of the label.
UNITS = {
    "bytes": ("_bytes", "", "_bytes", 1.0),
    "milliseconds": ("_ms", "_ns", "_seconds", 1e9),
    "sockets": ("", "", "", 1.0),
    "": ("", "", "", 1.0),
}


@dataclass(frozen=True)
class Gauge:
    """Names and scale under which a knob is counted."""

    setting: Setting
    field: str  # field of the page, in bytes or nanoseconds, or the number of an enumerated value
    label: str
    per: float  # number of the field's units in one unit of the label


def make_gauges(knobs: Mapping[str, Setting]) -> tuple[Gauge, ...]:
    """Return the gauge of each knob: field and label have the setting's name with the suffix of their own unit."""
    found = []
    for name, setting in knobs.items():
        end, field, label, per = UNITS[setting.unit]
        stem = name.removesuffix(end)
        found.append(Gauge(setting, stem + field, stem + label, per))
    return tuple(found)


GAUGES = make_gauges(config.list_knobs())
