"""The budget of a search: steps that trials may lose, an allowance and a share of the steps so far.

A budget that is spent costs time, and never the search: it refills with the steps that the job makes, and the search
goes on when there is enough again.
"""

from __future__ import annotations

import math

from autotune.trials import Settings

AT_ONCE = 0.25  # share of the allowance that one trial may lose
KEPT_BACK = 0.2  # share of the allowance in reserve: for trials that are slow by chance, and to confirm the best one
DEBT = 0.5  # share of the allowance that may be lost beyond it: one terrible setting does not stop a search
ENOUGH = 0.45  # share of the allowance with which a search that rests goes on
LEAST_LIMIT = 0.05  # a trial is not cut short for a smaller excess over the standing setting: that would be noise


class Budget:
    """What is left of the budget of a search.

    Parameters
    ----------
    settings : Settings
    lost : float
        Steps that the trials of this epoch have lost.
    passed : int
        Steps of the job in this epoch, those of trials included.
    steps : float
        Steps of a trial that is not cut short.
    standing : float
        Logarithm of the seconds per step of the standing setting, by all trials.

    Attributes
    ----------
    allowance : float
        Steps that may be lost at once.
    spare : float
        Steps that may still be lost.
    """

    def __init__(self, settings: Settings, lost: float, passed: int, steps: float, standing: float) -> None:
        self.allowance = settings.regret_budget * settings.horizon
        self.spare = self.allowance + settings.refill * passed - lost - settings.spent
        self._steps, self._standing = steps, standing

    @property
    def spent(self) -> bool:
        """Whether one more trial might exceed it: the search has to be careful."""
        return self.spare < KEPT_BACK * self.allowance

    @property
    def overdrawn(self) -> bool:
        """Whether surprises have exceeded it by so much that the search has to rest."""
        return self.spare < -DEBT * self.allowance

    @property
    def refilled(self) -> bool:
        """Whether there is enough for several trials."""
        return self.spare >= ENOUGH * self.allowance

    @property
    def at_once(self) -> float:
        """Steps that one trial may lose."""
        return AT_ONCE * self.allowance

    def limit(self) -> float:
        """Seconds per step above which a trial would lose more than it may."""
        may_lose = min(self.spare - KEPT_BACK * self.allowance, self.at_once)
        return math.exp(self._standing) * (1.0 + max(may_lose / self._steps, LEAST_LIMIT))

    def shares(self, left: int) -> float:
        """Share by which each of `left` trials may be slower than the standing setting: a few times an equal part."""
        return 3.0 * max(self.spare, 0.02 * self.allowance, 1e-9) / max(left, 3) / self._steps
