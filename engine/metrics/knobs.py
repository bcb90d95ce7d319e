"""The knobs in force: fields of a page of counters, and values of the label `name` of the gauge `engine_knob`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import config
from ..setting import Setting

# By the unit of a setting: the ends of its name, of the field and of the label; field units in one of the label's.
UNITS = {
    "bytes": ("_bytes", "", "_bytes", 1.0),
    "milliseconds": ("_ms", "_ns", "_seconds", 1e9),
    "sockets": ("", "", "", 1.0),
    "": ("", "", "", 1.0),
}


@dataclass(frozen=True)
class Gauge:
    """A knob as it is counted.

    Attributes
    ----------
    setting : Setting
    field : str
        Field of the page: bytes, nanoseconds, or the number of a word.
    label : str
    per : float
        Units of the field in one unit of the label.
    """

    setting: Setting
    field: str
    label: str
    per: float


def gauges(knobs: Mapping[str, Setting]) -> tuple[Gauge, ...]:
    """Of each knob, its gauge: field and label are named as the setting, with their own unit."""
    found = []
    for name, setting in knobs.items():
        end, field, label, per = UNITS[setting.unit]
        stem = name.removesuffix(end)
        found.append(Gauge(setting, stem + field, stem + label, per))
    return tuple(found)


GAUGES = gauges(config.knobs())
