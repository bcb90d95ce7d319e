"""Text about an elastic job for `enginerun top`."""

from __future__ import annotations

from ...text import readable
from ..elastic_job import ElasticJob

SHOWN = 3  # resets that are listed one by one


def describe_world(job: ElasticJob, now: float) -> list[str]:
    """Return short phrases about the job's world; `now` is unix time."""
    if not job.world:
        return [f"no world yet ({_format_sizes(job)})"]
    state = "resetting after world" if job.resetting else "world"
    parts = [f"{state} {job.world}: {readable.format_count(job.size, 'rank')} ({_format_sizes(job)})"]
    resets = sum(job.resets.values())
    parts.append(
        f"resets {resets}"
        + (
            f" in {readable.format_seconds(job.reset_seconds + _compute_unpublished_seconds(job, now))}"
            if resets
            else ""
        )
    )
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
