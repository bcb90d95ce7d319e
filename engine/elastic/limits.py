"""Bounds of an elastic job: sizes of its worlds, timeouts, and how often it may start a world."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class JobLimits:
    """Bounds of a job. All times are in seconds.

    Parameters
    ----------
    size : int
        Number of ranks of the first world, unless fewer workers come within `start_timeout`.
    min_size, max_size : int
        Bounds of the size of every world.
    multiple : int
        Number that the size of every world is a multiple of.
    sizes : frozenset of int, optional
        Allowed sizes of worlds.
    start_timeout : float
        Longest time from a worker's start to its arrival at the gate. Also the longest time in which all members of a
        world must meet, unless `meeting` is less.
    elastic_timeout : float
        Longest time that the job waits for `min_size` workers.
    stall_limit : float
        Longest time until a member comes to the gate after its world is over.
    grow_wait : float
        Time during which newcomers are collected, so that several of them cost one reset.
    end_grace : float
        Longest time that a worker has to end by itself after it was told to.
    kill_wait : float
        Longest time until an agent reports the end of a worker that it was told to kill. It exceeds the agent's own
        grace.
    lease : float
        Time after which no worker of a lost agent runs, unless `AgentLost` gives another. It exceeds the time after
        which an agent without contact to the driver kills its workers, by as much as killing them can take.
    stalled_wait : float
        Longest time until a member that has stalled comes to the gate after its world is over. It is short, since the
        others have already waited for that member.
    reset_limit : int or None
        Number of resets, of whatever cause, that are allowed; the job ends with the next one.
    barren_limit : int or None
        Number of consecutive worlds without a commit that are allowed; the job ends with the next one.
    cooldown : (float, float) or None
        Time that a blacklisted host is not used: initial value and maximum; it doubles each time. None: forever.

    Raises
    ------
    ValueError
        Limits contradict each other; the text names them.
    """

    size: int
    min_size: int
    max_size: int
    multiple: int = 1
    sizes: frozenset[int] | None = None
    start_timeout: float = 60.0
    elastic_timeout: float = 600.0
    stall_limit: float = 600.0
    grow_wait: float = 2.0
    end_grace: float = 30.0
    kill_wait: float = 15.0
    lease: float = 30.0
    stalled_wait: float = 1.0
    reset_limit: int | None = None
    barren_limit: int | None = 10
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
