"""State of a search: its trials, its epoch, and the beliefs that follow from them until the next result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autotune import design
from autotune.budget import Budget, get_terrible_loss
from autotune.history import History, average_logs
from autotune.proof import Proof
from autotune.space import Knobs, Space
from autotune.surrogate import Surrogate
from autotune.trials import CompletedTrial, Epoch, Settings, Trial, make_setting_key

Array = NDArray[np.float64]

WORSE = 0.05  # logarithm of a ratio of times above which a setting on the way to a corner is not pursued further


class SearchState:
    """Trials, completed and pending, and the beliefs that they support."""

    def __init__(self, space: Space, seed: int, settings: Settings, epoch: Epoch, first: Sequence[Knobs]) -> None:
        self.space, self.seed, self.settings, self.epoch = space, seed, settings, epoch
        self.first = first  # settings that were given to be tried first
        self.history = History(space, seed, settings.settling)  # completed trials so far
        self.pending: dict[int, Trial] = {}  # trials without a result yet, by number
        self.asked = 0  # number of trials asked for so far
        self.passed = 0  # steps of the job since the first trial began
        self._known: tuple[object, Surrogate] | None = None
        self._balance: tuple[object, Budget] | None = None

    @property
    def left(self) -> int:
        """Number of trials that the epoch may still ask for."""
        return self.epoch.allowed - self.epoch.used

    @property
    def lost(self) -> float:
        """Steps that all trials so far have lost."""
        return sum(sum(self.history.compute_losses(number)) for number in range(self.epoch.number + 1))

    @property
    def searched(self) -> int:
        """Number of trials of this epoch that the surrogate proposed."""
        return sum(told.trial.phase == "search" for told in self.list_trials())

    def record_trial(self, trial: Trial, samples: list[float], status: str) -> None:
        """Add a completed trial, and adapt the rest of the design to it."""
        epoch = self.epoch
        self.history.add(trial, epoch, samples, status)
        self.passed += self.history.told[-1].steps
        epoch.idle = 0
        corner = epoch.outward.pop(make_setting_key(trial.knobs), None)
        slower = self.history.told[-1].score.log - self.history.get_reference(epoch.number)
        if corner is not None and epoch.corners > 0 and slower < WORSE:
            epoch.design.append(corner)
            epoch.corners -= 1
        terrible = self.history.compute_losses(epoch.number)[-1] > get_terrible_loss(self.settings)
        if terrible:  # the rest of the design may be as bad
            epoch.design = [
                knobs if knobs in self.first else design.move_half_way(self.space, knobs, epoch.standing)
                for knobs in epoch.design
            ]

    def pass_steps(self, steps: int) -> None:
        """Count steps of the job outside trials."""
        self.passed += steps
        self.epoch.idle += steps

    def list_trials(self) -> list[CompletedTrial]:
        """Return the trials of this epoch."""
        return self.history.select_epoch(self.epoch.number)

    def select_good_settings(self) -> Array:
        """Return measured settings that are not much slower than the fastest: shape (n, w)."""
        slowest = min(told.score.log for told in self.list_trials()) + math.log(self.settings.abort_above)
        return np.array([told.x for told in self.list_trials() if told.score.log <= slowest])

    def get_surrogate(self) -> Surrogate:
        """Return the surrogate after all trials so far; pending ones count with the expected result."""
        state = len(self.history.told), tuple(self.pending), self.epoch.number
        if self._known is None or self._known[0] != state:
            self._known = state, self.history.fit_surrogate(list(self.pending.values()), self.epoch.number)
        return self._known[1]

    def build_proof(self) -> Proof:
        """Return the comparison of settings with the standing one, based on all trials."""
        return Proof(self.history, self.get_surrogate(), self.epoch, self.settings)

    def get_budget(self) -> Budget:
        """Return the current budget of the job's trials."""
        epoch = self.epoch
        state = len(self.history.told), tuple(self.pending), epoch.number, epoch.round, self.passed
        if self._balance is None or self._balance[0] != state:
            stood = [told for told in self.list_trials() if told.trial.knobs == epoch.standing]
            standing = average_logs(stood) if stood else 0.0
            gain = self.build_proof().compute_least_gain() if stood else 0.0
            steps = self.history.compute_median_steps(epoch.number)
            cost = self.lost - self.history.compute_gain(epoch.number)
            doubt = self.history.compute_loss_error(epoch.number)
            usual = self.history.estimate_spread()
            self._balance = state, Budget(self.settings, cost, doubt, gain, self.passed, steps, standing, usual)
        return self._balance[1]

    def compute_limit(self, knobs: Knobs, *, bounded: bool) -> float:
        """Return the seconds per step above which a trial is a waste or, if `bounded`, would lose more than it may."""
        fastest = min((told.score.log for told in self.list_trials() if told.status == "ok"), default=math.inf)
        if fastest == math.inf:
            return math.inf
        limit = math.exp(fastest) * self.settings.abort_above
        known = [told for told in self.list_trials() if told.trial.knobs == knobs]
        if not bounded and known and average_logs(known) < math.log(limit):
            return math.inf  # if its first steps are slow, that is chance, and a trial cut short would have only these
        return min(limit, self.get_budget().compute_limit()) if bounded else limit
