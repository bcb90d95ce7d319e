"""Contents of a page in words: knobs, and the cause of a failure."""

from __future__ import annotations

from ...readable import exact
from ..knobs import GAUGES, Gauge
from ..page import CAUSES, WORDS, Snapshot, word


def knobs(page: Snapshot) -> list[tuple[str, str]]:
    """The knobs in force, as options of `enginerun` and their values; none before the first collective."""
    if not any(page[gauge.field] for gauge in GAUGES):
        return []
    return [(gauge.setting.options[0], _knob(gauge, page[gauge.field])) for gauge in GAUGES]


def _knob(gauge: Gauge, value: int) -> str:
    """A knob as its option takes it."""
    if gauge.setting.name in WORDS:
        return word(WORDS[gauge.setting.name], value)
    return exact(value) if gauge.setting.unit == "bytes" else f"{value / 1e6:.6g}"


def failure(page: Snapshot) -> str:
    """The cause of a failure, by a failed rank's page: `rank 2 died`."""
    who = f"rank {page['culprit'] - 1}" if page["culprit"] else "a rank"
    verbs = dict(zip(CAUSES, ("failed", "died", "raised an error", "left", "stood still"), strict=True))
    return f"{who} {verbs[CAUSES[page['cause']]] if page['cause'] < len(CAUSES) else 'failed'}"
