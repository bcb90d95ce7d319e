"""Steps of ranks, as their pages remember them, for spans of OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from ...otlp.records import CollectiveRecord, StepRecord
from .. import page
from ..page import PageError, Snapshot
from .rank_pages import Member

PAUSE = 1.0  # seconds between two reads; a rank's page has its last 32 steps
READ_RATE = 64  # maximum number of pages read a second


class StepReader:
    """Reader of the steps that ranks have ended since it was last called."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._last: dict[tuple[str, int], int] = {}  # number of the last step read, by host and process

    def read(self) -> tuple[list[StepRecord], int]:
        """Return the steps of all ranks since the last call, and the number of ranks that are up and make steps."""
        up = 0
        offset = time.time_ns() - time.monotonic_ns()
        found = []
        for member in list(self._members):
            try:
                source = member.source()
                snapshot = None if source is None else page.read(source)
            except PageError:
                continue  # the exporter of metrics tells
            if snapshot is not None:  # also of a rank that has ended since
                found += self._read_rank(member.rank, snapshot, offset)
                up += bool(snapshot.logged_steps) and member.up(snapshot)
        return found, up

    def choose_pause(self) -> float:
        """Return the seconds until the next read, so that many ranks' pages take little of a processor."""
        return max(PAUSE, len(self._members) / READ_RATE)

    def _read_rank(self, rank: int, snapshot: Snapshot, offset: int) -> list[StepRecord]:
        steps = snapshot.logged_steps
        if not steps:
            return []
        process = snapshot.host, snapshot["pid"]
        last = self._last.get(process, -1)
        self._last[process] = steps[-1].number
        before = {b.number: a for a, b in pairwise(steps) if b.number == a.number + 1}
        entries = snapshot.logged_entries
        found = []
        for step in steps:
            if step.number <= last:
                continue
            former = before.get(step.number)
            inside = [
                CollectiveRecord(each.begun + offset, each.ended + offset, each.nbytes, each.operation, each.algorithm)
                for each in entries
                if step.begun <= each.begun < step.ended
            ]
            found.append(
                StepRecord(
                    rank,
                    step.number,
                    step.begun + offset,
                    step.ended + offset,
                    None if former is None else (step.blocked - former.blocked) / 1e9,
                    None if former is None else (step.exposed - former.exposed) / 1e9,
                    inside,
                )
            )
        return found
