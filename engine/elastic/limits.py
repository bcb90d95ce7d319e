"""Bounds of an elastic job: sizes of its worlds, timeouts, and how often it may start a world."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class JobLimits:
    """Bounds of a job. All times are in seconds. Limits that contradict each other are a ValueError that names them.

    `lease` exceeds the time after which an agent without contact to the driver kills its workers, by as much as killing
    them can take.
    """

    size: int  # number of ranks of the first world, unless fewer workers come within `start_timeout`
    min_size: int  # `min_size` to `max_size`: sizes that every world may have
    max_size: int
    multiple: int = 1  # number that the size of every world is a multiple of
    sizes: frozenset[int] | None = None  # allowed sizes of worlds; None: any
    # Longest time from a worker's start to its arrival at the gate; also for a world to meet, unless `meeting` is less
    start_timeout: float = 60.0
    elastic_timeout: float = 600.0  # longest time that the job waits for `min_size` workers
    stall_limit: float = 600.0  # longest time until a member comes to the gate after its world is over
    grow_wait: float = 2.0  # time during which newcomers are collected, so that several of them cost one reset
    end_grace: float = 30.0  # longest time that a worker has to end by itself after it was told to
    # Longest time until an agent reports the end of a worker that it was told to kill; exceeds the agent's grace
    kill_wait: float = 15.0
    lease: float = 30.0  # time after which no worker of a lost agent runs, unless `AgentLost` says another
    # Like `stall_limit`, for a member that has stalled; short, since the others have already waited for it
    stalled_wait: float = 1.0
    # Number of resets, of whatever cause, that are allowed; the job ends with the next one
    reset_limit: int | None = None
    # Number of consecutive worlds without a commit that are allowed; the job ends with the next one
    barren_limit: int | None = 10
    # Initial and longest time for which a blacklisted host is not used; it doubles each time; None: forever
    cooldown: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_size <= self.size <= self.max_size:
            raise ValueError(
                f"min_size is {self.min_size}, size {self.size}, max_size {self.max_size}; they must ascend, from 1"
            )
        if self.multiple < 1:
            raise ValueError(f"multiple is {self.multiple}; it must be at least 1")
        if self.find_largest_size(self.size) != self.size:
            raise ValueError(f"size is {self.size}, which is not an allowed size: {self._describe_sizes()}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} is {value}; it must be a positive number of seconds")
        for name in ("reset_limit", "barren_limit"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise ValueError(f"{name} is {limit}; it must be at least 0, or None")
        if self.cooldown is not None and not 0 < self.cooldown[0] <= self.cooldown[1]:
            raise ValueError(f"cooldown is {self.cooldown}; it must be two positive times, the shorter first")

    @property
    def meeting(self) -> float:
        """Seconds that members of a world have to meet: `start_timeout`, at most the larger of `stall_limit` and 10."""
        return min(self.start_timeout, max(self.stall_limit, 10.0))

    def find_largest_size(self, workers: int) -> int:
        """Return the size of the largest world that `workers` workers can form; 0 if they can form none."""
        for size in range(min(workers, self.max_size), self.min_size - 1, -1):
            if size % self.multiple == 0 and (self.sizes is None or size in self.sizes):
                return size
        return 0

    def _describe_sizes(self) -> str:
        parts = [f"a multiple of {self.multiple}"] if self.multiple > 1 else []
        parts += [f"one of {sorted(self.sizes)}"] if self.sizes is not None else []
        return " and ".join(parts)
