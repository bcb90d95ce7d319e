"""The summary of a run: figures from the ranks' pages, as ten lines. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...text.readable import (
    format_clock,
    format_count,
    format_ranks,
    format_seconds,
    format_share,
    format_size,
    format_speed,
    replace_unprintable,
)
from ..names import PHASES, STAGES
from ..page import DURATIONS, PageError, Snapshot
from . import words
from .late_steps import LateRank, collect_late_steps, describe_late_steps
from .rates import Page, find_straggler, names_of_hosts, waits_by_host

FEW_STEPS = 20  # minimum number of steps for advice: the first steps weigh too much in fewer


@dataclass(frozen=True)
class Run:
    """Facts that the launcher knows about a run."""

    seconds: float  # duration of the run
    size: int  # number of ranks
    processors: int  # processors that the ranks could keep busy at once, if all are on the launcher's host
    unix_offset: float  # unix time minus CLOCK_MONOTONIC when the ranks were started, in seconds
    tuner_log: str | None = None  # path, if known
    # Signal by which the user ended the job, such as `SIGINT`; failures that ranks then report are a consequence
    ended_by: str | None = None
    # Numbers of ranks and of usable processors of each host with an agent; empty if all are on the launcher's
    hosts: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """Figures of a run, from its pages. Times are in seconds, shares from 0 to 1; None: unknown.

    Means of a rank (`nbytes`, `active`, `network`) are over the ranks; `device_bytes` is over the ranks with a GPU.
    """

    run: Run
    ranks: int  # those whose engine has started and whose page can be read
    unreadable: Mapping[int, str]  # errors of pages that cannot be read, by rank
    silent: tuple[int, ...]  # ranks that never started the engine
    steps: int  # largest count of a rank
    step: float | None  # mean duration
    step_half: tuple[float, float] | None  # bounds of the median; a page only counts by powers of two
    step_most: tuple[float, float] | None  # bounds of the 95th percentile
    nbytes: float  # bytes of tensors in collectives
    active: float  # time from the engine's start to the last collective
    blocked: float | None  # share of `active` in which the program was blocked
    exposed: float | None  # the part of it while a collective was executed
    waited: float | None  # the rest, spent waiting for late ranks and for batches to close
    hidden: float | None  # share of the collectives' time in which the program was not blocked
    lags: Mapping[int, float]  # mean time after the first rank's submission, by rank
    late: Mapping[int, LateRank]  # late steps, by rank
    batch: float | None  # mean bytes of an allreduce
    tensors: float | None  # mean number of tensors in a collective
    fill: float | None  # share of the fusion threshold that batches of allreduces fill
    closed: Mapping[str, int]  # number of batches by the reason for which they were closed
    misses: float | None  # share of the submissions that came with their full description
    knobs: Sequence[tuple[str, str]]  # those in force at the end, as options of `enginerun`
    phase: str  # phase of the tuner
    trials: int  # made by the tuner
    changes: int  # made by the tuner
    default_score: float  # the tuner's; 0: none
    best_score: float  # the tuner's; 0: none
    warnings: int  # stall warnings
    mismatches: int  # tensors about which ranks disagreed
    failures: Mapping[str, list[int]]  # failed ranks by the cause that they report; empty if the user ended the job
    hosts: Mapping[str, list[int]]  # ranks of each host, if there are several
    network: float  # bytes sent to other hosts
    # Share of the time in which the others waited for a host's data (`rates.waits_by_host`)
    crossing: Mapping[str, float]
    gpus: int  # ranks that have opened a GPU
    device_bytes: float  # bytes of tensors on the GPU
    device: Mapping[str, float]  # mean of the samples of each GPU stage (`names.STAGES`)
    device_speed: float | None  # bytes per second in NCCL, over the sampled collectives

    @property
    def straggler(self) -> int | None:
        """Rank for which the others waited; None if no rank stands out."""
        return find_straggler(self.lags, self.step)

    @property
    def enough(self) -> bool:
        """True if there were enough steps to judge by."""
        return self.steps >= FEW_STEPS


def compute_figures(pages: Mapping[int, Page], run: Run) -> Figures:
    """Compute the figures of a run from the last reading of its pages, by rank."""
    read = {rank: page for rank, page in sorted(pages.items()) if isinstance(page, Snapshot) and page.state != "new"}
    ranks = list(read.values())
    spans = [(page, span) for page in ranks if (span := _compute_active_seconds(page, run)) > 0]
    blocked = _compute_mean([min(1.0, page["blocked_ns"] / 1e9 / span) for page, span in spans])
    exposed = _compute_mean([min(1.0, page["exposed_ns"] / 1e9 / span) for page, span in spans])
    waited = None if blocked is None or exposed is None else max(0.0, blocked - exposed)
    total = {name: sum(sum(page.fields[name]) for page in ranks) for name in _SUMMED}
    leader = read.get(0)
    buckets = [sum(page.fields["step_durations"][k] for page in ranks) for k in range(DURATIONS)]
    batches = sum(_of_allreduces(page, "collectives") for page in ranks)
    in_them = sum(_of_allreduces(page, "collective_bytes") for page in ranks)
    failures: dict[str, list[int]] = {}
    for rank, page in read.items():
        if page.state == "failed" and run.ended_by is None:
            failures.setdefault(words.describe_failure(page), []).append(rank)
    names = names_of_hosts(read)
    waits = waits_by_host(
        (page, {host: min(1.0, ns / 1e9 / span) for host, ns in enumerate(page.fields["crossing_ns"])})
        for page, span in spans
    )
    hosts: dict[str, list[int]] = {}
    for rank, page in read.items():
        if page.far:
            hosts.setdefault(names[page["host"]], []).append(rank)
    return Figures(
        run=run,
        ranks=len(read),
        unreadable={rank: str(page) for rank, page in sorted(pages.items()) if isinstance(page, PageError)},
        silent=tuple(
            rank for rank, page in sorted(pages.items()) if rank not in read and not isinstance(page, PageError)
        ),
        steps=max((page["steps"] for page in ranks), default=0),
        step=_compute_ratio(total["step_ns"] / 1e9, sum(buckets)),  # the first step has no length
        step_half=find_percentile(buckets, 0.5),
        step_most=find_percentile(buckets, 0.95),
        nbytes=total["collective_bytes"] / max(1, len(ranks)),
        active=_compute_mean([span for _, span in spans]) or 0.0,
        blocked=blocked,
        exposed=exposed,
        waited=waited,
        hidden=None if not total["collective_ns"] else max(0.0, 1 - total["exposed_ns"] / total["collective_ns"]),
        late=collect_late_steps(pages),
        lags={rank: page["lag_ns"] / 1e9 / page["lags"] for rank, page in read.items() if page["lags"]},
        batch=_compute_ratio(in_them, batches),
        tensors=_compute_ratio(total["collective_tensors"], total["collectives"]),
        fill=_compute_ratio(total["fused_bytes"], total["fusion_capacity"]),
        closed={} if leader is None else dict(zip(leader.names["reasons"], leader.fields["cycles"], strict=True)),
        misses=_compute_ratio(total["requests"], total["submitted"]),
        knobs=[] if leader is None else words.list_knobs(leader),
        phase=PHASES[0] if leader is None else leader.phase,
        trials=0 if leader is None else leader["tuner_trials"],
        changes=0 if leader is None else leader["tuner_changes"],
        default_score=0.0 if leader is None else leader["tuner_default_ps"] / 1e12,
        best_score=0.0 if leader is None else leader["tuner_best_ps"] / 1e12,
        warnings=total["stall_warnings"],
        mismatches=max((page["mismatches"] for page in ranks), default=0),
        failures=failures,
        hosts=hosts,
        network=_compute_mean([page["network_sent"] for page in ranks if page.far]) or 0.0,
        crossing={names[host]: share for host, share in sorted(waits.items()) if host in names},
        **_compute_gpu_figures([page for page in ranks if page.on_gpu]),
    )


def _compute_gpu_figures(ranks: Sequence[Snapshot]) -> dict[str, Any]:
    """Return the figures about the GPUs of the given ranks."""
    samples = {stage: [page.get_samples(stage) for page in ranks] for stage in STAGES}
    counts = {stage: sum(count for count, _ in each) for stage, each in samples.items()}
    seconds = {stage: sum(ns for _, ns in each) / 1e9 for stage, each in samples.items()}
    return {
        "gpus": len(ranks),
        "device_bytes": _compute_mean([page["device_bytes"] for page in ranks]) or 0.0,
        "device": {stage: seconds[stage] / counts[stage] for stage in STAGES if counts[stage]},
        "device_speed": _compute_ratio(sum(page["device_sampled_bytes"] for page in ranks), seconds["nccl"]),
    }


def _of_allreduces(page: Snapshot, field: str) -> int:
    """Return the sum over allreduces of a field that counts by operation and algorithm."""
    width = len(page.names["algorithms"])
    first = width * page.names["operations"].index("allreduce")
    return sum(page.fields[field][first : first + width])


_SUMMED = (
    *("steps", "step_ns", "collectives", "collective_bytes", "collective_tensors", "collective_ns", "exposed_ns"),
    *("fused_bytes", "fusion_capacity", "requests", "submitted", "stall_warnings"),
)


def find_percentile(buckets: Sequence[int], share: float) -> tuple[float, float] | None:
    """Find the bounds in seconds between which a percentile lies; None if nothing was counted.

    Bucket k counts durations of at least 2**(k - 1) ns and below 2**k ns. The last one has all longer ones, and an
    infinite upper bound. `share` of the counts is above 0 and at most 1.
    """
    wanted, seen = share * sum(buckets), 0
    for k, count in enumerate(buckets):
        seen += count
        if count and seen >= wanted:
            upper = 2.0**k * 1e-9 if k < len(buckets) - 1 else float("inf")
            return 2.0 ** (k - 1) * 1e-9 if k else 0.0, upper
    return None


def format_summary(told: Figures, advice: Sequence[str]) -> list[str]:
    """Format the summary with the recommendations of `engine.metrics.report.advice`, in about ten lines."""
    head = f"summary: {format_count(told.run.size, 'rank')}, {format_clock(told.run.seconds)}"
    text = [head + _format_silent_ranks(told)]
    if told.ranks == 0:
        return [*text, "  nothing was counted: no rank has started the engine"]
    text += [f"  {name + ':':<16}{value}" for name, value in _make_rows(told)]
    return text + [f"  {'to change:' if not index else '':<16}{each}" for index, each in enumerate(advice)]


def _make_rows(told: Figures) -> list[tuple[str, str]]:
    """Return the rows of the summary: a heading and its figures."""
    rows = [("steps", _format_steps(told)), ("throughput", _format_throughput(told))]
    if told.blocked is not None and told.exposed is not None and told.waited is not None:
        hidden = "" if told.hidden is None else f"; {format_share(told.hidden)} of the collectives' time was hidden"
        rows.append(
            (
                "communication",
                f"blocked for {format_share(told.blocked)} of the time: {format_share(told.exposed)} in "
                f"collectives (exposed), {format_share(told.waited)} waiting for late ranks or batches{hidden}",
            )
        )
    if told.gpus:
        rows.append(("GPUs", _format_gpus(told)))
    if told.hosts:
        rows.append(("hosts", _format_hosts(told)))
    rows.append(("slowest rank", _format_slowest_rank(told)))
    if (late := describe_late_steps(told.late)) is not None:
        rows.append(("late steps", late))
    rows += [
        ("fusion", _format_fusion(told)),
        ("knobs", _format_knobs(told)),
    ]
    if told.phase != "off":
        rows.append(("tuner", _format_tuner(told)))
    return [*rows, ("stalls, errors", _format_problems(told))]


def _format_steps(told: Figures) -> str:
    if told.step is None or told.step_half is None or told.step_most is None:
        return "none were counted: a step is one of engine.DistributedOptimizer"
    few = "" if told.enough else f" (fewer than {FEW_STEPS}: the first ones weigh much)"
    if not told.enough:  # a high percentile of few steps is the slowest of them
        spread = f"the median {_format_bounds(told.step_half)}"
    elif told.step_half == told.step_most:
        spread = f"the median and the 95th percentile {_format_bounds(told.step_half)}"
    else:
        spread = f"the median {_format_bounds(told.step_half)}, the 95th percentile {_format_bounds(told.step_most)}"
    return f"{told.steps}, of {format_seconds(told.step)} in the mean, {spread}{few}"


def _format_bounds(bounds: tuple[float, float]) -> str:
    low, high = bounds
    return f"over {format_seconds(low)}" if high == float("inf") else f"{format_seconds(low)} to {format_seconds(high)}"


def _format_throughput(told: Figures) -> str:
    if not told.nbytes or not told.active:
        return "no collective has moved data"
    steps = ""
    if told.step:
        steps = f"; {1 / told.step:.1f} steps/s"
    return f"{format_size(told.nbytes)} of tensors in {format_clock(told.active)}, " + (
        f"{format_speed(told.nbytes / told.active)} a rank{steps}"
    )


def _format_slowest_rank(told: Figures) -> str:
    if len(told.lags) < 2:
        return "not known: fewer than two ranks have submitted what others wait for"
    latest = max(told.lags, key=lambda rank: told.lags[rank])
    others = statistics.median(lag for rank, lag in told.lags.items() if rank != latest)
    by = f"{format_seconds(told.lags[latest])} after the first in the mean, the others {format_seconds(others)}"
    return f"{latest}, {by}" if told.straggler is not None else f"none stands out; rank {latest} is last, {by}"


def _format_hosts(told: Figures) -> str:
    """Format the hosts, the bytes sent over the network, and the hosts for whose data others waited."""
    where = "; ".join(f"{replace_unprintable(name)} {format_ranks(ranks)}" for name, ranks in told.hosts.items())
    waits = ", ".join(f"{replace_unprintable(name)} {format_share(share)}" for name, share in told.crossing.items())
    sent = f"{format_size(told.network)} sent to other hosts by a rank"
    return f"{where}; {sent}; waited for data of " + (waits or "none")


def _format_gpus(told: Figures) -> str:
    """Format the bytes on GPUs and the durations of sampled collectives."""
    parts = [f"{format_size(told.device_bytes)} of tensors a rank"]
    works = [
        f"{'NCCL' if stage == 'nccl' else stage} {format_seconds(told.device[stage])}"
        for stage in ("queue", "pack", "nccl", "unpack")
        if stage in told.device
    ]
    if works:
        parts.append("a sampled collective in the mean: " + ", ".join(works))
    if told.device_speed:
        parts.append(f"{format_speed(told.device_speed)} in NCCL")
    if "exposed" in told.device:
        parts.append(f"a step's stream stood for {format_seconds(told.device['exposed'])} (exposed)")
    return "; ".join(parts)


def _format_fusion(told: Figures) -> str:
    if told.batch is None:
        return "there were no allreduces"
    parts = [f"{format_size(told.batch)} an allreduce"]
    if told.tensors is not None:
        parts.append(f"{told.tensors:.3g} tensors a collective")
    if told.fill is not None:
        parts.append(f"{format_share(told.fill)} of the threshold")
    count = sum(told.closed.values())
    if count:
        names = {
            "full": "the threshold was reached",
            "whole_step": "the step was complete",
            "awaited": "a caller waited",
            "cycle_time": "the cycle time was over",
        }
        if told.closed.get("frozen"):
            names["frozen"] = "a frozen one was whole"
        shares = ", ".join(f"{name} {100 * told.closed[key] / count:.0f} %" for key, name in names.items())
        parts.append(f"batches closed because {shares}")
    return ", ".join(parts)


def _format_knobs(told: Figures) -> str:
    return " ".join(f"{name} {value}" for name, value in told.knobs) or "not known"


def _format_tuner(told: Figures) -> str:
    """Format the tuner's result. The knobs in force are its best in phase `watching`; in a search, maybe a trial's."""
    scores = ""
    if told.best_score and told.default_score:
        gain = 1 - told.best_score / told.default_score
        scores = (
            f", {format_seconds(told.best_score)} against {format_seconds(told.default_score)} with those it began with"
        )
        scores += f" ({100 * gain:.1f} % less)" if gain > 0 else ""
    if told.phase == "watching":
        better = told.best_score < told.default_score
        choice = f"the knobs above are its choice{scores}" if better else "it found nothing faster than the knobs above"
        return f"{format_count(told.trials, 'trial')}; {choice}"
    if told.phase == "resting":
        ended = "its search ended, as trials had lost all that they may in a job of this length"
        return f"{format_count(told.trials, 'trial')}; {ended}{scores}"
    if told.phase == "waiting":
        return "it waited for steps and made no trial"
    state = {"searching": "was still searching", "lost": "was lost", "left": "was ended by the program"}
    log = f"; 'autotune best {told.run.tuner_log}' has its best knobs" if told.run.tuner_log and told.trials else ""
    return f"{state.get(told.phase, told.phase)} after {format_count(told.trials, 'trial')}{scores}{log}"


def _format_problems(told: Figures) -> str:
    parts = []
    if told.warnings:
        parts.append(format_count(told.warnings, "warning") + " about stalls")
    if told.mismatches:
        parts.append(format_count(told.mismatches, "operation") + " in which ranks disagreed")
    if told.run.ended_by:
        parts.append(f"the user ended the job ({told.run.ended_by})")
    parts += [f"{format_ranks(ranks)} failed: {cause}" for cause, ranks in told.failures.items()]
    parts += [f"the page of {format_ranks([rank])} {why}" for rank, why in told.unreadable.items()]
    return "; ".join(parts) or "none"


def _format_silent_ranks(told: Figures) -> str:
    """Name the ranks without figures, if only some ranks have them."""
    if told.silent and told.ranks:
        return f"; {format_ranks(told.silent)} never started the engine"
    return ""


def _compute_active_seconds(page: Snapshot, run: Run) -> float:
    """Return the seconds from a rank's engine start to its last collective."""
    return page["last_ns"] / 1e9 + run.unix_offset - page["started_ns"] / 1e9 if page["last_ns"] else 0.0


def _compute_mean(numbers: Sequence[float]) -> float | None:
    return statistics.fmean(numbers) if numbers else None


def _compute_ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
