"""The tuner: which setting to try next, and which to deploy. Pure: it measures nothing, and asks no clock.

A search goes through four phases. The *default* is measured first, as what everything is compared with. A *design* of a
few settings, spread over the space, gives the surrogate something to go by. The *search* proposes the setting with the
greatest expected improvement. To *confirm*, the best setting found is measured again in turns with the default, since
the best of many noisy measurements looks better than it is. Only a setting that these fresh measurements, and the
surrogate with all it knows, show to be better than the default is ever deployed.

After that `observe` watches the deployed setting. A drift opens the search again: an epoch, in which old measurements
count as those of a surface that resembles today's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from autotune.acquisition import NEAREST, around, candidates, log_expected_improvement
from autotune.budget import Budget
from autotune.drift import PageHinkley
from autotune.robust import Score
from autotune.space import Knobs, Space
from autotune.surrogate import Surrogate, sequence
from autotune.trials import Epoch, Phase, Settings, Told, Trial

Array = NDArray[np.float64]


class Tuner:
    """Finds the setting with the least time per step, by trials.

    Parameters
    ----------
    space : Space
    default : mapping
        What is deployed unless something else is proven better. The first trial.
    seed : int
        Equal seeds and samples give equal proposals, bit for bit under equal versions of numpy and scipy.
    max_trials : int
        `ask` calls until `done`, repetitions of the default and of the best included.
    first : sequence of mapping
        Settings to try right after the default: what was best the last time, or by a model of the transport.
    settings : Settings, optional
    journal : callable, optional
        Called with each row of the log, a dict in JSON's types, as it happens: `Journal(path)` writes them down.

    Raises
    ------
    ValueError
        `default` or one of `first` is not in the space; no trials.

    Examples
    --------
    >>> tuner = Tuner(space, default={"fusion_threshold": 1 << 27}, seed=0, max_trials=20)
    >>> while not tuner.done:
    ...     trial = tuner.ask()
    ...     tuner.tell(trial.id, measure(trial.knobs))
    >>> tuner.best()
    """

    def __init__(
        self,
        space: Space,
        default: Mapping[str, Any],
        seed: int = 0,
        max_trials: int = 20,
        first: Sequence[Mapping[str, Any]] = (),
        settings: Settings | None = None,
        journal: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if max_trials < 1:
            raise ValueError(f"max_trials is 1 or more, not {max_trials}")
        self.space = space
        self.default = space.check(default, "the default")
        self.first = [space.check(knobs, f"setting {k} of first") for k, knobs in enumerate(first)]
        self.seed, self.max_trials, self.settings = seed, max_trials, settings or Settings()
        self.history: list[Told] = []
        self._pending: dict[int, Trial] = {}
        self._asked = 0
        self._deployed = self.default
        self._done = False
        self._watch: PageHinkley | None = None
        self._known: tuple[object, Surrogate] | None = None
        self._found: tuple[object, tuple[Knobs, float]] | None = None
        self._epoch = Epoch(0, self.default, max_trials, [self.default], self.first + self._designed())
        self._write = journal if journal is not None else lambda row: None
        self._write(
            {
                "row": "open",
                "seed": seed,
                "max_trials": max_trials,
                "space": space.describe(),
                "default": self.default,
                "first": self.first,
                "settings": asdict(self.settings),
            }
        )

    # What a caller does

    @property
    def done(self) -> bool:
        """Whether the search is over: then `best()` is its result, and `observe` watches it."""
        return self._done

    def ask(self, as_logged: tuple[Mapping[str, Any], float] | None = None) -> Trial:
        """The next trial. Each call counts; what is asked and not yet told is taken to be as expected.

        Parameters
        ----------
        as_logged : (mapping, float), optional
            For a replay on another machine: a setting to take instead of the proposal, if it is as promising up to that
            share of its expected improvement.

        Raises
        ------
        RuntimeError
            The search is over.
        """
        if self._done:
            raise RuntimeError("the search is over: best() has its result, and observe() may open it again")
        knobs, phase, why = self._propose()
        if as_logged is not None and phase == "search":
            logged, tolerance = self.space.check(as_logged[0]), as_logged[1]
            if self._promise(logged) >= (1.0 - tolerance) * self._promise(knobs):
                knobs = logged
        return self._issue(knobs, phase, why)

    def tell(self, trial_id: int, samples: Sequence[float], status: str = "ok", exposed: float | None = None) -> None:
        """What was measured.

        Parameters
        ----------
        trial_id : int
            Of a trial that was asked for and not told.
        samples : sequence of float
            Seconds of each step, warm-up left out. At least one.
        status : str
            `"ok"`, or `"aborted"` for a trial that was cut short.
        exposed : float, optional
            Share of a step spent waiting for communication, 0 to 1: for the journal, and nothing is decided by it.

        Raises
        ------
        ValueError
            No such trial; no samples, or some that are not positive and finite; another status; no share.
        """
        trial = self._pending.get(trial_id)
        if trial is None:
            open_ = ", ".join(map(str, self._pending)) or "none"
            raise ValueError(f"trial {trial_id} is not waiting to be told; these are: {open_}")
        if status not in ("ok", "aborted"):
            raise ValueError(f"a trial's status is 'ok' or 'aborted', not {status!r}")
        values = _checked(samples, f"trial {trial_id}")
        told = {} if exposed is None else {"exposed": float(exposed)}
        if not 0.0 <= told.get("exposed", 0.0) <= 1.0:
            raise ValueError(f"exposed is a share of a step, 0 to 1, not {exposed}")
        del self._pending[trial_id]
        self._write({"row": "tell", "id": trial_id, "status": status, "samples": values, **told})
        self._remember(trial, values, status)
        if not self._pending:
            self._conclude()

    def best(self) -> Knobs:
        """The setting to deploy: the default, or what was deployed before a drift, unless another is proven better."""
        return dict(self._deployed)

    def observe(self, samples: Sequence[float]) -> bool:
        """Watch the deployed setting, once the search is over.

        Parameters
        ----------
        samples : sequence of float
            Seconds of each step.

        Returns
        -------
        bool
            Whether a drift has just opened the search again.
        """
        values = _checked(samples, "what is deployed")
        if not self._done:
            return False
        self._write({"row": "observe", "samples": values})
        score = Score(values, self._usual())
        if self._watch is None:
            known = [told.score for told in self._now() if told.trial.knobs == self._deployed]
            self._watch = PageHinkley(*_pooled(known, self._surrogate().noise))
        if not self._watch.add(score.log, score.error):
            return False
        self._reopen()
        return True

    def believe(self, settings: Sequence[Mapping[str, Any]]) -> tuple[Array, Array]:
        """What is expected of settings: mean and standard deviation of log(time / time of what stood), shapes (n,)."""
        return self._surrogate().mixture(self._encoded(settings), self._epoch.number)

    def load(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take over the trials and decisions of a log, whatever would have been proposed or decided here."""
        asked: dict[int, Mapping[str, Any]] = {}
        for row in rows:
            if row["row"] == "ask":
                asked[row["id"]] = row
            elif row["row"] == "tell":
                ask = asked[row["id"]]
                trial = Trial(row["id"], self.space.check(ask["knobs"]), ask["phase"], ask["why"])
                self._remember(trial, row["samples"], row["status"])
            elif row["row"] == "decide":
                self._deployed = self.space.check(row["knobs"])
                if row["decision"] == "reopen":
                    self._reopen()

    # How it decides

    def _propose(self) -> tuple[Knobs, Phase, str]:
        """The next setting, its phase and the reason."""
        epoch = self._epoch
        if epoch.baseline:
            return epoch.baseline[0], "default", "what everything is compared with"
        if epoch.design and self._left() > 2 and not self._budget().spent:
            given = epoch.number == 0 and epoch.design[0] in self.first
            return epoch.design[0], "design", "given to be tried first" if given else "spread over the space"
        surrogate = self._surrogate()
        challenger = self._challenger(surrogate)
        knobs, hope = self._most_promising(surrogate)
        if challenger is not None:
            needed = self._needed(surrogate, challenger)
            if self._left() <= needed or hope < self.settings.hope or self._budget().spent:
                return self._confirm(challenger)
        return knobs, "search", f"may be faster by {hope:.2%} of a step on average"

    def _confirm(self, challenger: Knobs) -> tuple[Knobs, Phase, str]:
        """The challenger and what stands, in turns."""
        turns = [told.trial.knobs for told in self._now() if told.trial.phase == "confirm"]
        turns += [trial.knobs for trial in self._pending.values() if trial.phase == "confirm"]
        standing = self._epoch.standing
        if turns.count(standing) <= turns.count(challenger):
            return standing, "confirm", "to compare with, in the same minutes as the best"
        return challenger, "confirm", "the best so far, measured again"

    def _conclude(self) -> None:
        """After a trial: deploy what is proven; see whether the search is over."""
        epoch = self._epoch
        if self._left() > 0 and (epoch.baseline or (epoch.design and self._left() > 2 and not self._budget().spent)):
            return
        surrogate = self._surrogate()
        proven = [knobs for knobs in self._measured() if self._proven(surrogate, knobs)]
        deployed = epoch.standing
        if proven:
            means, _ = surrogate.mixture(self._encoded(proven), epoch.number)
            deployed = proven[int(np.argmin(means))]
        challenger = self._challenger(surrogate)
        settled = challenger is None or challenger == deployed
        hope = self._most_promising(surrogate)[1]
        if self._left() == 0:
            self._finish(surrogate, deployed, "no trials are left")
        elif settled and self._budget().spent:
            self._finish(surrogate, deployed, "trials have lost all the time that they may")
        elif settled and hope < self.settings.hope:
            self._finish(surrogate, deployed, f"one more trial may gain {hope:.2%} of a step on average")
        elif deployed != self._deployed:
            self._deploy(surrogate, deployed, "deploy")

    def _deploy(self, surrogate: Surrogate, knobs: Knobs, decision: str, **more: Any) -> None:
        """Decide for a setting, and say why."""
        standing = self._epoch.standing
        row = {"row": "decide", "decision": decision, "knobs": dict(knobs), **more}
        if knobs == standing:
            row["why"] = "nothing is proven better than what stood"
        else:
            gap, deviation = self._gap(surrogate, knobs)
            row |= {"gap": gap, "deviation": deviation}
            least = -math.expm1(gap + 2 * deviation)
            row["why"] = f"faster by {-math.expm1(gap):.1%} (sure of {least:.1%}) than what stood"
        self._deployed = knobs
        self._write(row)

    def _finish(self, surrogate: Surrogate, knobs: Knobs, because: str) -> None:
        self._deploy(surrogate, knobs, "finish", because=because, trials=self._epoch.used, final=True)
        self._done, self._watch = True, None

    def _reopen(self) -> None:
        """A new epoch: what is deployed is what has to be beaten."""
        baseline = [self._deployed] + [self.default] * (self.default != self._deployed)
        allowed = min(self.settings.after_drift, self.max_trials)
        number = self._epoch.number + 1
        self._epoch = Epoch(number, self._deployed, allowed, baseline)
        self._done = False
        why = "the deployed setting's step times are no longer what they were"
        self._write({"row": "decide", "decision": "reopen", "knobs": dict(self._deployed), "why": why})

    def _issue(self, knobs: Knobs, phase: Phase, why: str) -> Trial:
        epoch = self._epoch
        for waiting in (epoch.baseline, epoch.design):
            if waiting and waiting[0] == knobs:
                waiting.pop(0)
                break
        limit = self._limit(phase)
        trial = Trial(self._asked, dict(knobs), phase, why, limit)
        self._pending[trial.id] = trial
        self._asked += 1
        limited = {"limit": limit} if limit < math.inf else {}
        self._write({"row": "ask", "id": trial.id, "knobs": trial.knobs, "phase": phase, "why": why, **limited})
        epoch.used += 1
        return trial

    def _limit(self, phase: Phase) -> float:
        """Seconds per step above which a trial is not worth its time, or would lose more than trials may."""
        fastest = min((told.score.log for told in self._now() if told.status == "ok"), default=math.inf)
        if fastest == math.inf:
            return math.inf
        limit = math.exp(fastest) * self.settings.abort_above
        if phase in ("default", "confirm"):
            return limit
        return min(limit, self._budget().limit())

    def _proven(self, surrogate: Surrogate, knobs: Knobs) -> bool:
        """Whether fresh measurements, and the surrogate, show that a setting is better than what stands."""
        standing = self._epoch.standing
        if knobs == standing:
            return False
        again = [told for told in self._now() if told.trial.phase == "confirm"]
        mine = [told.score for told in again if told.trial.knobs == knobs]
        theirs = [told.score for told in again if told.trial.knobs == standing]
        if not mine or not theirs:
            return False
        gap, deviation = self._gap(surrogate, knobs)
        if gap > -max(self.settings.worth, self.settings.least * deviation):
            return False
        noise = surrogate.noise
        fresh, error = _pooled(mine, noise)
        stands, error_too = _pooled(theirs, noise)
        shown = (stands - fresh) / math.hypot(error, error_too)
        return shown > self.settings.least and shown - gap / deviation > self.settings.proof

    def _challenger(self, surrogate: Surrogate) -> Knobs | None:
        """The measured setting that is best by all that is known, if it is worth deploying."""
        others = [knobs for knobs in self._measured() if knobs != self._epoch.standing]
        if not others:
            return None
        mean, _ = surrogate.mixture(self._encoded(others), self._epoch.number)
        confirmed = [self._confirmations(knobs) for knobs in others]
        doubt = max(self.settings.worth, surrogate.noise)  # of what has been confirmed once: the rest is not worth less
        near = [
            k for k in range(len(others)) if mean[k] <= mean.min() + (doubt if confirmed[k] else self.settings.worth)
        ]
        k = max(near, key=lambda k: (confirmed[k], -mean[k]))  # what has been confirmed already is not left for nothing
        return others[k] if self._gap(surrogate, others[k])[0] < -self.settings.worth else None

    def _confirmations(self, knobs: Knobs) -> int:
        return sum(told.trial.phase == "confirm" and told.trial.knobs == knobs for told in self._now())

    def _needed(self, surrogate: Surrogate, challenger: Knobs) -> int:
        """Trials that it will probably take to prove a challenger."""
        if self._proven(surrogate, challenger):
            return 0
        gap, _ = self._gap(surrogate, challenger)
        error = math.hypot(float(np.median([told.score.error for told in self._now()])), surrogate.noise)
        pairs = 3 * (self.settings.proof / 2 * error / gap) ** 2
        most = max(2, 2 * self._epoch.allowed // 5)
        return int(min(max(2 * math.ceil(pairs), 2 * LEAST_PAIRS), most))

    def _most_promising(self, surrogate: Surrogate) -> tuple[Knobs, float]:
        """The setting with the greatest expected improvement, as a share, that the budget allows."""
        if self._found is not None and self._found[0] is surrogate:
            return self._found[1]
        number = self._epoch.number
        rng = np.random.default_rng([self.seed, self._asked, number])
        seen = self._encoded(self._measured())
        means, _ = surrogate.predict(seen, number)
        best = means.min(axis=1)
        centres = seen[np.argsort(surrogate.weights @ means, kind="stable")[:3]]
        x = candidates(self.space, centres, rng)
        value = self._value(surrogate, x, best)
        closer = around(self.space, x[int(np.argmax(value))], 0.04, NEAREST, rng)
        x, value = np.concatenate([x, closer]), np.concatenate([value, self._value(surrogate, closer, best)])
        k = int(np.argmax(value))
        self._found = surrogate, (self.space.decode(x[k]), float(math.exp(value[k])))
        return self._found[1]

    def _promise(self, knobs: Knobs) -> float:
        """Expected improvement of one setting, as a share."""
        surrogate = self._surrogate()
        means, _ = surrogate.predict(self._encoded(self._measured()), self._epoch.number)
        return float(np.exp(self._value(surrogate, self.space.encode(knobs)[None], means.min(axis=1)))[0])

    def _value(self, surrogate: Surrogate, x: Array, best: Array) -> Array:
        """log expected improvement, less for a setting that would probably cost more than the budget allows."""
        number = self._epoch.number
        each = surrogate.predict(x, number)
        value = log_expected_improvement(*each, best, surrogate.weights)
        mean, deviation = surrogate.mixed(*each)
        z = mean / deviation
        loss = mean * ndtr(z) + deviation * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        return np.asarray(value - np.maximum(0.0, loss / self._budget().shares(self._left()) - 1.0))

    def _budget(self) -> Budget:
        """What trials may still lose."""
        if not self._now():
            return Budget(self.settings, [], 0.0)
        number = self._epoch.number
        standing, _ = self._surrogate().mixture(self._encoded([self._epoch.standing]), number)
        return Budget(self.settings, self._now(), self._reference(number) + float(standing[0]))

    # What it knows

    def _remember(self, trial: Trial, samples: list[float], status: str) -> None:
        x, score = self.space.encode(trial.knobs), Score(samples, self._usual())
        self.history.append(Told(trial, x, self._epoch.number, samples, status, score))

    def _gap(self, surrogate: Surrogate, knobs: Knobs) -> tuple[float, float]:
        """Mean and standard deviation of log(time of a setting / time of what stands)."""
        at = self.space.encode(knobs), self.space.encode(self._epoch.standing)
        return surrogate.difference(*at, self._epoch.number)

    def _encoded(self, settings: Sequence[Mapping[str, Any]]) -> Array:
        """Shape (n, width)."""
        return np.array([self.space.encode(knobs) for knobs in settings])

    def _surrogate(self) -> Surrogate:
        """All trials told so far, those in flight as expected."""
        state = len(self.history), tuple(self._pending), self._epoch.number
        if self._known is None or self._known[0] != state:
            self._known = state, self._learn()
        return self._known[1]

    def _learn(self) -> Surrogate:
        told = self.history
        x = np.array([each.x for each in told])
        references = {number: self._reference(number) for number in {each.epoch for each in told}}
        y = np.array([_softened(each.score.log - references[each.epoch]) for each in told])
        errors = np.array([each.score.error for each in told])
        epochs = np.array([each.epoch for each in told])
        surrogate = Surrogate(x, y, errors, epochs, self.space.groups, self.seed)
        if self._pending:
            waiting = self._encoded([trial.knobs for trial in self._pending.values()])
            expected, _ = surrogate.mixture(waiting, self._epoch.number)
            surrogate = Surrogate(
                np.concatenate([x, waiting]),
                np.concatenate([y, expected]),
                np.concatenate([errors, np.full(len(waiting), np.median(errors))]),
                np.concatenate([epochs, np.full(len(waiting), self._epoch.number)]),
                self.space.groups,
                self.seed,
            )
        return surrogate

    def _designed(self) -> list[Knobs]:
        """The design of the first epoch. Later ones have the trials of those before them to go by."""
        knobs = len(self.space.knobs)
        count = min(knobs + 1, max(1, self.max_trials // 4))
        shares = sequence(count, knobs, np.random.default_rng([self.seed, 0]).random(knobs))
        return [self.space.decode(row) for row in self.space.spread(0.08 + 0.84 * shares)]

    def _now(self) -> list[Told]:
        """Trials of this epoch."""
        return [told for told in self.history if told.epoch == self._epoch.number]

    def _measured(self) -> list[Knobs]:
        """Settings of this epoch, each once."""
        found: dict[str, Knobs] = {}
        for told in self._now():
            found.setdefault(repr(told.trial.knobs), told.trial.knobs)
        return list(found.values())

    def _reference(self, number: int) -> float:
        """What logarithms of an epoch are relative to: what stood at its beginning."""
        return next(told.score.log for told in self.history if told.epoch == number)

    def _usual(self) -> float:
        """Standard deviation of one sample's logarithm, by the trials told so far."""
        return float(np.median([told.score.spread for told in self.history])) if self.history else 0.05

    def _left(self) -> int:
        return self._epoch.allowed - self._epoch.used


BAD = 0.3
LEAST_PAIRS = 2  # in turns, to confirm: between two a machine may become slower as a whole


def _softened(y: float) -> float:
    """Bad is bad: how bad does not matter, and would only hide the small differences among the good."""
    return y if y < BAD else BAD * (1.0 + math.tanh((y - BAD) / BAD))


def _pooled(scores: list[Score], noise: float) -> tuple[float, float]:
    """Weighted mean of several trials of one setting, and its standard error."""
    weights = np.array([1.0 / (score.error**2 + noise**2) for score in scores])
    return float(weights @ [score.log for score in scores] / weights.sum()), float(1.0 / math.sqrt(weights.sum()))


def _checked(samples: Sequence[float], what: str) -> list[float]:
    values = [float(sample) for sample in samples]
    if not values:
        raise ValueError(f"{what}: no samples")
    for k, value in enumerate(values):
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"{what}: sample {k} is {value}, but a step takes a positive, finite number of seconds")
    return values
