"""Disagreements of ranks about an operation: what each of them submitted, as their flight records tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..text.readable import format_ranks
from .records import NAME_BYTES, Failure, Flight

CUT = "\N{REPLACEMENT CHARACTER}"  # at the end of a name that is cut within a character
MISMATCH = "MismatchError"  # the error that every rank raises for an operation on which the ranks disagree


@dataclass(frozen=True)
class Disagreement:
    """An operation that failed on every rank, because the ranks submitted different things under its name."""

    entry: int  # sequence of the schedule entry by which it failed
    name: str
    parts: dict[int, dict[str, Any]]  # what each rank submitted: its row of the flight record

    @property
    def groups(self) -> list[list[int]]:
        """Ranks that submitted the same, largest group first; ranks whose call failed are in none."""
        found: dict[str, list[int]] = {}
        for rank, row in sorted(self.parts.items()):
            if not row["failed_call"]:
                found.setdefault(make_signature(row), []).append(rank)
        return sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))

    @property
    def culprits(self) -> set[int]:
        """Ranks at fault: those whose call failed, or those that differ from the most; empty if no group is largest."""
        failed = {rank for rank, row in self.parts.items() if row["failed_call"]}
        groups = self.groups
        if failed or len(groups) < 2 or len(groups[0]) == len(groups[1]):
            return failed
        return {rank for ranks in groups[1:] for rank in ranks}

    def describe(self) -> str:
        """Describe what each group of ranks submitted, the ranks at fault first."""
        failed = sorted(rank for rank, row in self.parts.items() if row["failed_call"])
        if failed:
            return f"the call of {self.name!r} failed on {format_ranks(failed)}, so that no rank could do it"
        groups = self.groups[::-1]
        sent = [f"{format_ranks(ranks)} sent {self.parts[ranks[0]]['described']}" for ranks in groups]
        return f"ranks disagree on {self.name!r}: {', '.join(sent)}"


def make_signature(row: dict[str, Any]) -> str:
    """Return a text that is equal for equal submissions."""
    return repr([row[field] for field in ("kind", "dtype", "dims", "bytes", "described")])


def find_disagreement(flights: dict[int, Flight], blamed: Failure | None) -> Disagreement | None:
    """Return the disagreement for which the world has failed, from the records of one schedule; None if it was none.

    A program may catch the error and go on, so a disagreement only counts if its error ended a rank.
    """
    if blamed is None or blamed.cause != "raised" or MISMATCH not in blamed.message:
        return None
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, flight in flights.items():
        for row in flight.unfinished:
            if row["entry"] is not None:
                found.setdefault(row["entry"], {})[rank] = row
    for parts in found.values():
        name = next(iter(parts.values()))["name"]
        for rank, flight in flights.items():  # the world may have failed before a rank came to the entry
            late = [row for row in (*flight.unfinished, *flight.pending) if row.get("entry") is None]
            mine = [row for row in late if row["name"] == name]
            if rank not in parts and mine:
                parts[rank] = {"failed_call": False, **mine[-1]}
    every = [Disagreement(entry, next(iter(parts.values()))["name"], parts) for entry, parts in found.items()]
    every.sort(key=lambda each: (_is_named(each.name, blamed.message), each.entry))
    return every[-1] if every else None


def _is_named(name: str, message: str) -> bool:
    """Return whether a message has a name in quotes. The records have no more than 191 bytes of it."""
    if len(name.encode(errors="replace")) < NAME_BYTES:
        return f"'{name}'" in message
    return f"'{name.rstrip(CUT)}" in message
