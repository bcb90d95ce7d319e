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
# Who is a straggler: later than the first rank by this much in the mean, and by this much more than the other ranks.
LATE_SECONDS = 1e-3
LATE_SHARE = 0.05  # lateness as a share of a step
LATE_TIMES = 2.0
MUCH = 0.10  # share of the time from which communication is worth a change


@dataclass(frozen=True)
class JobReading:
    """The pages of a job's ranks, read together.

    Attributes
    ----------
    time : float
        When, in seconds of a clock that does not go back.
    pages : mapping of int to Snapshot, PageError or None
        By rank: what the page said, why it cannot be read, or None as long as nothing is written to it.
    """

    time: float
    pages: Mapping[int, Page]

    @property
    def snapshots(self) -> dict[int, Snapshot]:
        """Those that could be read."""
        return {rank: page for rank, page in sorted(self.pages.items()) if isinstance(page, Snapshot)}


@dataclass(frozen=True)
class Rates:
    """The rates of one rank between two readings.

    Attributes
    ----------
    seconds : float
        Between them.
    steps, collectives, nbytes : float
        A second.
    step : float or None
        Seconds of a step in the mean; None if none ended.
    blocked, exposed : float
        Shares of the time: in which the program was blocked in the engine, and of this the part in which a collective
        was executed.
    lag : float or None
        Seconds after the first rank at which this one submitted, in the mean; None if nothing was submitted.
    network : float
        Bytes a second to and from other hosts.
    crossing : mapping of int to float
        By the number of another host, the share of the time in which collectives waited for data from there.
    device : mapping of str to float
        By what is timed on the GPU (`names.STAGES`), the mean of its samples in seconds; those that there are.
    """

    seconds: float
    steps: float
    collectives: float
    nbytes: float
    step: float | None
    blocked: float
    exposed: float
    lag: float | None
    network: float
    crossing: Mapping[int, float]
    device: Mapping[str, float] = field(default_factory=dict)


def rates(before: JobReading, after: JobReading) -> dict[int, Rates]:
    """Compare two readings.

    Parameters
    ----------
    before, after : JobReading

    Returns
    -------
    dict of int to Rates
        Of the ranks whose pages could be read both times. A rank whose counters have begun anew in between, because it
        is another process, has none; no rank has if no time has passed, and a copy of a page on another host has none
        if it is the same copy.
    """
    earlier = before.snapshots
    found = {}
    for rank, page in after.snapshots.items():
        if rank in earlier and not _anew(earlier[rank], page):
            then, now = earlier[rank]["copied_ns"] / 1e9, page["copied_ns"] / 1e9
            seconds = now - then if then and now else after.time - before.time
            if seconds > 0:
                found[rank] = _between(earlier[rank], page, seconds)
    return found


def straggler(lags: Mapping[int, float], step: float | None) -> int | None:
    """Find the rank for which the others wait.

    Parameters
    ----------
    lags : mapping of int to float
        By rank, seconds after the first rank.
    step : float or None
        Seconds of a step, if that is known.

    Returns
    -------
    int or None
        None if no rank stands out.
    """
    if len(lags) < 2:
        return None
    latest = max(lags, key=lambda rank: lags[rank])
    others = statistics.median(lag for rank, lag in lags.items() if rank != latest)
    least = max(LATE_SECONDS, LATE_SHARE * (step or 0.0))
    return latest if lags[latest] - others >= least and lags[latest] >= LATE_TIMES * others else None


def pending(page: Snapshot) -> int:
    """Operations that were submitted and are not done; the two counters need not be of one moment."""
    return max(0, page["submitted"] - page["completed"])


def _anew(before: Snapshot, after: Snapshot) -> bool:
    """Whether it is another process's page, or one that was written from the start."""
    return before["pid"] != after["pid"] or any(
        new < old for name in COUNTERS for old, new in zip(before.fields[name], after.fields[name], strict=True)
    )


def _between(before: Snapshot, after: Snapshot, seconds: float) -> Rates:
    grown = {name: sum(after.fields[name]) - sum(before.fields[name]) for name in COUNTERS}
    # A wait that began before the first reading may be counted at its end, all at once.
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
        crossing={host: min(1.0, ns / 1e9 / seconds) for host, ns in _waits(before, after).items()},
        device=_device(before, after),
    )


def _device(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Means of what was sampled on the GPU."""
    found = {}
    for stage in after.names["stages"]:
        (count, ns), (earlier, ns_before) = after.sampled(stage), before.sampled(stage)
        if count > earlier:
            found[stage] = (ns - ns_before) / 1e9 / (count - earlier)
    return found


def _waits(before: Snapshot, after: Snapshot) -> dict[int, int]:
    """By host, nanoseconds in which collectives waited for it."""
    waits = zip(before.fields["crossing_ns"], after.fields["crossing_ns"], strict=True)
    return {host: new - old for host, (old, new) in enumerate(waits) if new > old}


def waits_by_host(told: Iterable[tuple[Snapshot, Mapping[int, float]]]) -> dict[int, float]:
    """For which share of the time a job's ranks waited for each host.

    Parameters
    ----------
    told : iterable of (Snapshot, mapping of int to float)
        Of each rank its page, and by host, as far as it waited for it, the share of the time.

    Returns
    -------
    dict of int to float
        By number of a host, what half of the other hosts exceed, each with the mean of its ranks; none for a job on one
        host. All hosts wait for one that has a slow connection; that waits as long, but for whichever is first.
    """
    shares: dict[int, dict[int, list[float]]] = {}
    for page, waits in told:
        for host in range(min(page["hosts"], len(page.fields["crossing_ns"])) if page.far else 0):
            if host != page["host"]:
                shares.setdefault(host, {}).setdefault(page["host"], []).append(waits.get(host, 0.0))
    return {host: statistics.median_low(map(statistics.fmean, each.values())) for host, each in shares.items()}


def slow_host(waits: Mapping[int, float]) -> int | None:
    """Find the host for whose data the others wait.

    Parameters
    ----------
    waits : mapping of int to float
        By host, for which share of the time ranks of other hosts waited for it.

    Returns
    -------
    int or None
        None if no host stands out, or none of them costs much.
    """
    if len(waits) < 2:
        return None
    most = max(waits, key=lambda host: waits[host])
    others = max(wait for host, wait in waits.items() if host != most)
    return most if waits[most] >= max(MUCH, LATE_TIMES * others) else None


def slow_link(waits: Mapping[int, float]) -> tuple[int, int] | None:
    """Find two hosts that wait for each other, and for no third as much: the connection between them is slow.

    Which of the two is to blame their waits do not tell: neither can go on without the other's data.

    Parameters
    ----------
    waits : mapping of int to float
        As of `slow_host`.

    Returns
    -------
    tuple of two ints, or None
        The hosts by their numbers; None if no two stand out, if one host alone does, or if it does not cost much.
    """
    if len(waits) < 2 or slow_host(waits) is not None:
        return None
    one, other, *others = sorted(waits, key=lambda host: -waits[host])
    least = max(MUCH, LATE_TIMES * max((waits[host] for host in others), default=0.0))
    return (min(one, other), max(one, other)) if waits[other] >= least else None


def names_of_hosts(pages: Mapping[int, Page]) -> dict[int, str]:
    """The names of a job's hosts by their numbers, as far as pages tell them; none for a job on one host."""
    told = [page for page in pages.values() if isinstance(page, Snapshot) and page.far]
    return {page["host"]: page.host or f"host {page['host']}" for page in told}
