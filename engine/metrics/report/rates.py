"""Rates between two readings of a job's pages. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..page import PageError, Snapshot

Page = Snapshot | PageError | None
COUNTERS = (
    *("collectives", "collective_bytes", "collective_ns", "exposed_ns", "lag_ns", "lags", "completed"),
    *("submitted", "blocked_ns", "steps", "step_ns", "step_durations"),
    *("network_sent", "network_received", "crossing_ns"),
    *("device_entries", "device_ns", "device_samples"),
)
# A straggler is later than the first rank by this much on average, and by this much more than the other ranks.
LATE_SECONDS = 1e-3
LATE_SHARE = 0.05  # lateness as a share of a step
LATE_TIMES = 2.0
MUCH = 0.10  # share of the time above which communication is worth a change


@dataclass(frozen=True)
class JobReading:
    """Pages of a job's ranks, read together."""

    time: float  # seconds of a monotonic clock
    pages: Mapping[int, Page]  # pages by rank; the error if one cannot be read, None as long as it is empty

    @property
    def snapshots(self) -> dict[int, Snapshot]:
        """Pages that could be read, by rank."""
        return {rank: page for rank, page in sorted(self.pages.items()) if isinstance(page, Snapshot)}


@dataclass(frozen=True)
class GroupRates:
    """Collectives and bytes per second of one group on one rank."""

    collectives: float
    nbytes: float


@dataclass(frozen=True)
class Rates:
    """Rates of one rank between two readings."""

    seconds: float  # time between the readings
    steps: float  # per second, as the next two
    collectives: float
    nbytes: float
    step: float | None  # mean seconds of a step; None if no step ended
    blocked: float  # share of the time in which the program was blocked in the engine
    exposed: float  # the part of it in which a collective was executed
    lag: float | None  # mean seconds from the first rank's submission to this one's; None if nothing was submitted
    network: float  # bytes per second to and from other hosts
    # Share of the time in which collectives waited for data from another host, by host number
    crossing: Mapping[int, float]
    # Mean seconds of the samples of each GPU stage (`names.STAGES`) that has samples
    device: Mapping[str, float] = field(default_factory=dict)
    # Groups that the rank was in at both readings, by name
    groups: Mapping[str, GroupRates] = field(default_factory=dict)


def compute_rates(before: JobReading, after: JobReading) -> dict[int, Rates]:
    """Compute the rates of ranks whose pages could be read both times; empty if no time has passed.

    A rank is omitted if its counters restarted, because it is another process, or if both readings have the same copy
    of a page of another host.
    """
    earlier = before.snapshots
    found = {}
    for rank, page in after.snapshots.items():
        if rank in earlier and not _has_restarted(earlier[rank], page):
            then, now = earlier[rank]["copied_ns"] / 1e9, page["copied_ns"] / 1e9
            seconds = now - then if then and now else after.time - before.time
            if seconds > 0:
                found[rank] = _compute_rank_rates(earlier[rank], page, seconds)
    return found


def find_straggler(lags: Mapping[int, float], step: float | None) -> int | None:
    """Find the rank for which the others wait; None if no rank stands out.

    `lags` has the mean seconds after the first rank; `step` is the seconds of a step, if known.
    """
    if len(lags) < 2:
        return None
    latest = max(lags, key=lambda rank: lags[rank])
    others = statistics.median(lag for rank, lag in lags.items() if rank != latest)
    least = max(LATE_SECONDS, LATE_SHARE * (step or 0.0))
    return latest if lags[latest] - others >= least and lags[latest] >= LATE_TIMES * others else None


def pending(page: Snapshot) -> int:
    """Return the number of operations that are submitted and not done; the counters may be from different moments."""
    return max(0, page["submitted"] - page["completed"])


def _has_restarted(before: Snapshot, after: Snapshot) -> bool:
    """Return whether the page belongs to another process, or its counters restarted."""
    return before["pid"] != after["pid"] or any(
        new < old for name in COUNTERS for old, new in zip(before.fields[name], after.fields[name], strict=True)
    )


def _compute_rank_rates(before: Snapshot, after: Snapshot, seconds: float) -> Rates:
    grown = {name: sum(after.fields[name]) - sum(before.fields[name]) for name in COUNTERS}
    # A wait that began before the first reading may be counted in full at its end.
    blocked = min(1.0, grown["blocked_ns"] / 1e9 / seconds)
    return Rates(
        seconds=seconds,
        steps=grown["steps"] / seconds,
        collectives=grown["collectives"] / seconds,
        nbytes=grown["collective_bytes"] / seconds,
        step=grown["step_ns"] / 1e9 / grown["step_durations"] if grown["step_durations"] else None,
        blocked=blocked,
        exposed=min(blocked, grown["exposed_ns"] / 1e9 / seconds),
        lag=grown["lag_ns"] / 1e9 / grown["lags"] if grown["lags"] else None,
        network=(grown["network_sent"] + grown["network_received"]) / seconds,
        crossing={host: min(1.0, ns / 1e9 / seconds) for host, ns in _compute_host_waits(before, after).items()},
        device=_compute_stage_means(before, after),
        groups=_compute_group_rates(before, after, seconds),
    )


def _compute_group_rates(before: Snapshot, after: Snapshot, seconds: float) -> dict[str, GroupRates]:
    """Return the rates of each group; of none whose counts began anew, for another group of the name."""
    earlier = before.groups
    return {
        name: GroupRates(
            (now.collectives - earlier[name].collectives) / seconds, (now.nbytes - earlier[name].nbytes) / seconds
        )
        for name, now in after.groups.items()
        if name in earlier and now.collectives >= earlier[name].collectives and now.nbytes >= earlier[name].nbytes
    }


def _compute_stage_means(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Return the mean of each GPU stage's samples, in seconds."""
    found = {}
    for stage in after.names["stages"]:
        (count, ns), (earlier, ns_before) = after.get_samples(stage), before.get_samples(stage)
        if count > earlier:
            found[stage] = (ns - ns_before) / 1e9 / (count - earlier)
    return found


def _compute_host_waits(before: Snapshot, after: Snapshot) -> dict[int, int]:
    """Return the nanoseconds in which collectives waited for each host."""
    waits = zip(before.fields["crossing_ns"], after.fields["crossing_ns"], strict=True)
    return {host: new - old for host, (old, new) in enumerate(waits) if new > old}


def waits_by_host(told: Iterable[tuple[Snapshot, Mapping[int, float]]]) -> dict[int, float]:
    """Compute the share of the time in which a job's ranks waited for each host, by host number.

    `told` has the page of each rank, and its share of the time waited for each host; missing hosts count as 0. The
    result is the lower median over the other hosts, each with the mean of its ranks; it is empty for a job on one host.
    All hosts wait for one with a slow connection. That host waits as long, but for whichever is first.
    """
    shares: dict[int, dict[int, list[float]]] = {}
    for page, waits in told:
        for host in range(min(page["hosts"], len(page.fields["crossing_ns"])) if page.far else 0):
            if host != page["host"]:
                shares.setdefault(host, {}).setdefault(page["host"], []).append(waits.get(host, 0.0))
    return {host: statistics.median_low(map(statistics.fmean, each.values())) for host, each in shares.items()}


def slow_host(waits: Mapping[int, float]) -> int | None:
    """Find the host for whose data the others wait; None if no host stands out, or the wait is small.

    `waits` has the share of the time in which ranks of other hosts waited for a host, by host number.
    """
    if len(waits) < 2:
        return None
    most = max(waits, key=lambda host: waits[host])
    others = max(wait for host, wait in waits.items() if host != most)
    return most if waits[most] >= max(MUCH, LATE_TIMES * others) else None


def slow_link(waits: Mapping[int, float]) -> tuple[int, int] | None:
    """Find two hosts that wait for each other more than for any third: the connection between them is slow.

    The waits, as in `slow_host`, do not tell which of the two is to blame: neither can go on without the other's data.
    None if no two stand out, if one host alone does, or if the wait is small.
    """
    if len(waits) < 2 or slow_host(waits) is not None:
        return None
    one, other, *others = sorted(waits, key=lambda host: -waits[host])
    least = max(MUCH, LATE_TIMES * max((waits[host] for host in others), default=0.0))
    return (min(one, other), max(one, other)) if waits[other] >= least else None


def names_of_hosts(pages: Mapping[int, Page]) -> dict[int, str]:
    """Return the names of a job's hosts by number, as far as pages contain them; empty for a job on one host."""
    told = [page for page in pages.values() if isinstance(page, Snapshot) and page.far]
    return {page["host"]: page.host or f"host {page['host']}" for page in told}
