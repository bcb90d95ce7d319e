"""Advice after a run: independent rules over its figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...text.readable import format_count, format_seconds, format_share, format_size, replace_unprintable
from .rates import MUCH, Page, slow_host, slow_link
from .summary import FEW_STEPS, Figures, Run, compute_figures, format_summary

MOSTLY = 0.5  # share of the batches above which we say "most"
SMALL_BATCH = 4 << 20  # bytes of an allreduce below which latency matters
FEW_LATE = 5  # steps of a rank up to which nothing is said of their cause
MANY_MISSES = 0.2  # share of submissions by full request; in a steady job only the first uses of names are such


def summarize_run(pages: Mapping[int, Page], run: Run) -> list[str]:
    """Summarise a run from the last reading of its pages, empty if nothing was counted; return the lines to show."""
    if not pages:
        return ["summary: there is none, as nothing was counted: leave --no-metrics, or ENGINE_METRICS=0, out"]
    told = compute_figures(pages, run)
    return format_summary(told, recommend_changes(told) if told.ranks else [])


def recommend_changes(told: Figures) -> list[str]:
    """Return recommendations of what to change, most important first.

    A single line says so if there is nothing to change, or too little data to judge.
    """
    found = [text for rule in ALWAYS if (text := rule(told)) is not None]
    if not told.enough:
        few = f"{format_count(told.steps, 'step')}: at least {FEW_STEPS} are needed to judge the knobs by"
        return [*found, few if told.steps else "no steps were counted: the knobs are not judged"]
    found += [text for rule in WITH_STEPS if (text := rule(told)) is not None]
    if found:
        return found
    cost = "" if told.blocked is None else f": communication costs {format_share(told.blocked)} of the time"
    return [f"nothing{cost}"]


def report_failure(told: Figures) -> str | None:
    """Point to the cause of a failure, which comes before speed."""
    if not told.failures:
        return None
    causes = "; ".join(told.failures)
    return f"find out first why the job failed ({causes}): the report of the failure is below"


def report_mismatches(told: Figures) -> str | None:
    """Report tensors on which the ranks' programs disagreed."""
    if not told.mismatches:
        return None
    return "the ranks' programs differ: see the MismatchErrors, which name the tensors"


def report_stalls(told: Figures) -> str | None:
    """Report stalls."""
    if not told.warnings:
        return None
    return "the job stood still at times: the warnings name the tensors and the ranks that did not submit them"


def report_crowded_hosts(told: Figures) -> str | None:
    """Report hosts with more ranks than processors."""
    hosts = {f" on {replace_unprintable(name)}": share for name, share in told.run.hosts.items()}
    shares = [
        f"{ranks} ranks share {format_count(processors, 'processor')}{where}"
        for where, (ranks, processors) in (hosts or {"": (told.run.size, told.run.processors)}).items()
        if ranks > processors
    ]
    if not shares:
        return None
    there = " there" if hosts else ""
    return f"{'; '.join(shares)}, and so cannot all compute at once: start fewer ranks{there}"


def report_straggler(told: Figures) -> str | None:
    """Report the rank for which the others wait."""
    rank = told.straggler
    if rank is None:
        return None
    of_step = f", {format_share(told.lags[rank] / told.step)} of a step" if told.step else ""
    of_step += " (stalls included)" if told.warnings else ""
    late = told.late.get(rank)
    why = "is its share of the data larger, does it write files, does something else run on its processors?"
    if late is not None and late.count > FEW_LATE:
        why = f"its late steps lost most by {max(late.steps, key=lambda cause: late.seconds.get(cause, 0.0))}"
    return (
        f"look at rank {rank}: it submits its tensors {format_seconds(told.lags[rank])} after the first rank{of_step}; "
        f"{why}"
    )


def slow_network(told: Figures) -> str | None:
    """Report a host, or a link between two hosts, whose data comes late at a high cost."""
    names, waits = list(told.crossing), dict(enumerate(told.crossing.values()))
    if (host := slow_host(waits)) is not None:
        return (
            f"look at the network of {replace_unprintable(names[host])} and at its load: the others wait for its data "
            f"for {format_share(waits[host])} of the time"
        )
    if (link := slow_link(waits)) is not None:
        one, other = (replace_unprintable(names[host]) for host in link)
        return (
            f"the link between {one} and {other} is slow: each waits for the other's data for "
            f"{format_share(min(waits[host] for host in link))} of the time; look at its bandwidth and at errors of "
            "its interfaces"
        )
    return None


def report_changing_names(told: Figures) -> str | None:
    """Report names or shapes that change from step to step."""
    if told.misses is None or told.misses <= MANY_MISSES:
        return None
    return (
        f"{format_share(told.misses)} of the tensors came with a new name or shape, each of which has to be agreed "
        "on: give operations the same names in every step, and pad shapes that vary"
    )


def small_batches(told: Figures) -> str | None:
    """Recommend a larger fusion threshold if batches are full but small, and communication is not hidden."""
    if not _is_costly(told.exposed) or told.batch is None or told.batch >= SMALL_BATCH or not _closed_by(told, "full"):
        return None
    return (
        f"allreduces of {format_size(told.batch)} are small and full: a larger --fusion-threshold makes fewer of "
        "them; --autotune finds how large"
    )


def waits_for_clock(told: Figures) -> str | None:
    """Recommend a shorter cycle time if the program waits for batches that only the cycle time closes."""
    if not _is_costly(told.waited) or not _closed_by(told, "cycle_time") or told.straggler is not None:
        return None
    knobs = dict(told.knobs)
    now = f" (it is {knobs['--cycle-time-ms']})" if "--cycle-time-ms" in knobs else ""
    return (
        f"most batches are closed because the cycle time is over, while the program waits: lower --cycle-time-ms{now}"
    )


def recommend_tuner(told: Figures) -> str | None:
    """Recommend the tuner if communication is expensive and no better knobs were searched for."""
    if told.phase != "off" or not _is_costly(told.blocked):
        return None
    if any(rule(told) is not None for rule in (report_crowded_hosts, report_straggler, small_batches, waits_for_clock)):
        return None  # these come first
    return f"communication costs {format_share(told.blocked or 0.0)} of the time: --autotune looks for better knobs"


def recommend_longer_run(told: Figures) -> str | None:
    """Recommend a longer run if the tuner's search had not finished."""
    if told.phase not in ("waiting", "searching") or not _is_costly(told.blocked):
        return None
    return "let the job run longer, or lower --autotune-bayes-opt-max-samples: the tuner had not finished"


def _is_costly(share: float | None) -> bool:
    return share is not None and share >= MUCH


def _closed_by(told: Figures, reason: str) -> bool:
    """Return whether most batches were closed for this reason."""
    count = sum(told.closed.values())
    return count > 0 and told.closed.get(reason, 0) > MOSTLY * count


Rule = Callable[[Figures], str | None]
ALWAYS: tuple[Rule, ...] = (report_failure, report_mismatches, report_stalls, report_crowded_hosts, slow_network)
WITH_STEPS: tuple[Rule, ...] = (
    report_straggler,
    report_changing_names,
    small_batches,
    waits_for_clock,
    recommend_tuner,
    recommend_longer_run,
)
