"""Data for the tuner's model of the transport: recent batches, and their spread over a step."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def summarize_traffic(history: Iterable[Mapping[str, Any]], ends: Sequence[float]) -> dict[str, Any]:
    """Return sizes and times of recent batches, and the spread of batches over a step.

    `history` comes from `core.Engine.history`. `ends` are the times at which steps ended, in seconds of the same clock,
    ascending. The result's `batches` are bytes and seconds of each allreduce. Its `arriving` is the time in seconds
    from the start of a step's first batch to the start of its last. This is the median over steps; None if no step had
    more than one batch.
    """
    rows = [
        row
        for row in history
        if row["type"] == "batch" and row["kind"] == "allreduce" and row["ended"] is not None and row["bytes"]
    ]
    spans = []
    for begin, end in itertools.pairwise(ends):
        started = [row["started"] for row in rows if begin < row["started"] <= end]
        if len(started) > 1:
            spans.append(max(started) - min(started))
    return {
        "batches": [[row["bytes"], row["ended"] - row["started"]] for row in rows],
        "arriving": statistics.median(spans) if spans else None,
    }
