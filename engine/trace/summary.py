"""Summary of a job's timelines: overlap, waiting, and the rank and the tensors that the others wait for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ..text.readable import format_count, format_size
from .reading import STAGES, Recording, Tensor
from .timeline import describe_set

TENSORS = 10
NAME = 34  # characters of a name in a table
GROUP = 14  # characters of them that a group's name takes
SETS_SHOWN = 8
SELDOM = 8  # a name rarer than the most frequent one by this factor does not belong to the steps

Interval = tuple[float, float]


def merge_intervals(intervals: Sequence[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones, in ascending order."""
    joined: list[Interval] = []
    for begun, ended in sorted(intervals):
        if joined and begun <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ended))
        else:
            joined.append((begun, ended))
    return joined


def length(intervals: Sequence[Interval]) -> float:
    """Return the total seconds of disjoint intervals."""
    return sum(ended - begun for begun, ended in intervals)


def measure_overlap(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """Return the seconds common to two ascending lists of disjoint intervals."""
    seconds, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        seconds += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return seconds


def rank_summary(recording: Recording) -> dict[str, Any]:
    """Return the figures of one rank, in seconds.

    They are exact if the file has totals. A process killed in its first second has left none; then the figures cover
    only the recorded events (`exact` is False).
    """
    if recording.totals is not None:
        totals = recording.totals
        wall, busy = (totals["now_ns"] - totals["since_ns"]) / 1e9, totals["busy_ns"] / 1e9
        waited, exposed = totals["wait_ns"] / 1e9, totals["exposed_ns"] / 1e9
        steps, entries, tensors, nbytes = (totals[key] for key in ("steps", "entries", "tensors", "bytes"))
    else:
        moved = [entry for entry in recording.entries.values() if entry.kind != "skip"]
        executing = merge_intervals([(entry.started, entry.ended) for entry in moved])
        waiting = merge_intervals(recording.waits)
        marks = [*executing, *waiting, *recording.steps]
        wall = max(ended for _, ended in marks) - min(begun for begun, _ in marks) if marks else 0.0
        busy, waited, exposed = length(executing), length(waiting), measure_overlap(executing, waiting)
        steps, entries = len(recording.steps), len(moved)
        tensors, nbytes = sum(entry.tensors for entry in moved), sum(entry.nbytes for entry in moved)
    return {
        "rank": recording.rank,
        "exact": recording.totals is not None,
        "seconds": wall,
        "steps": steps,
        # The first recorded step began with the recording, and so contains the start of the program.
        "step": fmean(ended - begun for begun, ended in recording.steps[1:]) if len(recording.steps) > 1 else None,
        "communication": busy,
        "overlapped": 1 - exposed / busy if busy else None,
        "waiting": waited,
        "entries": entries,
        "tensors": tensors,
        "bytes": nbytes,
        "entries_shown": len(recording.entries),
        "dropped": (recording.totals or {}).get("dropped", 0) + (recording.totals or {}).get("left_out", 0),
    }


def compute_lateness(recordings: Sequence[Recording], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return how late each rank was with its tensors.

    A row has the number of tensors that the rank submitted last, the number that it took part in, its mean delay, and
    the total time for which others waited for it. Each tensor counts once, not once per rank. `late` counts each
    moment once, however many tensors were missing then.
    """
    told: dict[tuple[int, int, str], tuple[Tensor, Recording]] = {}
    for recording in recordings:
        for (entry, name), tensor in recording.tensors.items():
            if tensor.last is not None:
                told[recording.number, entry, name] = tensor, recording
    by_rank: dict[int, list[Tensor]] = defaultdict(list)
    counts: Counter[tuple[int, ...]] = Counter()
    for tensor, recording in told.values():
        by_rank[-1 if tensor.last is None else tensor.last].append(tensor)
        counts[recording.ranks] += 1
    shared: Counter[int] = Counter()
    for some, count in counts.items():
        shared.update(dict.fromkeys(some, count))
    return [
        {
            "rank": rank,
            "last": len(by_rank[rank]),
            "of": shared[rank],
            "mean_late": fmean(tensor.late for tensor in by_rank[rank]) if by_rank[rank] else 0.0,
            "late": length(merge_intervals([(tensor.ready - tensor.late, tensor.ready) for tensor in by_rank[rank]])),
        }
        for rank in ranks
    ]


def slowest_tensors(recordings: Sequence[Recording], count: int = TENSORS) -> list[dict[str, Any]]:
    """Return the names with the longest time from a rank's submission to its result: means over ranks, in seconds.

    Names that are not part of a step come last, such as the engine's own comparisons while optimizers are created.
    """
    by_name: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
    for recording in recordings:
        for tensor in recording.tensors.values():
            if tensor.ended:
                by_name[recording.number, tensor.name].append(tensor)
    groups = {recording.number: recording.group for recording in recordings}
    rows: list[dict[str, Any]] = []
    for (number, name), tensors in by_name.items():
        lasts = Counter(tensor.last for tensor in tensors if tensor.last is not None)
        rows.append(
            {
                "name": name,
                "process_set": number,
                "group": groups[number],
                "kind": tensors[0].kind,
                "times": len({tensor.entry for tensor in tensors}),
                "bytes": round(fmean(tensor.nbytes for tensor in tensors)),
                "negotiate": fmean(tensor.ready - tensor.submitted for tensor in tensors),
                "queue": fmean(tensor.started - tensor.ready for tensor in tensors),
                "execute": fmean(tensor.ended - tensor.started for tensor in tensors),
                "late": fmean(tensor.late for tensor in tensors),
                "mostly_last": max(lasts, key=lambda rank: (lasts[rank], -rank)) if lasts else None,
            }
        )
    often = max((row["times"] for row in rows), default=0) / SELDOM

    def by_frequency_then_time(row: dict[str, Any]) -> tuple[bool, float]:
        """Sort key: names of every step first, the longest time first among them and among the others."""
        return row["times"] < often, -(row["execute"] + row["queue"] + row["negotiate"])

    return sorted(rows, key=by_frequency_then_time)[:count]


def compute_stage_shares(recordings: Sequence[Recording]) -> dict[str, float]:
    """Return the shares of the time in recorded entries by stage; `others`: time in which no stage could progress."""
    entries = [entry for recording in recordings for entry in recording.entries.values()]
    total = sum(entry.ended - entry.started for entry in entries)
    if total <= 0:
        return {}
    shares = {stage: sum(entry.stages.get(stage, 0.0) for entry in entries) / total for stage in STAGES.values()}
    return {**shares, "others": max(0.0, 1 - sum(shares.values()))}


def summarize_members(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Return the figures of each rank in one process set, or in the world."""
    late = {row["rank"]: row for row in compute_lateness(recordings, recordings[0].ranks if recordings else ())}
    return [
        {
            **rank_summary(recording),
            "last": late[recording.rank]["last"],
            "of": late[recording.rank]["of"],
            "others_waited": late[recording.rank]["late"],
        }
        for recording in recordings
    ]


def summarize_recordings(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the whole summary, ready for JSON. Times are in seconds, sizes in bytes, shares from 0 to 1.

    `ranks` has each rank's figures in the world, `process_sets` those in each set; the rest covers all of them.
    """
    by_set: dict[int, list[Recording]] = defaultdict(list)
    for recording in recordings:
        by_set[recording.number].append(recording)
    late = compute_lateness(recordings, by_set[0][0].ranks if by_set[0] else ())
    worst = max(late, key=lambda row: float(row["late"]), default=None)
    return {
        "ranks": summarize_members(by_set.pop(0)),
        "process_sets": [
            {
                "id": number,
                "group": some[0].group,
                "ranks": list(some[0].ranks),
                "members": summarize_members(some),
            }
            for number, some in by_set.items()
        ],
        "lateness": late,
        "slowest_rank": worst["rank"] if worst is not None and worst["late"] > 0 else None,
        "stages": compute_stage_shares(recordings),
        "slowest_tensors": slowest_tensors(recordings),
    }


# ---- as text --------------------------------------------------------------------------------------------------------


def _format_share(part: float, whole: float) -> str:
    return f"{100 * part / whole:5.1f} %" if whole else "      -"


def _shorten_name(name: str, width: int) -> str:
    """Shorten a name to one line, cut in the middle: names mostly differ at the end."""
    name = name.encode("unicode_escape").decode() if not name.isprintable() else name
    return name if len(name) <= width else name[:10] + "..." + name[13 - width :]


def _format_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format the table of ranks in one process set, or in the world."""
    lines = ["rank    in entries       overlapped      callers waited       last with   others waited"]
    for row in rows:
        overlapped = "      -" if row["overlapped"] is None else f"{100 * row['overlapped']:5.1f} %"
        lines.append(
            f"{row['rank']:4d} {row['communication']:8.3f} s {_format_share(row['communication'], row['seconds'])} "
            f"{overlapped:>11} {row['waiting']:10.3f} s {_format_share(row['waiting'], row['seconds'])} "
            f"{row['last']:7d} of {row['of']:<6d} {row['others_waited']:9.3f} s" + ("" if row["exact"] else "  (drawn)")
        )
    return lines


def format_summary(figures: dict[str, Any]) -> str:
    """Format the figures of `summarize_recordings` as tables, at most 100 columns wide."""
    ranks, size = figures["ranks"], len(figures["lateness"])
    seconds, steps = max(row["seconds"] for row in ranks), max(row["steps"] for row in ranks)
    head = f"{format_count(len(ranks), 'rank')}, {seconds:.2f} s"
    if steps:
        lengths = [row["step"] for row in ranks if row["step"] is not None]
        mean = f" of {1e3 * fmean(lengths):.2f} ms in the mean" if lengths else ""
        head += f", {format_count(steps, 'step')}{mean}"
    if len(ranks) < size:
        head += f" (of a job of {size} ranks)"
    lines = [head, "", *_format_table(ranks)]
    sets = [each for each in figures["process_sets"] if any(row["entries"] for row in each["members"])]
    busiest = sorted(sets, key=lambda each: -max(float(row["communication"]) for row in each["members"]))[:SETS_SHOWN]
    for each in sorted(busiest, key=lambda each: int(each["id"])):
        lines += ["", describe_set(each["ranks"], each["id"], each["group"]), *_format_table(each["members"])]
    if len(sets) > SETS_SHOWN:
        lines += ["", f"and {len(sets) - SETS_SHOWN} process sets in which less was done, with --json"]
    lines += ["", _format_slowest_rank(figures)]
    everywhere = [ranks, *(each["members"] for each in figures["process_sets"])]
    entries, tensors, nbytes, shown = (
        sum(rows[0][key] for rows in everywhere) for key in ("entries", "tensors", "bytes", "entries_shown")
    )
    if entries:
        lines.append(
            f"fusion: {tensors} tensors in {entries} entries, {tensors / entries:.1f} and "
            f"{format_size(nbytes / entries)} in each; {shown} entries are recorded"
        )
    if figures["stages"]:
        shares = {name: f"{100 * share:.0f} %" for name, share in figures["stages"].items()}
        lines.append(
            f"time in entries: fuse {shares['fuse']}, reduce {shares['reduce']}, unpack {shares['unpack']}, "
            f"waiting for other ranks {shares['others']}"
        )
    if figures["slowest_tensors"]:
        lines += ["", "slowest tensors, in ms, mean over ranks and times"]
        lines.append(f"{'name':<{NAME}} {'bytes':>10} {'times':>5} {'negotiate':>9} {'late by':>8} {'last':>4} "
                     f"{'queue':>8} {'execute':>8}")  # fmt: skip
        for row in figures["slowest_tensors"]:
            last = "-" if row["mostly_last"] is None else str(row["mostly_last"])
            negotiate, late_by, queue, execute = (1e3 * row[key] for key in ("negotiate", "late", "queue", "execute"))
            set_name = _shorten_name(row["group"], GROUP) or f"set {row['process_set']}"
            where = f" ({set_name})" if row["process_set"] else ""
            lines.append(
                f"{_shorten_name(row['name'], NAME - len(where)) + where:<{NAME}} {format_size(row['bytes']):>10} "
                f"{row['times']:5d} {negotiate:9.3f} {late_by:8.3f} {last:>4} {queue:8.3f} {execute:8.3f}"
            )
    dropped = sum(row["dropped"] for rows in everywhere for row in rows)
    if dropped:
        lines += ["", f"{dropped} records are missing: the disk was too slow, or the file had reached its limit"]
    return "\n".join(lines)


def _format_slowest_rank(figures: dict[str, Any]) -> str:
    worst = figures["slowest_rank"]
    if worst is None:
        return "slowest rank: not known, for no tensor is recorded with who was last (rank 0 has to record too)"
    row = figures["lateness"][worst]
    mean = 1e3 * row["mean_late"]
    return (
        f"slowest rank: {worst}, last with {row['last']} of {row['of']} tensors, {mean:.3f} ms after the first (mean); "
        f"{row['late']:.3f} s in all"
    )
