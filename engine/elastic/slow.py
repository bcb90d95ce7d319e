"""Pure function that finds a worker which delays the others, from the counters of all workers over time.

A worker is found only if nothing else explains the delay. Its lag must exceed the limit in every interval, so that no
single pause is enough, such as a checkpoint that rank 0 writes. All other lags must be below half the limit; otherwise
the program itself is uneven. Its host must not wait for data of other hosts; otherwise the network is slow. One delay
may count as the lag of many collectives, since lags are added up. So the others must also wait that much longer than it
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

QUIET = 0.5  # share of the limit that the lags of all others, and the host's wait for other hosts, must stay below


@dataclass(frozen=True)
class Reading:
    """Counters of a worker at one time; all count up."""

    steps: int  # training steps
    lag: float  # seconds by which it submitted tensors later than the first rank, added up
    crossing: float  # seconds that it waited for data of other hosts
    # Seconds in which its program was blocked in the engine; None where it does not block there, as on a GPU
    blocked: float | None = None


@dataclass(frozen=True)
class Look:
    """Counters of all members of a world at one time."""

    time: float  # seconds
    world: int
    readings: Mapping[int, Reading]  # readings by worker


@dataclass(frozen=True)
class SlowWorker:
    """Worker that delays the others."""

    worker: int
    lag: float  # delay in seconds a step, averaged over the whole time

    def __str__(self) -> str:
        return f"the others wait {self.lag * 1e3:.3g} ms for it in each step"


def find_slow_worker(looks: Sequence[Look], limit: float, seconds: float) -> SlowWorker | None:
    """Find the one worker whose lag has exceeded `limit`, in seconds a step, for `seconds`.

    The looks are in the order of time, at least two and preferably ten within `seconds`; older ones are ignored. It
    returns None also if they do not cover so much time within one world. A limit or a time that is not positive is a
    ValueError.
    """
    if not (limit > 0 and seconds > 0):
        raise ValueError(f"the limit is {limit} s a step, and the time {seconds} s; both must be positive")
    window = _select_window(looks, seconds)
    if not window:
        return None
    suspects: set[int] | None = None
    for before, after in pairwise(window):
        late = {worker for worker in after.readings if _compute_delay(before, after, worker) > limit}
        loud = {worker for worker in after.readings if not _compute_rate(before, after, worker, "lag") < QUIET * limit}
        if len(late) != 1 or loud != late:
            return None
        suspects = late if suspects is None else suspects & late
    if not suspects:
        return None
    (worker,) = suspects
    if not _compute_rate(window[0], window[-1], worker, "crossing") < QUIET * limit:
        return None
    return SlowWorker(worker, _compute_delay(window[0], window[-1], worker))


def _select_window(looks: Sequence[Look], seconds: float) -> Sequence[Look]:
    """Return the last looks that cover `seconds` in one world with the same workers; empty if there are none."""
    if not looks:
        return ()
    last = looks[-1]
    for start in range(len(looks) - 1, -1, -1):
        look = looks[start]
        if look.world != last.world or look.readings.keys() != last.readings.keys():
            return ()
        if last.time - look.time >= seconds:
            return looks[start:]
    return ()


def _compute_delay(before: Look, after: Look, worker: int) -> float:
    """Return the seconds a step that the others wait for a worker: its lag, or less if they do not wait that long."""
    lag = _compute_rate(before, after, worker, "lag")
    if any(look.readings[each].blocked is None for look in (before, after) for each in look.readings):
        return lag
    waits = {each: _compute_rate(before, after, each, "blocked") for each in after.readings}
    own = waits.pop(worker)
    return min(lag, *(wait - own for wait in waits.values())) if waits else 0.0


def _compute_rate(before: Look, after: Look, worker: int, what: str) -> float:
    """Return the seconds a step of a counter between two looks; NaN if there was no step, which proves nothing."""
    first, second = before.readings[worker], after.readings[worker]
    steps = second.steps - first.steps
    seconds: float = getattr(second, what) - getattr(first, what)
    return seconds / steps if steps > 0 else float("nan")
