"""What a page says, as people read it."""

from __future__ import annotations

from ...readable import exact
from ..page import CAUSES, COMPRESSIONS, STORES, Snapshot, word


def knobs(page: Snapshot) -> list[tuple[str, str]]:
    """The knobs in force, as options of `enginerun` and their values; none before the first collective."""
    if not page["chunk"]:
        return []
    return [
        ("--fusion-threshold", exact(page["fusion_threshold"])),
        ("--cycle-time-ms", f"{page['cycle_time_ns'] / 1e6:.6g}"),
        ("--stores", word(STORES, page["stores"])),
        ("--chunk-bytes", exact(page["chunk"])),
        ("--compression", word(COMPRESSIONS, page["compression"])),
    ]


def failure(page: Snapshot) -> str:
    """What a failed rank's page says about the cause: `rank 2 died`."""
    who = f"rank {page['culprit'] - 1}" if page["culprit"] else "a rank"
    verbs = dict(zip(CAUSES, ("failed", "died", "raised an error", "left", "stood still"), strict=True))
    return f"{who} {verbs[CAUSES[page['cause']]] if page['cause'] < len(CAUSES) else 'failed'}"
