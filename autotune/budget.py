"""What the trials of a search may lose against the setting that stands: a share of the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune.trials import Settings, Told

AT_ONCE = 0.25  # of the budget, that one trial may lose
KEPT_BACK = 0.2  # of the budget: for measurements that are slower by chance, and to confirm what was found
MOST = 50.0  # logarithm of a ratio: larger ones are too large for a float
LEAST_LIMIT = 0.05  # above what stands, for a trial's first steps: less would be noise


class Budget:
    """How much is left.

    Parameters
    ----------
    settings : Settings
    told : sequence of Told
        The trials of this search.
    standing : float
        Logarithm of the seconds per step of what stands, by all that is known.

    Attributes
    ----------
    total : float
        Steps that may be lost.
    spare : float
        Of these, what trials have not lost: by what they took longer than what stands, gains not counted.
    """

    def __init__(self, settings: Settings, told: Sequence[Told], standing: float) -> None:
        self.total = settings.regret_budget * settings.horizon
        self.spare = self.total - sum(
            max(0.0, math.expm1(min(each.score.log - standing, MOST))) * len(each.samples) for each in told
        )
        self._steps = float(np.median([len(each.samples) for each in told if each.status == "ok"] or [1]))
        self._standing = standing

    @property
    def spent(self) -> bool:
        """Whether one more trial might exceed it."""
        return self.spare < KEPT_BACK * self.total

    def limit(self) -> float:
        """Seconds per step above which a trial would lose more than it may."""
        may_lose = min(self.spare - KEPT_BACK * self.total, AT_ONCE * self.total)
        return math.exp(self._standing) * (1.0 + max(may_lose / self._steps, LEAST_LIMIT))

    def shares(self, left: int) -> float:
        """Of each of `left` trials, by how much it may be slower than what stands: a few times what they have each."""
        return 3.0 * max(self.spare, 0.02 * self.total, 1e-9) / max(left, 3) / self._steps
