"""What bounds an elastic job: its sizes, its waits, and how often it may begin a world."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Bounds of a job. All times are seconds.

    Parameters
    ----------
    size : int
        Ranks of the first world, unless so many do not come within `start_timeout`.
    min_size, max_size : int
        Bounds of the size of every world.
    multiple : int
        Worlds have a multiple of so many ranks.
    sizes : frozenset of int, optional
        Worlds have one of these sizes.
    start_timeout : float
        That a worker has from its start to the gate, and all members of a world have to meet, unless `meeting` is less.
    elastic_timeout : float
        That the job waits for `min_size` workers.
    stall_limit : float
        That a member has to come to the gate when its world is over.
    grow_wait : float
        During which newcomers are collected, so that those that come together cost one reset.
    end_grace : float
        That a worker has to end by itself after it was told to.
    kill_wait : float
        That an agent has to tell of the end of a worker which it shall kill. It is more than the agent's own grace.
    lease : float
        After which no worker runs whose agent is lost, unless `AgentLost` says when. It is more than the time after
        which an agent that hears nothing of the driver kills its workers, by as much as that can take.
    stalled_wait : float
        That a member has to come to the gate when its world is over because it has stalled: the others have waited for
        it before.
    reset_limit : int or None
        Resets, of whatever cause, after which the job ends with the next.
    barren_limit : int or None
        Worlds in a row that end before a commit, after which the job ends.
    cooldown : (float, float) or None
        How long a blacklisted host is left alone: the first time, and at most; it doubles each time. None: for good.

    Raises
    ------
    ValueError
        Limits that contradict each other, by name.
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
        if self.largest(self.size) != self.size:
            raise ValueError(f"size is {self.size}, which is not an allowed size: {self._allowed()}")
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
        """Seconds that the members of a world have to meet: no longer than a rank may keep others waiting, or 10."""
        return min(self.start_timeout, max(self.stall_limit, 10.0))

    def largest(self, workers: int) -> int:
        """The size of the largest world that so many workers can form; 0 if they can form none."""
        for size in range(min(workers, self.max_size), self.min_size - 1, -1):
            if size % self.multiple == 0 and (self.sizes is None or size in self.sizes):
                return size
        return 0

    def _allowed(self) -> str:
        parts = [f"a multiple of {self.multiple}"] if self.multiple > 1 else []
        parts += [f"one of {sorted(self.sizes)}"] if self.sizes is not None else []
        return " and ".join(parts)
