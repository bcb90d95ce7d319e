"""Trials of a search so far, in the forms that the policy needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.account import compute_excesses, compute_steps_lost
from autotune.score import USUAL, TrialScore
from autotune.space import Knobs, Space
from autotune.surrogate import Surrogate
from autotune.trials import CompletedTrial, Epoch, Trial, make_setting_key

Array = NDArray[np.float64]

BAD = 0.3  # logarithm of a ratio to the best time above which the surrogate gets compressed values: see `soften_excess`
MOST = 32  # maximum observations, each of a setting in an epoch, from which the surrogate learns
SURE = 2.0  # standard errors of the standing setting by which trials must be faster to count as a gain
WALL = 0.7  # additional standard error of a terrible setting, in multiples of `BAD`: it tells little of its neighbours


class History:
    """Completed trials of all epochs.

    `seed` is the surrogate's. `settling` counts the steps after a change of the knobs that no trial counts.
    """

    def __init__(self, space: Space, seed: int, settling: int) -> None:
        self.told: list[CompletedTrial] = []
        self._space, self._seed, self._settling = space, seed, settling

    def add(self, trial: Trial, epoch: Epoch, samples: list[float], status: str) -> None:
        """Add a completed trial of an epoch, with its samples."""
        score = TrialScore(samples, self.estimate_spread())
        x, standing = self._space.encode(trial.knobs), make_setting_key(epoch.standing)
        self.told.append(
            CompletedTrial(trial, x, epoch.number, samples, status, score, epoch.round, standing, self._settling)
        )

    def select_epoch(self, epoch: int) -> list[CompletedTrial]:
        """Return the trials of an epoch."""
        return [told for told in self.told if told.epoch == epoch]

    def list_measured(self, epoch: int) -> list[Knobs]:
        """Return the settings measured in an epoch, without repetitions."""
        return list({told.key: told.trial.knobs for told in self.select_epoch(epoch)}.values())

    def encode_settings(self, settings: Iterable[Mapping[str, Any]]) -> Array:
        """Return encodings of settings: shape (n, width)."""
        return np.array([self._space.encode(knobs) for knobs in settings])

    def get_reference(self, epoch: int) -> float:
        """Return the logarithm of the seconds per step at the start of an epoch, to which its others are relative."""
        return next(told.score.log for told in self.told if told.epoch == epoch)

    def estimate_spread(self) -> float:
        """Return the standard deviation of one sample's logarithm, from the trials so far."""
        return float(np.median([told.score.spread for told in self.told])) if self.told else USUAL

    def compute_median_steps(self, epoch: int) -> float:
        """Return the median number of steps of trials that were not cut short."""
        return float(np.median([len(told.samples) for told in self.select_epoch(epoch) if told.status == "ok"] or [1]))

    def compute_losses(self, epoch: int) -> list[float]:
        """Return the steps that each trial of an epoch has lost."""
        return compute_steps_lost(self._compute_excesses(epoch), [told.steps for told in self.select_epoch(epoch)])

    def compute_loss_error(self, epoch: int) -> float:
        """Return the uncertainty of an epoch's loss, in steps: all trials share the error of the standing setting."""
        now = self.select_epoch(epoch)
        error = compute_standing_error(now)
        together = zip(self._compute_excesses(epoch), now, strict=True)
        return error * sum(told.steps for each, told in together if told.key != told.standing and each > -SURE * error)

    def compute_gain(self, epoch: int) -> float:
        """Return the steps that trials of an epoch have gained on the standing setting, beyond its uncertainty."""
        now = self.select_epoch(epoch)
        doubt = SURE * compute_standing_error(now)
        together = zip(self._compute_excesses(epoch), now, strict=True)
        return -sum(math.expm1(min(0.0, each + doubt)) * told.steps for each, told in together)

    def _compute_excesses(self, epoch: int) -> list[float]:
        """Return the logarithms of the ratios of each trial's time to that of the standing setting beside it."""
        now = self.select_epoch(epoch)
        logs, errors = [told.score.log for told in now], [told.score.error for told in now]
        return compute_excesses([told.key for told in now], [told.standing for told in now], logs, errors)

    def find_worst_losses(self, epoch: int) -> dict[str, float]:
        """Return the steps lost by the worst trial of each setting."""
        found: dict[str, float] = {}
        for told, lost in zip(self.select_epoch(epoch), self.compute_losses(epoch), strict=True):
            found[told.key] = max(found.get(told.key, 0.0), lost)
        return found

    def fit_surrogate(self, pending: Sequence[Trial], epoch: int) -> Surrogate:
        """Return the surrogate after all trials; pending ones count as if they had the expected result.

        Trials of one setting in one epoch are combined to their mean, because a search often repeats a few settings.
        """
        groups: dict[tuple[int, str], list[CompletedTrial]] = {}
        for told in self.told:
            groups.setdefault((told.epoch, told.key), []).append(told)
        groups = thin_observations(groups)
        references = {number: self.get_reference(number) for number, _ in groups}
        y, errors, scatter = [], [], []
        least = dict.fromkeys(references, 0.0)  # logarithm of the best time of each epoch
        for (number, _), several in groups.items():
            least[number] = min(least[number], average_logs(several) - references[number])
        for (number, _), several in groups.items():
            logs, error = np.array([told.score.log for told in several]), pool_errors(several)
            mean = average_logs(several)
            y.append(least[number] + soften_excess(mean - references[number] - least[number]))
            wall = max(0.0, mean - references[number] - least[number] - BAD)
            stands = several[0].key == several[0].standing  # the reference of proofs keeps its full certainty
            errors.append(error if stands else math.hypot(error, WALL * BAD * math.tanh(wall / BAD)))
            scatter.append(float(((logs - mean) ** 2).sum()))
        x = np.array([several[0].x for several in groups.values()])
        epochs = np.array([number for number, _ in groups])
        counts = np.array([len(several) for several in groups.values()])
        columns = self._space.groups
        everything = np.array(y), np.array(errors), np.array(scatter)
        surrogate = Surrogate(x, *everything[:2], epochs, columns, self._seed, counts, everything[2])
        if not pending:
            return surrogate
        waiting = self.encode_settings(trial.knobs for trial in pending)
        expected, _ = surrogate.predict_mixture(waiting, epoch)
        more = len(waiting)
        return Surrogate(
            np.concatenate([x, waiting]),
            np.concatenate([everything[0], expected]),
            np.concatenate([everything[1], np.full(more, np.median(errors))]),
            np.concatenate([epochs, np.full(more, epoch)]),
            columns,
            self._seed,
            np.concatenate([counts, np.ones(more, dtype=np.int64)]),
            np.concatenate([everything[2], np.zeros(more)]),
        )


def thin_observations(
    groups: dict[tuple[int, str], list[CompletedTrial]],
) -> dict[tuple[int, str], list[CompletedTrial]]:
    """Return at most `MOST` observations, so that the cost of a proposal is bounded.

    First those of older epochs are removed, then those closest to others. Standing settings and those measured more
    than once stay.
    """
    excess = len(groups) - MOST
    if excess <= 0:
        return groups
    newest = max(number for number, _ in groups)
    kept = list(groups.items())
    at = np.array([several[0].x for _, several in kept])
    apart = ((at[:, None] - at[None]) ** 2).sum(axis=2)
    np.fill_diagonal(apart, np.inf)
    old = np.array([number < newest for (number, _), _ in kept])
    firm = np.array([key == several[0].standing or len(several) > 1 for (_, key), several in kept]) & ~old
    left = np.ones(len(kept), dtype=np.bool_)
    for _ in range(excess):
        nearest = np.where(left[None, :], apart, np.inf).min(axis=1) - 1e3 * old + 1e3 * firm
        left[int(np.argmin(np.where(left, nearest, np.inf)))] = False
    return {name: several for (name, several), stays in zip(kept, left, strict=True) if stays}


def average_logs(several: Sequence[CompletedTrial]) -> float:
    """Return the mean of the logarithms of several trials of one setting, weighted by their certainty."""
    weights = [1.0 / (told.score.error**2 + SOFT**2) for told in several]
    return float(np.average([told.score.log for told in several], weights=weights))


SOFT = 0.004  # expected noise between trials, in logarithms: it bounds the weight of one trial


def pool_errors(several: Sequence[CompletedTrial]) -> float:
    """Return the standard error of one trial, such that as many equal trials would be as certain as these together."""
    return math.sqrt(len(several) / sum(1.0 / told.score.error**2 for told in several))


def compute_standing_error(now: Sequence[CompletedTrial]) -> float:
    """Return the standard error of the standing setting over all its trials among these; 0 if there are none."""
    stood = [told for told in now if told.key == told.standing]
    return pool_errors(stood) / math.sqrt(len(stood)) if stood else 0.0


def soften_excess(y: float) -> float:
    """Compress large excesses: how bad a setting is does not matter, and would hide differences of good ones."""
    return y if y < BAD else BAD * (1.0 + math.tanh((y - BAD) / BAD))


def pool_scores(scores: Sequence[TrialScore], noise: float) -> tuple[float, float]:
    """Return the weighted mean of several trials of one setting, and its standard error."""
    weights = np.array([1.0 / (score.error**2 + noise**2) for score in scores])
    return float(weights @ [score.log for score in scores] / weights.sum()), float(1.0 / math.sqrt(weights.sum()))
