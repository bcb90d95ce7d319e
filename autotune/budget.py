"""The budget of a search: steps that trials may lose, a share of the job so far, which counts as a minute at least.

So a job of any length loses no more than that share to a search that finds nothing. A setting that is surely faster
allows for more: for what it gains in as long again as the job has run. A budget that is spent ends the search for now:
it refills with the steps that the job makes, and the search goes on when there is enough again.
"""

from __future__ import annotations

import math

from autotune.trials import Settings

AT_ONCE = 0.25  # share of the allowance that one trial may lose, and of the greatest one from which on that is terrible
LEAST_STEPS = 5.0  # that may be lost, however long a step is: as many as a trial has that is cut short
KEPT_BACK = 0.35  # share of the allowance with which a search becomes careful: it tries what is probably not slower
RESERVE = 0.15  # share of the allowance with which it ends, or what a trial may lose that is not cut short, if more
ENOUGH = 0.6  # share of the allowance with which a search that rests goes on
LEAST_LIMIT = 0.05  # a trial is not cut short for a smaller excess over the standing setting
NOISY = 2.0  # nor for one of so many standard deviations of a step: three steps would often exceed it by chance


def at_once(settings: Settings) -> float:
    """Steps from which on the loss of one trial counts as terrible."""
    return AT_ONCE * settings.regret_budget * settings.horizon


class Budget:
    """What is left of the budget of a search.

    Parameters
    ----------
    settings : Settings
    cost : float
        Steps that slower trials of the job have lost, less what faster ones of this epoch have gained.
    doubt : float
        Standard error of `cost`, in steps.
    gain : float
        Share of a step that the best setting surely gains.
    passed : int
        Steps of the job so far, those of trials included.
    steps : float
        Steps of a trial that is not cut short.
    standing : float
        Logarithm of the seconds per step of the standing setting, by all trials.
    usual : float
        Standard deviation of one step's logarithm.

    Attributes
    ----------
    allowance : float
        Steps that may be lost at first.
    spare : float
        Steps that may still be lost.
    lacking : float
        Steps that the job has to make until a search that rests goes on.
    at_once : float
        Steps from which on the loss of one trial counts as terrible.
    """

    def __init__(
        self,
        settings: Settings,
        cost: float,
        doubt: float,
        gain: float,
        passed: int,
        steps: float,
        standing: float,
        usual: float,
    ) -> None:
        shortest = min(float(settings.horizon), settings.shortest / math.exp(standing))
        ran = passed + settings.ran
        self.allowance = max(LEAST_STEPS, settings.regret_budget * shortest)
        most = settings.regret_budget * settings.horizon
        owed = settings.spent + max(cost - gain * max(shortest, ran), -most - settings.refill * ran)
        allowed = max(self.allowance, settings.refill * ran)
        owed += min(doubt, allowed - LEAST_STEPS)  # caution leaves a search the least steps
        self.spare = allowed - owed
        self._steps, self._standing, self._tolerated = steps, standing, max(LEAST_LIMIT, NOISY * usual)
        # Where steps are so short that a minute has more than the horizon, a trial is little of it, whatever it loses.
        uncut = self._tolerated * (steps + settings.settling) if shortest < settings.horizon else 0.0
        uncut = min(uncut, self.allowance - (1.0 - RESERVE) * LEAST_STEPS)
        self._reserve = max(RESERVE * self.allowance, uncut)
        self._kept_back = max(KEPT_BACK * self.allowance, uncut)
        needed = owed + self._kept_back + (ENOUGH - KEPT_BACK) * self.allowance
        self.lacking = 0.0 if needed <= self.allowance else max(0.0, needed / max(settings.refill, 1e-9) - ran)
        self.at_once = at_once(settings)

    @property
    def spent(self) -> bool:
        """Whether one more trial might exceed it: the search has to be careful."""
        return self.spare < self._kept_back

    @property
    def overdrawn(self) -> bool:
        """Whether too little is left for a trial that is slow and not cut short: the search has to rest."""
        return self.spare <= self._reserve

    @property
    def refilled(self) -> bool:
        """Whether there is enough for several trials."""
        return self.lacking <= 0.0

    def limit(self) -> float:
        """Seconds per step above which a trial would lose more than it may."""
        may_lose = min(self.spare - KEPT_BACK * self.allowance, AT_ONCE * self.allowance)
        return math.exp(self._standing) * (1.0 + max(may_lose / self._steps, self._tolerated))

    def shares(self, left: int) -> float:
        """Share by which each of `left` trials may be slower than the standing setting: a few times an equal part."""
        return 3.0 * max(self.spare, 0.02 * self.allowance, 1e-9) / max(left, 3) / self._steps
