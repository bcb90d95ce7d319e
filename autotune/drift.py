"""Page-Hinkley test for drift: whether the deployed setting has permanently become slower or faster."""

from __future__ import annotations

import math

#: Largest deviation of a batch of samples that counts, in its standard errors: one disturbance is not a drift.
MOST = 6.0
#: Deviation that is expected and not counted, in standard errors.
SLACK = 0.75
#: Sum of counted deviations at which a drift is reported and the search reopened.
LIMIT = 15.0
#: Smallest change that can matter, in logarithms of seconds; a third of it is the minimum unit of deviations.
LEAST = 0.03
#: The reference learns from batches until its standard error is this share of a batch's.
SURE = 0.3
#: Maximum distance of the reference from its first value, in its standard errors: beyond it is a drift.
BELIEVED = 2.0


class PageHinkley:
    """Detector of a drift of logarithmic step times from a reference.

    The reference is the expected logarithm of the seconds per step; the first batches reduce its standard error.

    E. S. Page, Continuous inspection schemes, Biometrika 41 (1954).
    """

    def __init__(self, reference: float, error: float) -> None:
        self.reference, self.error = reference, error
        self._within = reference - BELIEVED * error, reference + BELIEVED * error
        self.slower = self.faster = 0.0

    def add(self, log: float, error: float) -> bool:
        """Add a batch's logarithm and its standard error; return whether there is a drift."""
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
