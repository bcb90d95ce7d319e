"""Merging of a job's flight records: the first cause, each rank's last actions, and which ranks block others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..text.readable import format_members, format_ranks
from .disagreements import Disagreement, find_disagreement
from .records import CLOCK, NAME_BYTES, Failure, Flight, Members, collect

PENDING_SHOWN = 8
SETS_SHOWN = 8  # maximum number of process sets shown of a rank: those with the latest activity
HISTORY_NAME = 63  # bytes of a name in the history
STANDSTILL = 1.0  # seconds in an entry from which a rank counts as stopped


def _has_or_have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _wait(ranks: Sequence[int], everybody: Sequence[int]) -> str:
    """Describe the ranks that wait for `ranks`: all others."""
    others = [rank for rank in everybody if rank not in ranks]
    return f"{format_ranks(others)} wait{'s' * (len(others) == 1)} for it" if others else "nobody is left to wait"


def entry_name(row: dict[str, Any]) -> str:
    """Format an entry, such as `entry 381 'layer.3.weight' (allreduce)`."""
    more = f" and {row['tensors'] - 1} more" if row["tensors"] > 1 else ""
    kind = row["kind"] if row["type"] == "batch" else row["type"]
    return f"entry {row['entry']} {row['name']!r}{more} ({kind})"


def missing_ranks(flights: dict[int, Flight], everybody: Sequence[int]) -> dict[str, list[int]]:
    """Return, by name, the ranks that have not submitted an operation, the longest wait first.

    A rank that knows the missing ranks has them in its record. For a new name only the coordinator knows them. Then
    ranks whose own records do not have it in flight count as missing, as far as the records' times agree. If all
    records have it, those of `everybody` without a record are missing: otherwise it would be in an entry.
    """
    found: dict[str, list[int]] = {}
    holders = _find_holders(flights)
    each = [(entry["seconds"], entry) for flight in flights.values() for entry in flight.pending]
    for _, entry in sorted(each, key=lambda pair: -pair[0]):
        name = entry["name"]
        if entry["missing"] is not None:
            found[name] = sorted({*found.get(name, []), *entry["missing"]})
        elif name not in found:
            found[name] = sorted(set(flights) - holders[name] or set(everybody) - holders[name])
    return found


def _find_holders(flights: dict[int, Flight]) -> dict[str, set[int]]:
    """Return the ranks that have each operation in flight, by its name."""
    found: dict[str, set[int]] = {}
    for rank, flight in flights.items():
        for each in flight.pending:
            found.setdefault(each["name"], set()).add(rank)
    return found


def stuck_in_entry(flights: dict[int, Flight]) -> tuple[list[int], int, dict[str, Any] | None, float] | None:
    """Find the ranks that block the others in an entry.

    Returns the ranks, the entry's number, its row if a record has it, and the seconds for which it has been in
    progress. The positions of all ranks come from the newest record whose own rank is in an entry; this includes ranks
    without a record.
    """
    inside = [flight for flight in flights.values() if flight.current is not None]
    if not inside:
        return None
    number = min(flight.history[-1]["entry"] for flight in inside)
    slowest = [flight for flight in inside if flight.history[-1]["entry"] == number]
    row = slowest[0].current
    seconds = max((flight.monotonic or 0.0) - flight.history[-1]["started"] for flight in slowest)
    teller = max((flight for flight in inside if flight.ranks), key=lambda flight: flight.time, default=None)
    if teller is None:
        return [], number, row, seconds
    done = float("inf")
    at = {each["rank"]: (done if each["entry"] is None else each["entry"], each["passed"]) for each in teller.ranks}
    least = min(at.values())
    behind = sorted(rank for rank, place in at.items() if place == least)
    return (behind if len(behind) < len(at) else []), number, row, seconds


def _describe_state(ranks: list[int], blamed: Failure | None, seconds: float) -> str:
    """Describe the state of the ranks that others wait for in an entry."""
    if blamed is not None and blamed.rank in ranks:
        fates = {"died": "died", "raised": "failed", "left": "left", "lost": "cannot be reached"}
        return fates.get(blamed.cause, "stopped")
    return "stopped" if seconds >= STANDSTILL else f"{'is' if len(ranks) == 1 else 'are'} the last"


@dataclass
class Standstill:
    """Reason why one schedule, the world's or a process set's, does not progress."""

    culprits: set[int]  # ranks that the others wait for; empty if no rank is behind the others
    waiting: set[int]  # other ranks that have an operation in flight
    line: str  # description in words


def find_standstill(
    flights: dict[int, Flight], blamed: Failure | None, everybody: Sequence[int], where: str = ""
) -> Standstill | None:
    """Find the ranks that block `everybody` in one schedule; None if no rank does. `where` names the schedule."""
    busy = {rank for rank, flight in flights.items() if flight.pending or flight.current is not None}
    stuck = stuck_in_entry(flights)
    if stuck is not None:
        ranks, number, row, seconds = stuck
        ranks = ranks or ([blamed.rank] if blamed is not None and blamed.rank in everybody else [])
        what = (entry_name(row) if row is not None else f"entry {number}") + where
        if not ranks:
            return Standstill(set(), busy, f"all ranks are in {what}; none is behind the others")
        line = f"{format_ranks(ranks)} {_describe_state(ranks, blamed, seconds)} in {what}; {_wait(ranks, everybody)}"
        return Standstill(set(ranks), busy - set(ranks), line)
    missing = {name: ranks for name, ranks in missing_ranks(flights, everybody).items() if ranks}
    if missing:
        # Prefer what the blamed rank lacks, or else the longest wait: a rank may lack a later tensor because it waits
        # itself.
        name, ranks = next(
            ((name, ranks) for name, ranks in missing.items() if blamed is not None and blamed.rank in ranks),
            next(iter(missing.items())),
        )
        name, ranks = _break_circle(flights, missing, name)
        more = sum(ranks == other for other in missing.values()) - 1
        what = f"{name!r}" + (f" and {more} more" if more else "") + where
        line = f"{format_ranks(ranks)} {_has_or_have(ranks)} not submitted {what}; {_wait(ranks, everybody)}"
        return Standstill(set(ranks), busy - set(ranks), line)
    return None


def _break_circle(flights: dict[int, Flight], missing: dict[str, list[int]], name: str) -> tuple[str, list[int]]:
    """Return the operation that fewer ranks lack, if ranks that lack `name` wait for ranks that wait for `name`.

    Ranks that call different operations hold each other up, and the few are more likely to be wrong than the many.
    """
    ranks = missing[name]
    holders = _find_holders(flights)
    for other, lacking in missing.items():
        if len(lacking) < len(ranks) and holders[other] >= set(ranks) and holders[name] >= set(lacking):
            return other, lacking
    return name, ranks


def add_waits(flights: dict[int, Flight]) -> dict[int, Flight]:
    """Return records in which operations that failed with the world are pending, as they were before.

    Operations of an entry in progress are left out, as the history has its row. So are those that other ranks have
    executed and this one had yet to: nobody had to submit them any more.
    """
    with_sets: dict[int, dict[Members, Flight]] = {rank: {} for rank in flights}
    for members, each in sets_of(flights).items():
        for rank, told in _add_waits_of_schedule(each).items():
            with_sets[rank][members] = told
    return {rank: replace(told, sets=with_sets[rank]) for rank, told in _add_waits_of_schedule(flights).items()}


def _add_waits_of_schedule(flights: dict[int, Flight]) -> dict[int, Flight]:
    found = {}
    for rank, flight in flights.items():
        last, now = flight.history[-1]["entry"] if flight.history else -1, flight.monotonic or 0.0
        every = flights.values() if flight.unfinished else ()
        ahead = [row for each in every for row in each.history if row["entry"] > last]
        names, fused = {row["name"] for row in ahead}, any(row["tensors"] > 1 for row in ahead)
        failed = [
            {**row, "seconds": row["ended"] - row["submitted"], "missing": None}
            for row in flight.unfinished
            if row["entry"] is None
            and not row["failed_call"]
            and not fused
            and _cut_name(row["name"], HISTORY_NAME) not in names
        ]
        pending = [
            {"submitted": now - row["seconds"], **row, "name": _cut_name(row["name"])}
            for row in [*flight.pending, *failed]
            if not row["begun"]
        ]
        found[rank] = replace(flight, pending=pending)
    return found


def _cut_name(name: str, nbytes: int = NAME_BYTES) -> str:
    return name.encode(errors="replace")[:nbytes].decode(errors="replace")


def sets_of(flights: dict[int, Flight]) -> dict[Members, dict[int, Flight]]:
    """Return the records of each process set, by its name and ranks, then by rank."""
    found: dict[Members, dict[int, Flight]] = {}
    for rank, flight in flights.items():
        for members, told in flight.sets.items():
            found.setdefault(members, {})[rank] = told
    return found


def find_cause(
    flights: dict[int, Flight], blamed: Failure | None, size: int
) -> tuple[Members | None, Standstill | Disagreement] | None:
    """Find what keeps a job from going on, and the process set in which it is so; None for the set means the world.

    A rank that others wait for in the world may itself wait in a process set, or the reverse. Then the cause is the
    rank that is waited for there.
    """
    schedules: list[tuple[Members | None, dict[int, Flight]]] = [(None, flights), *sets_of(flights).items()]
    for members, each in schedules:
        disagreement = find_disagreement(each, blamed)
        if disagreement is not None:
            return members, disagreement
    found = [
        (members, find_standstill(each, blamed, members[1] if members else range(size), format_place(members)))
        for members, each in schedules
    ]
    # A stall is blamed by who waits for whom. Other causes are certain: they hold up whoever lacks something else.
    certain = {blamed.rank} if blamed is not None and blamed.cause != "stalled" else set()
    stills = [
        (members, still)
        for members, still in found
        if still is not None and (not still.culprits or certain <= still.culprits)
    ]

    def make_sort_key(found: tuple[Members | None, Standstill]) -> tuple[bool, bool, bool]:
        still = found[1]
        held = any(still.culprits & other.waiting for _, other in stills if other is not still)
        return not still.culprits, blamed is not None and blamed.rank not in still.culprits, held

    return min(stills, key=make_sort_key) if stills else None


def describe_cause(flights: dict[int, Flight], failures: Sequence[Failure], size: int) -> tuple[str, list[int]]:
    """Describe in one line the rank that blocks the others, and who waits for it; also return the ranks at fault."""
    blamed = failures[0] if failures else None
    found = find_cause(add_waits(flights), blamed, size)
    if found is not None:
        members, cause = found
        line = cause.describe() + format_place(members) if isinstance(cause, Disagreement) else cause.line
        return line, sorted(cause.culprits)
    if blamed is not None:
        return blamed.message, [blamed.rank]
    return "no rank stands still: nothing waits for another rank in these records", []


def format_place(members: Members | None) -> str:
    """Format the process set of an operation, with a blank before it; empty for the world."""
    return "" if members is None else f" {format_members(members[1], members[0])}"


def make_report(directory: Path) -> tuple[str, dict[str, Any]]:
    """Report on a job's directory, as text and as a dictionary for JSON.

    Raises FileNotFoundError if there is no record of any rank.
    """
    flights, failures, notes = collect(directory)
    if not flights and not failures:
        detail = "".join(f"\n  {note}" for note in notes)
        raise FileNotFoundError(
            f"{directory}: no rank.N/flight.json or rank.N/failure.json that can be read; give the directory that has "
            f"rank.N{detail}"
        )
    sizes = [flight.size for flight in flights.values()]
    named = [*(failure.rank for failure in failures), *(failure.reporter for failure in failures), *flights]
    size = max([*sizes, max(named) + 1])
    lines = []
    if failures:
        first = failures[0]
        told = sorted({failure.reporter for failure in failures if failure.rank == first.rank})
        lines += [
            f"first cause: {first.message}",
            f"  told by {format_ranks(told)}, first at {_format_time(first.time)}",
        ]
        other = [failure for failure in failures if failure.rank != first.rank]
        lines += [f"  rank {failure.reporter} says: {failure.message}" for failure in other]
        lines.append("")
    absent = missing_ranks(flights, range(size))
    in_sets = {members: missing_ranks(each, members[1]) for members, each in sets_of(flights).items()}
    for rank in range(size):
        if rank in flights:
            lines += [
                f"rank {rank} ({flights[rank].reason}, {_format_time(flights[rank].time)}): "
                + _describe_last_entry(flights[rank])
            ]
            lines += _describe_waits(flights[rank], absent)
            lines += _set_lines(flights[rank], in_sets)
        else:
            lines.append(f"rank {rank}: no flight record")
    conclusion, culprits = describe_cause(flights, failures, size)
    lines += ["", *(f"note: {note}" for note in notes), f"verdict: {conclusion}"]
    data = {
        "size": size,
        "verdict": conclusion,
        "culprits": culprits,
        "failures": [failure.__dict__ for failure in failures],
        "ranks": {
            rank: {
                "time": flight.time,
                "reason": flight.reason,
                **_to_json(flight, absent),
                "process_sets": [
                    {"group": members[0], "ranks": list(members[1]), **_to_json(told, in_sets[members])}
                    for members, told in flight.sets.items()
                ],
            }
            for rank, flight in sorted(flights.items())
        },
        "without_record": [rank for rank in range(size) if rank not in flights],
        "notes": notes,
    }
    return "\n".join(lines), data


def _format_time(time: float) -> str:
    return datetime.fromtimestamp(min(max(time, CLOCK[0]), CLOCK[1])).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _to_json(flight: Flight, absent: dict[str, list[int]]) -> dict[str, Any]:
    return {
        "finished": flight.finished,
        "current": flight.current,
        "pending": [{**each, "missing": absent.get(each["name"])} for each in flight.pending],
    }


def _describe_last_entry(flight: Flight) -> str:
    """Describe the last entry that a rank has finished, and the entry that it is in."""
    finished, current = flight.finished, flight.current
    text = "finished nothing" if finished is None else f"finished {entry_name(finished)}"
    if finished is not None and current is None:
        text += flight.format_wait(finished["ended"]).replace(" for", "") + " before" * (flight.monotonic is not None)
    if current is not None:
        text += f"; in {entry_name(current)}{flight.format_wait(current['started'])}"
    return text


def _describe_waits(flight: Flight, absent: dict[str, list[int]]) -> list[str]:
    """Describe the tensors that a rank waits for, and the ranks that have not submitted them."""
    lines = []
    for each in flight.pending[:PENDING_SHOWN]:
        ranks = absent.get(each["name"], [])
        who = f"{format_ranks(ranks)} {_has_or_have(ranks)} not submitted it" if ranks else "all have submitted it"
        lines.append(f"  waits for {each['name']!r} ({each['kind']}) for {each['seconds']:.1f} s: {who}")
    if len(flight.pending) > PENDING_SHOWN:
        lines.append(f"  and for {len(flight.pending) - PENDING_SHOWN} more")
    return lines


def _set_lines(flight: Flight, absent: dict[Members, dict[str, list[int]]]) -> list[str]:
    """Describe the same for the process sets of a rank."""

    def get_last_activity(told: Flight) -> tuple[bool, float]:
        return bool(told.pending), told.history[-1]["started"] if told.history else 0.0

    lines = []
    used = sorted(
        (item for item in flight.sets.items() if item[1].pending or item[1].history),
        key=lambda i: get_last_activity(i[1]),
    )
    for members, told in reversed(used[-SETS_SHOWN:]):
        lines.append(f" {format_place(members)}: {_describe_last_entry(told)}")
        lines += [f"  {line}" for line in _describe_waits(told, absent[members])]
    if len(used) > SETS_SHOWN:
        lines.append(f"  and {len(used) - SETS_SHOWN} process sets more")
    return lines
