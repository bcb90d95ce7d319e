"""Requirements of the engine compared with measurements: medians at 2 ranks, ratios within one run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import stats
from benchmarks.common.tables import MISSING, Table, format_digits, format_duration, format_size
from benchmarks.training.report import TITLES, compute_ratio_to_peer

KIB, MIB = 1 << 10, 1 << 20
RANKS = 2


@dataclass(frozen=True)
class Requirement:
    """One requirement. `ratio` is the measured value divided by the allowed one: at most 1 passes."""

    work: str
    measured: str
    allowed: str
    ratio: float
    interval: str = MISSING

    def format_cells(self) -> list[str]:
        """Return the requirement as a row."""
        return [
            self.work,
            self.measured,
            self.allowed,
            format_digits(self.ratio),
            self.interval,
            "pass" if self.ratio <= 1 else "miss",
        ]


def build_table(collective: dict[str, Any] | None, training: dict[str, Any] | None) -> Table:
    """Return a row for each requirement with measurements."""
    found = Table(
        f"What it must reach ({RANKS} ranks, medians)",
        ["work", "measured", "at most", "measured / allowed", "95 % interval", "result"],
        left=("result",),
    )
    lines: list[Requirement] = []
    if collective:
        lines += itertools.chain(_check_limits(collective), _check_against_gloo(collective), _check_latency(collective))
        lines += itertools.chain(_check_calls(collective), _check_idle(collective))
    if training:
        lines += _check_training(training)
    found.rows = [line.format_cells() for line in lines]
    return found


def _find_row(content: dict[str, Any], contender: str, case: str, nbytes: int) -> dict[str, Any] | None:
    key = (RANKS, False, contender, case, nbytes)
    for row in content["sizes"]:
        if (row["ranks"], row["busy"], row["contender"], row["case"], row["bytes"]) == key:
            found: dict[str, Any] = row
            return found
    return None


def compare_rows(
    work: str, ours: dict[str, Any] | None, base: dict[str, Any] | None, factor: float, of: str
) -> Iterator[Requirement]:
    """Yield the requirement that `ours` take at most `factor` times as long as `base`, if both were measured."""
    if ours is None or base is None:
        return
    interval = stats.estimate_ratio(ours["round_medians"], base["round_medians"])
    yield Requirement(
        work,
        format_duration(ours["median"]),
        f"{format_duration(base['median'] * factor)} ({factor:.3g} x {of})",
        ours["median"] / base["median"] / factor,
        f"[{format_digits(interval.low / factor)}, {format_digits(interval.high / factor)}]",
    )


def _check_limits(content: dict[str, Any]) -> Iterator[Requirement]:
    nbytes = 100 * MIB
    rows = [
        row for case in ("private_cached", "private_streaming") if (row := _find_row(content, "limits", case, nbytes))
    ]
    best = min(rows, key=lambda row: float(row["median"]), default=None)
    name = f"limit, {best['case'].removeprefix('private_')} stores" if best else ""
    yield from compare_rows(
        "allreduce, 100 MiB, private", _find_row(content, "engine", "private", nbytes), best, 1.25, name
    )
    live = _find_row(content, "limits", "in_segment", nbytes)
    yield from compare_rows(
        "allreduce, 100 MiB, in segment", _find_row(content, "engine", "shared", nbytes), live, 1.25, "limit"
    )


def _check_against_gloo(content: dict[str, Any]) -> Iterator[Requirement]:
    for nbytes in (16 * MIB, 100 * MIB):
        ours, gloo = _find_row(content, "engine", "private", nbytes), _find_row(content, "gloo", "private", nbytes)
        yield from compare_rows(f"allreduce, {format_size(nbytes)}, private", ours, gloo, 0.25, "gloo")


def _check_latency(content: dict[str, Any]) -> Iterator[Requirement]:
    ours = _find_row(content, "engine", "private", 4 * KIB)
    if ours is not None:
        yield _compare_with_limit("blocking allreduce, 4 KiB", ours["median"], 12e-6, ours["round_medians"])
    yield from compare_rows(
        "blocking allreduce, 4 KiB", ours, _find_row(content, "mpi", "private", 4 * KIB), 4, "Open MPI"
    )


def _check_calls(content: dict[str, Any]) -> Iterator[Requirement]:
    for what, title, most in (
        ("hook", "caller's time in the gradient hook", 1.5e-6),
        ("call", "public async call, in place", 3e-6),
        ("call_new", "public async call, new tensor", 3e-6),
    ):
        rows = [row for row in content["calls"] if row["what"] == what and row["ranks"] == RANKS]
        if rows:
            slower = max(rows, key=lambda row: float(row["median"]))
            yield _compare_with_limit(f"{title}, the slower rank", slower["median"], most, slower["round_medians"])


def _check_idle(content: dict[str, Any]) -> Iterator[Requirement]:
    rows = [row["cores"] for row in content["idle"] if row["ranks"] == RANKS and row["contender"] == "engine"]
    if rows:
        yield Requirement(
            "idle engine, the busier rank", f"{max(rows) * 100:.4f} % of a core", "0.1 %", max(rows) / 1e-3
        )


def _check_training(content: dict[str, Any]) -> Iterator[Requirement]:
    for workload in content["workloads"]:
        for variant, title in (("engine", ""), ("engine_view", ", bucket views")):
            share = compute_ratio_to_peer(workload, variant)
            if share is not None and content["settings"]["ranks"] == RANKS:
                interval = f"[{format_digits(share.low / 0.25)}, {format_digits(share.high / 0.25)}]"
                work = f"training overhead, {TITLES[workload['workload']]}{title}"
                yield Requirement(
                    work, f"{format_digits(share.value)} of DDP's", "0.25 of DDP's", share.value / 0.25, interval
                )


def _compare_with_limit(work: str, seconds: float, most: float, rounds: Sequence[float]) -> Requirement:
    interval = stats.estimate_median(rounds)
    between = f"[{format_digits(interval.low / most)}, {format_digits(interval.high / most)}]"
    return Requirement(work, format_duration(seconds), format_duration(most), seconds / most, between)
