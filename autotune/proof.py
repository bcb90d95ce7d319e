"""Proof that a setting is better: which setting to confirm, by how many trials, and when that is enough."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune.history import BAD, History, average_logs, pool_errors, pool_scores
from autotune.space import Knobs
from autotune.surrogate import Surrogate
from autotune.trials import CompletedTrial, Epoch, Settings, make_setting_key

LEAST_PAIRS = 2  # minimum pairs of alternating trials for a proof: between two, the whole machine may change
SURE = 2.5  # standard deviations by which a gain is discounted before trials may lose time for it
CAREFUL = 5.0  # pairs planned to confirm a setting, in multiples of those of which half would prove it
AFFORDABLE = 0.5  # share of a search's trials that may be used to confirm
OFTEN = 3.0  # factor by which a noisy standing setting is measured less often than comparisons alone would need
EQUALS = 0.4  # share of the proof needed to replace one setting better than the default by another such setting
OUT_OF_REACH = 2.0  # multiple of the affordable trials beyond which a proof is left to a later round


class Proof:
    """Comparison of settings with the standing one, based on all trials."""

    def __init__(self, history: History, surrogate: Surrogate, epoch: Epoch, settings: Settings) -> None:
        self._history, self._surrogate, self._epoch, self._settings = history, surrogate, epoch, settings
        self._now = history.select_epoch(epoch.number)
        self._again: dict[str, list[CompletedTrial]] = {}  # trials of phase `confirm`, by setting
        for told in self._now:
            if told.trial.phase == "confirm":
                self._again.setdefault(told.key, []).append(told)

    def compute_gap(self, knobs: Knobs, other: Knobs | None = None) -> tuple[float, float]:
        """Return mean and deviation of log(time of a setting / time of another), by default the standing one."""
        at = self._history.encode_settings([knobs, self._epoch.standing if other is None else other])
        return self._surrogate.predict_difference(at[0], at[1], self._epoch.number)

    def compute_least_gain(self) -> float:
        """Return a lower bound of the share of a step that the challenger gains; 0 if there is none."""
        challenger = self.find_challenger()
        if challenger is None:
            return 0.0
        gap, deviation = self.compute_gap(challenger)
        return -math.expm1(min(0.0, gap + SURE * deviation))

    def compute_gain(self, knobs: Knobs) -> tuple[float, float]:
        """Return the gap to the first standing setting, for reports; a large one as measured, not as compressed."""
        gap, deviation = self.compute_gap(knobs, self._epoch.origin)
        if gap > -BAD:
            return gap, deviation
        mine, first = ([told for told in self._now if told.trial.knobs == each] for each in (knobs, self._epoch.origin))
        return average_logs(mine) - average_logs(first), deviation

    def is_proven(self, knobs: Knobs) -> bool:
        """Return whether fresh measurements and the surrogate both show that a setting beats the standing one."""
        if knobs == self._epoch.standing or not self._get_confirmations(knobs):
            return False
        shown = self._compute_significance(knobs)
        if shown is None:
            return False
        least, enough = self._get_required_margins(knobs)
        gap, deviation = self.compute_gap(knobs)
        if gap > -max(self._settings.worth, least * deviation):
            return False
        return shown > least and shown - gap / deviation > enough

    def _get_required_margins(self, knobs: Knobs) -> tuple[float, float]:
        """Return the standard deviations that a proof must show: by each of its two parts, and by their sum.

        The first standing setting is the user's choice, so replacing it needs the full proof. If two settings are both
        better than it, the one that is probably faster is deployed: a mistake costs only their difference.
        """
        settings = self._settings
        if self._epoch.standing != self._epoch.origin:
            gap, deviation = self.compute_gap(knobs, self._epoch.origin)
            if gap < -max(settings.worth, settings.proof / 2 * deviation):
                return settings.least / 2, settings.proof * EQUALS
        # Each round is another chance to be lucky, so later rounds must show more.
        return settings.least, settings.proof + math.sqrt(self._epoch.round)

    def still_holds(self, knobs: Knobs) -> bool:
        """Return whether a setting proven earlier is still believed to be better than the standing one."""
        gap, deviation = self.compute_gap(knobs)
        return gap < -max(self._settings.worth, deviation)

    def is_standing_vague(self) -> bool:
        """Return whether the standing setting, the reference of all others, should be measured again.

        To compare it with k others, sqrt(k) trials would be best; pairs that confirm follow later.
        """
        challenger = self.find_challenger()
        if challenger is not None and self._is_clear(challenger):
            return False
        mine = [told for told in self._now if told.key == make_setting_key(self._epoch.standing)]
        error = pool_errors(mine) / math.sqrt(len(mine)) if mine else 0.0
        return error > self._settings.worth and OFTEN * len(mine) ** 2 < len(self._now) - len(mine)

    def _is_clear(self, knobs: Knobs) -> bool:
        """Return whether a setting is so much better than the standing one that two fresh pairs suffice."""
        gap, deviation = self.compute_gap(knobs)
        return -gap > self._settings.proof * deviation

    def find_challenger(self) -> Knobs | None:
        """Return the measured setting that is believed best, if it is worth deploying."""
        number, worth = self._epoch.number, self._settings.worth
        others = [knobs for knobs in self._history.list_measured(number) if knobs != self._epoch.standing]
        if not others:
            return None
        mean, _ = self._surrogate.predict_mixture(self._history.encode_settings(others), number)
        confirmed = [len(self._get_confirmations(knobs)) for knobs in others]
        doubt = max(worth, self._surrogate.noise)  # for confirmed settings, not given up for a small gain
        near = [k for k in range(len(others)) if mean[k] <= mean.min() + (doubt if confirmed[k] else worth)]
        k = max(near, key=lambda k: (confirmed[k], -mean[k]))  # prefer settings that have been confirmed already
        return others[k] if self.compute_gap(others[k])[0] < -worth else None

    def count_reserved_trials(self, challenger: Knobs) -> int:
        """Return the trials that a search reserves to confirm a challenger; fewer if the proof is out of reach."""
        if self.is_proven(challenger):
            return 0
        affordable, needed = self._count_affordable_trials(), self._count_needed_trials(challenger)
        if self._epoch.round:
            return affordable
        least = min(2 * LEAST_PAIRS, affordable)
        return least if needed > OUT_OF_REACH * affordable else min(max(int(needed), least), affordable)

    def is_in_reach(self, challenger: Knobs) -> bool:
        """Return whether a challenger can be proven within the trials of one search."""
        return self._count_needed_trials(challenger) <= OUT_OF_REACH * self._count_affordable_trials()

    def choose_turn(self, challenger: Knobs, pending: Sequence[Knobs]) -> Knobs:
        """Choose the setting of a round to measure next: the challenger or the standing one."""
        turns = [told.key for told in self._now if told.trial.phase == "confirm" and told.round == self._epoch.round]
        turns += map(make_setting_key, pending)
        standing = self._epoch.standing
        made, other = (turns.count(make_setting_key(knobs)) for knobs in (standing, challenger))
        return standing if made <= other else challenger

    def _count_needed_trials(self, challenger: Knobs) -> float:
        gap = self.compute_gap(challenger)[0]
        error = math.hypot(float(np.median([told.score.error for told in self._now])), self._surrogate.noise)
        pairs = CAREFUL * (self._settings.proof / 2 * error / gap) ** 2
        return 2.0 * math.ceil(min(pairs, 1e6))

    def _count_affordable_trials(self) -> int:
        if self._epoch.round:
            return max(2, self._settings.background - 2)
        return max(2, int(AFFORDABLE * self._epoch.allowed))

    def _get_confirmations(self, knobs: Knobs) -> list[CompletedTrial]:
        return self._again.get(make_setting_key(knobs), [])

    def _compute_significance(self, knobs: Knobs) -> float | None:
        """Return by how many standard errors a setting was faster in alternating trials, combined over rounds."""
        mine, theirs = self._get_confirmations(knobs), self._get_confirmations(self._epoch.standing)
        noise = self._surrogate.noise
        gains, errors = [], []
        for number in {told.round for told in mine} & {told.round for told in theirs}:
            fresh, error = pool_scores([told.score for told in mine if told.round == number], noise)
            stands, error_too = pool_scores([told.score for told in theirs if told.round == number], noise)
            gains.append(stands - fresh)
            errors.append(math.hypot(error, error_too))
        if not gains:
            return None
        weights = 1.0 / np.square(errors)
        return float(weights @ gains / math.sqrt(weights.sum()))
