"""Page-Hinkley's test: has what is deployed become slower, or faster, for good?"""

from __future__ import annotations

import math

#: Of one batch, in its standard errors, at most: a single disturbance, however large, is no drift.
MOST = 6.0
#: What is not counted as a deviation, in standard errors.
SLACK = 0.75
#: Sum of deviations at which the search is opened again.
LIMIT = 15.0
#: Smallest change that can matter, in logarithms of seconds: deviations are measured in no less than a third of it.
LEAST = 0.03
#: The reference is sure enough when its error is this share of a batch's.
SURE = 0.3
#: How far it may move from what it was at first, in its standard errors: what is farther away is a drift.
BELIEVED = 2.0


class PageHinkley:
    """Watches logarithms of step times against what they were at first.

    Parameters
    ----------
    reference, error : float
        What they are expected to be, and how sure that is: its standard error. The first batches make it surer.

    References
    ----------
    E. S. Page, Continuous inspection schemes, Biometrika 41 (1954).
    """

    def __init__(self, reference: float, error: float) -> None:
        self.reference, self.error = reference, error
        self._within = reference - BELIEVED * error, reference + BELIEVED * error
        self.slower = self.faster = 0.0

    def add(self, log: float, error: float) -> bool:
        """Take note of a batch and of its standard error; whether there is a drift."""
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
