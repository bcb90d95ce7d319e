"""Text about the contents of a page: knobs, and the cause of a failure."""

from __future__ import annotations

from ...text.readable import format_exact_size
from ..knobs import GAUGES, Gauge
from ..page import Snapshot

# Lists of names, by knob.
_LISTS = {"stores": "stores", "between_hosts": "between_hosts", "compression": "compressions"}


def list_knobs(page: Snapshot) -> list[tuple[str, str]]:
    """Return the knobs in force as options of `enginerun` with their values; none before the first collective.

    A single socket per lane is omitted, as most jobs have no lanes.
    """
    if not any(page[gauge.field] for gauge in GAUGES):
        return []
    shown = [gauge for gauge in GAUGES if gauge.setting.unit != "sockets" or page[gauge.field] > 1]
    return [(gauge.setting.options[0], _format_knob(gauge, page)) for gauge in shown]


def _format_knob(gauge: Gauge, page: Snapshot) -> str:
    """Format a knob's value as its option takes it."""
    if gauge.setting.name in _LISTS:
        return page.get_name(_LISTS[gauge.setting.name], gauge.field)
    value = page[gauge.field]
    if gauge.setting.unit == "sockets":
        return str(value)
    return format_exact_size(value) if gauge.setting.unit == "bytes" else f"{value / 1e6:.6g}"


def describe_failure(page: Snapshot) -> str:
    """Describe the cause of a failure from a failed rank's page, such as `rank 2 died`."""
    who = f"rank {page['culprit'] - 1}" if page["culprit"] else "a rank"
    verbs = {
        "died": "died",
        "raised": "raised an error",
        "left": "left",
        "stalled": "stood still",
        "lost": "cannot be reached",
    }
    return f"{who} {verbs.get(page.get_name('causes', 'cause'), 'failed')}"
