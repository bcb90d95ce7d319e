"""Budget of a search: the steps that its trials may lose, a share of the job so far, which counts as at least a minute.

So a job of any length loses no more than that share to a search that finds nothing. A surely faster setting increases
the budget by its gain over as many steps as the job has run. A spent budget pauses the search: the job's further steps
refill it, and the search resumes when there is enough.
"""

from __future__ import annotations

import math

from autotune.trials import Settings

AT_ONCE = 0.25  # share of the allowance that one trial may lose; of the largest allowance, the loss that is terrible
LEAST_STEPS = 5.0  # steps that may always be lost, however long a step is: as many as a trial that is cut short has
KEPT_BACK = 0.35  # share of the allowance from which a search is careful: it tries only what is probably not slower
RESERVE = 0.15  # share of the allowance at which it pauses, or the loss of a trial that is not cut short, if larger
ENOUGH = 0.6  # share of the allowance at which a paused search resumes
LEAST_LIMIT = 0.05  # excess over the standing setting below which a trial is not cut short
NOISY = 2.0  # the same in standard deviations of a step: three steps would often exceed fewer by chance


def get_terrible_loss(settings: Settings) -> float:
    """Return the number of steps from which the loss of one trial counts as terrible."""
    return AT_ONCE * settings.regret_budget * settings.horizon


class Budget:
    """Rest of the budget of a search.

    `cost` is in steps: those that slower trials of the job have lost, minus those that faster ones of this epoch have
    gained; `doubt` is its standard error. `gain` is the share of a step that the best setting gains with certainty.
    `passed` counts the job's steps so far, including those of trials, and `steps` those of a trial that is not cut
    short. `standing` is the logarithm of the standing setting's seconds per step, from all trials. `usual` is the
    standard deviation of one step's logarithm.
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
        self.allowance = max(LEAST_STEPS, settings.regret_budget * shortest)  # steps that may be lost at the beginning
        most = settings.regret_budget * settings.horizon
        owed = settings.spent + max(cost - gain * max(shortest, ran), -most - settings.refill * ran)
        allowed = max(self.allowance, settings.refill * ran)
        owed += min(doubt, allowed - LEAST_STEPS)  # caution always leaves LEAST_STEPS to a search
        self.spare = allowed - owed  # steps that may still be lost
        self._steps, self._standing, self._tolerated = steps, standing, max(LEAST_LIMIT, NOISY * usual)
        # If a minute has more steps than the horizon, a trial is a small part of it, whatever it loses.
        uncut = self._tolerated * (steps + settings.settling) if shortest < settings.horizon else 0.0
        uncut = min(uncut, self.allowance - (1.0 - RESERVE) * LEAST_STEPS)
        self._reserve = max(RESERVE * self.allowance, uncut)
        self._kept_back = max(KEPT_BACK * self.allowance, uncut)
        needed = owed + self._kept_back + (ENOUGH - KEPT_BACK) * self.allowance
        # Steps that the job must make until a paused search resumes
        self.lacking = 0.0 if needed <= self.allowance else max(0.0, needed / max(settings.refill, 1e-9) - ran)
        self.at_once = get_terrible_loss(settings)  # steps from which the loss of one trial counts as terrible

    @property
    def spent(self) -> bool:
        """True if one more trial might exceed the budget, so the search has to be careful."""
        return self.spare < self._kept_back

    @property
    def overdrawn(self) -> bool:
        """True if too little is left for a slow trial that is not cut short, so the search has to pause."""
        return self.spare <= self._reserve

    @property
    def refilled(self) -> bool:
        """True if there is enough for several trials."""
        return self.lacking <= 0.0

    def compute_limit(self) -> float:
        """Return the seconds per step above which a trial would lose more than it may."""
        may_lose = min(self.spare - KEPT_BACK * self.allowance, AT_ONCE * self.allowance)
        return math.exp(self._standing) * (1.0 + max(may_lose / self._steps, self._tolerated))

    def compute_trial_share(self, left: int) -> float:
        """Return the share by which each of `left` trials may be slower than the standing one: several equal parts."""
        return 3.0 * max(self.spare, 0.02 * self.allowance, 1e-9) / max(left, 3) / self._steps
