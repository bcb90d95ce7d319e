"""An elastic job in words, for `enginerun top`."""

from __future__ import annotations

from ... import readable
from ..elastic_job import ElasticJob, Reset

SHOWN = 3  # resets that are told one by one


def head(job: ElasticJob) -> list[str]:
    """Its world in a few words each."""
    if not job.world:
        return [f"no world yet ({_sizes(job)})"]
    state = "resetting after world" if job.resetting else "world"
    parts = [f"{state} {job.world}: {readable.count(job.size, 'rank')} ({_sizes(job)})"]
    resets = sum(job.resets.values())
    parts.append(f"resets {resets}" + (f" in {readable.short(job.reset_seconds)}" if resets else ""))
    if job.slow_workers:
        parts.append(f"slow workers replaced {job.slow_workers}")
    if job.cooling:
        parts.append(f"{readable.count(job.cooling, 'host')} left alone")
    return parts


def resets(job: ElasticJob, now: float) -> list[str]:
    """The last resets, a line each, the newest first.

    Parameters
    ----------
    job : ElasticJob
    now : float
        Unix time.
    """
    return [_reset(each, now, last=each is job.recent[-1] and job.resetting) for each in job.recent[: -SHOWN - 1 : -1]]


def _reset(reset: Reset, now: float, *, last: bool) -> str:
    lasts = "lasts" if last else "took"
    ago = readable.clock(max(0.0, now - reset.time))
    return f"reset {reset.number}, {ago} ago, {lasts} {readable.short(reset.seconds)}: {reset.text}"


def _sizes(job: ElasticJob) -> str:
    return f"{job.min_size} to {job.max_size}"
