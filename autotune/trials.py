"""Data types of the policy: its settings, its trials, and the epochs to which they belong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autotune.score import TrialScore
from autotune.space import Knobs

Array = NDArray[np.float64]
Phase = Literal["default", "design", "search", "confirm"]


class PolicyError(ValueError):
    """Error of an unusable policy or setting; the text names the option and its valid values."""


@dataclass(frozen=True)
class Settings:
    """Settings of the policy.

    Attributes
    ----------
    abort_above : float
        Multiple of the best known time from which a trial may be cut short after its first steps.
    spent : float
        Steps that trials have lost in earlier searches of the same job; they count against the budget.
    ran : int
        Steps of the job before this search, including those of earlier searches.
    regret_budget : float
        Share of the shortest job that trials slower than the default may lose, until the job is longer.
    shortest : float
        Length of the shortest job: a minute, in the unit of the samples.
    horizon : int
        Maximum number of steps that the shortest job counts as.
    refill : float
        Share of the steps so far that trials may lose, once that is more.
    settling : int
        Steps after a change of the knobs that no trial counts, and that cost as much as its others.
    worth : float
        Improvement, as a share, below which a setting is not worth deploying.
    proof : float
        Standard deviations by which a setting must be better than the default. It is a sum of two: by the surrogate,
        which has all trials, and by the measurements made to confirm it, which are free of selection bias.
    least : float
        Standard deviations that each of the two must show by itself.
    hope : float
        Expected improvement, as a share, below which further search is pointless.
    after_drift : int
        Maximum number of trials of a search that a drift has reopened.
    background : int
        Number of trials of a background round after the search has ended; 0: no rounds.
    interval : int
        Number of steps from the end of a search to the first round.
    patience : float
        Factor by which the interval grows after a round that has changed nothing.
    """

    abort_above: float = 1.5
    regret_budget: float = 0.02
    shortest: float = 60.0
    horizon: int = 2000
    worth: float = 0.01
    proof: float = 7.0
    least: float = 2.0
    hope: float = 0.001
    after_drift: int = 15
    refill: float = 0.02
    background: int = 8
    interval: int = 400
    patience: float = 1.5
    settling: int = 2
    spent: float = 0.0
    ran: int = 0


MOST_TRIALS = 1 << 20  # maximum trials of a search; each uses some memory
LARGEST_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Trial:
    """Setting to measure.

    Attributes
    ----------
    id : int
    knobs : dict
    phase : str
        Phase: `default`, `design`, `search` or `confirm`.
    why : str
        Reason, for the user.
    limit : float
        Seconds per step. If the median of the first three steps is above, the trial can be cut short: report it with
        `status="aborted"`. Infinite as long as nothing is known.
    """

    id: int
    knobs: Knobs
    phase: Phase
    why: str
    limit: float = math.inf


@dataclass
class CompletedTrial:
    """Completed trial."""

    trial: Trial
    x: Array
    epoch: int
    samples: list[float]
    status: str
    score: TrialScore
    round: int = 0
    standing: str = ""  # key of the setting that the trial had to beat
    settling: int = 0  # steps after the change that were not counted
    key: str = field(init=False)  # key of the trial's setting

    def __post_init__(self) -> None:
        self.key = make_setting_key(self.trial.knobs)

    @property
    def steps(self) -> int:
        """Number of the job's steps that the trial took."""
        return len(self.samples) + self.settling


@dataclass
class Epoch:
    """Search from its first trial to its decision, with the rounds in which it continues later."""

    number: int
    standing: Knobs  # setting that others have to beat
    allowed: int  # maximum number of trials
    baseline: list[Knobs]  # settings to measure first
    design: list[Knobs] = field(default_factory=list)
    outward: dict[str, Knobs] = field(default_factory=dict)  # corner beyond each half-way setting, by the latter's key
    corners: int = 0  # corners that may still be added to the design
    used: int = 0
    round: int = 0
    idle: int = 0  # steps since the last trial
    interval: float = 0.0  # steps without a trial after which a round begins
    resting: bool = False  # the search waits until its budget has refilled
    origin: Knobs = field(init=False)  # the first standing setting

    def __post_init__(self) -> None:
        self.origin = self.standing


def make_setting_key(knobs: Knobs) -> str:
    """Return a text that is equal for equal settings."""
    return repr(knobs)
