"""Data of the policy: its settings, its trials, and the epochs to which they belong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autotune.score import Score
from autotune.space import Knobs

Array = NDArray[np.float64]
Phase = Literal["default", "design", "search", "confirm"]


class PolicyError(ValueError):
    """A policy or a setting of it that cannot be used: says which option, and what it takes."""


@dataclass(frozen=True)
class Settings:
    """Settings of the policy.

    Attributes
    ----------
    abort_above : float
        A trial whose first steps take this many times the best known may be cut short.
    spent : float
        Steps that trials have lost in earlier searches of the same job, which count against what these may lose.
    ran : int
        Steps of the job before this search, those of earlier searches included.
    regret_budget : float
        Share of the shortest job that trials slower than the default may lose, before the job has become longer.
    shortest : float
        Length of that job: a minute, in the unit of the samples.
    horizon : int
        Most steps that it counts as.
    refill : float
        Share of the steps so far that trials may lose, once that is more.
    settling : int
        Steps after a change of the knobs that no trial counts, and that cost as much as its others.
    worth : float
        Improvement, as a share, below which a setting is not worth deploying.
    proof : float
        Standard deviations by which a setting must be better than the default: those of the surrogate, which knows all
        trials, and those of the measurements made to confirm it, which nothing has selected, added up.
    least : float
        Standard deviations that each of the two must show by itself.
    hope : float
        Expected improvement, as a share, below which searching on is pointless.
    after_drift : int
        Most trials of a search that a drift has opened again.
    background : int
        Trials of a background round after the search has ended; 0: there are no rounds.
    interval : int
        Steps from the end of a search to the first round.
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


MOST_TRIALS = 1 << 20  # of a search; some memory goes with each
LARGEST_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Trial:
    """A setting to measure.

    Attributes
    ----------
    id : int
    knobs : dict
    phase : str
        `default`, `design`, `search` or `confirm`.
    why : str
        The reason, for people.
    limit : float
        Seconds. When the median of the first three steps is above, the rest need not be waited for: tell the trial with
        `status="aborted"`. Infinite as long as nothing is known.
    """

    id: int
    knobs: Knobs
    phase: Phase
    why: str
    limit: float = math.inf


@dataclass
class Told:
    """A trial with its result."""

    trial: Trial
    x: Array
    epoch: int
    samples: list[float]
    status: str
    score: Score
    round: int = 0
    standing: str = ""  # key of the setting that it had to beat
    settling: int = 0  # steps after the change that were not counted
    key: str = field(init=False)  # key of its setting

    def __post_init__(self) -> None:
        self.key = key(self.trial.knobs)

    @property
    def steps(self) -> int:
        """Steps of the job that it took."""
        return len(self.samples) + self.settling


@dataclass
class Epoch:
    """A search, from its first trial to its decision, and the rounds by which it goes on later."""

    number: int
    standing: Knobs  # setting that others have to beat
    allowed: int  # most trials
    baseline: list[Knobs]  # settings to measure first
    design: list[Knobs] = field(default_factory=list)
    outward: dict[str, Knobs] = field(default_factory=dict)  # corner beyond each setting half way to one, by its key
    corners: int = 0  # corners that may still be added to the design
    used: int = 0
    round: int = 0
    idle: int = 0  # steps since the last trial
    interval: float = 0.0  # steps without a trial, after which a round begins
    resting: bool = False  # the search waits until its budget has refilled
    origin: Knobs = field(init=False)  # the first standing setting

    def __post_init__(self) -> None:
        self.origin = self.standing


def key(knobs: Knobs) -> str:
    """A text that is equal for equal settings."""
    return repr(knobs)
