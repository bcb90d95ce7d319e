"""Text about the knobs and the failure in a page of counters, and about the worlds of an elastic job."""

from __future__ import annotations

from ...text import readable
from ..elastic_job import ElasticJob
from ..knobs import GAUGES, Gauge
from ..page import Snapshot

SHOWN = 3  # resets that are listed one by one
# Lists of names, by knob.
_LISTS = {"stores": "stores", "between_hosts": "between_hosts", "compression": "compressions"}


def list_knobs(page: Snapshot) -> list[tuple[str, str]]:
    """Return the knobs in force as options of `enginerun` with their values; none before the first collective.

    A single socket per lane is omitted, as most jobs have no lanes.
    """
    if not any(page[gauge.field] for gauge in GAUGES):
        return []
    shown = [gauge for gauge in GAUGES if gauge.setting.unit != "sockets" or page[gauge.field] > 1]
    return [(gauge.setting.options[0], _format_knob(gauge, page)) for gauge in shown]


def _format_knob(gauge: Gauge, page: Snapshot) -> str:
    """Format a knob's value as its option takes it."""
    if gauge.setting.name in _LISTS:
        return page.get_name(_LISTS[gauge.setting.name], gauge.field)
    value = page[gauge.field]
    if gauge.setting.unit == "sockets":
        return str(value)
    return readable.format_exact_size(value) if gauge.setting.unit == "bytes" else f"{value / 1e6:.6g}"


def describe_failure(page: Snapshot) -> str:
    """Describe the cause of a failure from a failed rank's page, such as `rank 2 died`."""
    who = f"rank {page['culprit'] - 1}" if page["culprit"] else "a rank"
    verbs = {
        "died": "died",
        "raised": "raised an error",
        "left": "left",
        "stalled": "stood still",
        "lost": "cannot be reached",
    }
    return f"{who} {verbs.get(page.get_name('causes', 'cause'), 'failed')}"


def describe_world(job: ElasticJob, now: float) -> list[str]:
    """Return short phrases about the job's world; `now` is unix time."""
    if not job.world:
        return [f"no world yet ({_format_sizes(job)})"]
    state = "resetting after world" if job.resetting else "world"
    parts = [f"{state} {job.world}: {readable.format_count(job.size, 'rank')} ({_format_sizes(job)})"]
    resets = sum(job.resets.values())
    spent = readable.format_seconds(job.reset_seconds + _compute_unpublished_seconds(job, now))
    parts.append(f"resets {resets} in {spent}" if resets else "resets 0")
    if job.slow_workers:
        parts.append(f"slow workers replaced {job.slow_workers}")
    if job.cooling:
        parts.append(f"{readable.format_count(job.cooling, 'host')} left alone")
    return parts


def describe_resets(job: ElasticJob, now: float) -> list[str]:
    """Return one line for each of the last resets, the newest first; `now` is unix time."""
    lines = []
    for reset in job.recent[: -SHOWN - 1 : -1]:
        last = reset is job.recent[-1] and job.resetting
        took = readable.format_seconds(reset.seconds + (_compute_unpublished_seconds(job, now) if last else 0.0))
        ago = readable.format_clock(max(0.0, now - reset.time))
        lines.append(f"reset {reset.number}, {ago} ago, {'lasts' if last else 'took'} {took}: {reset.text}")
    return lines


def _compute_unpublished_seconds(job: ElasticJob, now: float) -> float:
    """Return the seconds that a current reset has lasted beyond the duration that the launcher last published."""
    return max(0.0, now - job.recent[-1].time - job.recent[-1].seconds) if job.resetting and job.recent else 0.0


def _format_sizes(job: ElasticJob) -> str:
    return f"{job.min_size} to {job.max_size}"
