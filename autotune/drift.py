"""Page-Hinkley's test for drift: whether the deployed setting has become slower, or faster, for good."""

from __future__ import annotations

import math

#: Largest deviation that a batch of samples counts for, in its standard errors: one disturbance is no drift.
MOST = 6.0
#: Deviation that is expected and not counted, in standard errors.
SLACK = 0.75
#: Sum of counted deviations at which a drift is reported, and the search opened again.
LIMIT = 15.0
#: Smallest change that can matter, in logarithms of seconds: deviations are measured in no less than a third of it.
LEAST = 0.03
#: The reference learns from batches until its standard error is this share of a batch's.
SURE = 0.3
#: Farthest that the reference moves from its first value, in its standard errors: beyond that lies a drift.
BELIEVED = 2.0


class PageHinkley:
    """Watches logarithms of step times against what they were at first.

    Parameters
    ----------
    reference, error : float
        Expected logarithm of the seconds per step, and its standard error, which the first batches reduce.

    References
    ----------
    E. S. Page, Continuous inspection schemes, Biometrika 41 (1954).
    """

    def __init__(self, reference: float, error: float) -> None:
        self.reference, self.error = reference, error
        self._within = reference - BELIEVED * error, reference + BELIEVED * error
        self.slower = self.faster = 0.0

    def add(self, log: float, error: float) -> bool:
        """Count a batch: its logarithm and standard error. Returns whether there is a drift."""
        unit = max(math.hypot(error, self.error), LEAST / 3.0)
        deviation = min(max((log - self.reference) / unit, -MOST), MOST)
        self.slower = max(0.0, self.slower + deviation - SLACK)
        self.faster = max(0.0, self.faster - deviation - SLACK)
        if self.error > SURE * error and abs(deviation) < MOST / 2:
            mine, its = self.error**-2, error**-2
            learnt = (mine * self.reference + its * log) / (mine + its)
            self.reference = min(max(learnt, self._within[0]), self._within[1])
            self.error = (mine + its) ** -0.5
        return max(self.slower, self.faster) >= LIMIT
