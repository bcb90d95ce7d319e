"""The tuner: which setting to try next, and which to deploy. Pure: it measures nothing, and asks no clock.

A search goes through four phases. The *default* is measured first, as what everything is compared with. A *design* of a
few settings, on the way to the corners of the space, gives the surrogate something to go by. The *search* proposes the
setting with the greatest expected improvement, and now and then one of which little is known; it grows from what is
known to be good. To *confirm*, the best setting found is measured again in turns with what stands, since
the best of many noisy measurements looks better than it is. Only a setting that these fresh measurements, and the
surrogate with all it knows, show to be better than what stands is ever deployed.

After that `observe` watches the deployed setting. A drift opens the search again: an epoch, in which old measurements
count as those of a surface that resembles today's. Where nothing drifts the search goes on beside the job, in *rounds*
of a few trials that become rarer as long as they change nothing. Trials that have lost all that they may make a search
*rest*: it goes on when the steps of the job have refilled the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from autotune import design
from autotune.acquisition import NEAREST, around, candidates, log_expected_improvement, within_reach
from autotune.budget import Budget
from autotune.drift import PageHinkley
from autotune.history import History, pooled, weighted
from autotune.proof import Proof
from autotune.score import Score
from autotune.space import Knobs, Space
from autotune.surrogate import Surrogate
from autotune.trials import Epoch, Phase, Settings, Told, Trial, key

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
        self._history = History(self.space, seed)
        self._pending: dict[int, Trial] = {}
        self._asked = 0
        self._deployed = self.default
        self._done = False
        self._watch: PageHinkley | None = None
        self._known: tuple[object, Surrogate] | None = None
        self._found: tuple[object, tuple[Knobs, float]] | None = None
        self._balance: tuple[object, Budget] | None = None
        most = max(1, max_trials // 4)
        corners = design.corners(self.space, most, np.random.default_rng([seed, 0]))
        halfway = [design.nearer(self.space, corner, self.default) for corner in corners]
        self._epoch = Epoch(0, self.default, max_trials, [self.default], self.first + halfway)
        self._epoch.outward = {key(half): corner for half, corner in zip(halfway, corners, strict=True)}
        self._epoch.corners = most - len(halfway)
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
        """Whether there is nothing to try for now: then `best()` is the result, and `observe` watches it."""
        return self._done

    @property
    def resting(self) -> bool:
        """Whether trials are left, which wait until the job's steps have refilled what they may lose."""
        return self._epoch.resting

    @property
    def lost(self) -> float:
        """Steps that all trials so far have lost."""
        return sum(sum(self._history.lost(number)) for number in range(self._epoch.number + 1))

    @property
    def history(self) -> list[Told]:
        """Trials told so far."""
        return self._history.told

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
        """Take the samples of a trial.

        Parameters
        ----------
        trial_id : int
            A trial that `ask` has returned and that has no result yet.
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

    def observe(self, samples: Sequence[float], steps: int | None = None) -> bool:
        """Watch the deployed setting after the search, by samples of `best()`.

        Parameters
        ----------
        samples : sequence of float
            Seconds of each step.
        steps : int, optional
            Steps of the job since the last trial or call, if they were more than the samples.

        Returns
        -------
        bool
            Whether there is something to try again: after a drift, when the budget of a search that rests has refilled,
            or in the background.
        """
        values = _checked(samples, "what is deployed")
        if steps is not None and steps < len(values):
            raise ValueError(f"{steps} steps have passed, fewer than the {len(values)} samples")
        if self._done:
            self._write({"row": "observe", "samples": values, **({} if steps is None else {"steps": steps})})
            self._pass(len(values) if steps is None else steps)
            if self._drifted(Score(values, self._history.usual())):
                self._reopen()
            elif self._due():
                self._resume()
        return not self._done

    def believe(self, settings: Sequence[Mapping[str, Any]]) -> tuple[Array, Array]:
        """Expected log(time / time of the first standing setting) of settings: mean and deviation, shapes (n,)."""
        return self._surrogate().mixture(self._history.encoded(settings), self._epoch.number)

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
            elif row["row"] == "observe":
                self._pass(row.get("steps", len(row["samples"])))
            elif row["row"] == "decide":
                self._deployed = self.space.check(row["knobs"])
                if row["decision"] == "reopen":
                    self._reopen()
                elif row["decision"] == "resume":
                    self._resume()
                elif row["decision"] == "rest":
                    self._epoch.resting = True

    # How it decides

    def _propose(self) -> tuple[Knobs, Phase, str]:
        """The next setting, its phase and the reason."""
        epoch, budget = self._epoch, self._budget()
        if epoch.baseline:
            return epoch.baseline[0], "default", "what everything is compared with"
        if epoch.design and self._left() > 2 and not budget.overdrawn:
            given = epoch.number == 0 and epoch.design[0] in self.first
            return epoch.design[0], "design", "given to be tried first" if given else "near a corner of the space"
        surrogate = self._surrogate()
        proof = self._proof(surrogate)
        challenger = proof.challenger()
        knobs, hope = self._most_promising(surrogate)
        if challenger is not None:
            unsure = hope < self.settings.hope or (budget.spent and proof.in_reach(challenger))
            wanted = unsure and not proof.proven(challenger)
            if wanted or self._left() <= proof.reserved(challenger):
                return self._confirm(proof, challenger)
        if not budget.spent and self._searched() % EXPLORING == EXPLORING - 1:
            unknown = self._least_known(surrogate)
            if unknown is not None:
                return unknown, "search", "little is known there, and it may be as fast as the best"
        return knobs, "search", f"may be faster by {hope:.2%} of a step on average"

    def _confirm(self, proof: Proof, challenger: Knobs) -> tuple[Knobs, Phase, str]:
        """The challenger and what stands, in turns."""
        pending = [trial.knobs for trial in self._pending.values() if trial.phase == "confirm"]
        if proof.turn(challenger, pending) == self._epoch.standing:
            return self._epoch.standing, "confirm", "to compare with, in the same minutes as the best"
        return challenger, "confirm", "the best so far, measured again"

    def _conclude(self) -> None:
        """After a trial: deploy what is proven; see whether the search is over."""
        epoch, budget = self._epoch, self._budget()
        if self._left() > 0 and (epoch.baseline or (epoch.design and self._left() > 2 and not budget.overdrawn)):
            return
        surrogate = self._surrogate()
        proof = self._proof(surrogate)
        proven = [knobs for knobs in self._history.measured(epoch.number) if proof.proven(knobs)]
        deployed = epoch.standing
        if proven:
            means, _ = surrogate.mixture(self._history.encoded(proven), epoch.number)
            deployed = proven[int(np.argmin(means))]
        challenger = proof.challenger()
        settled = challenger is None or challenger == deployed
        if self._left() == 0:
            self._finish(deployed, "no trials are left", settled)
        elif budget.overdrawn and (challenger is None or settled or not proof.in_reach(challenger)):
            self._rest(deployed)
        elif settled and (hope := self._most_promising(surrogate)[1]) < self.settings.hope:
            self._finish(deployed, f"one more trial may gain {hope:.2%} of a step on average", settled)
        elif deployed != self._deployed:
            self._deploy(deployed, "deploy")

    def _deploy(self, knobs: Knobs, decision: str, **more: Any) -> None:
        """Decide for a setting, and say why."""
        row = {"row": "decide", "decision": decision, "knobs": dict(knobs), **more}
        if knobs == self._epoch.origin:
            row["why"] = "nothing is proven better than what stood"
        else:
            gap, deviation = self._proof(self._surrogate()).gain(knobs)
            row |= {"gap": gap, "deviation": deviation}
            least = -math.expm1(gap + 2 * deviation)
            row["why"] = f"faster by {-math.expm1(gap):.1%} (sure of {least:.1%}) than what stood"
        if knobs != self._deployed:
            self._watch = None
        self._deployed = knobs
        self._write(row)

    def _finish(self, knobs: Knobs, because: str, settled: bool) -> None:
        """End the search, or a round of it: the next comes the later, the less it promises."""
        epoch = self._epoch
        lasting = epoch.round > 0 and settled and knobs == epoch.standing
        epoch.interval = epoch.interval * self.settings.patience if lasting else float(self.settings.interval)
        self._done = True
        self._deploy(knobs, "finish", because=because, trials=epoch.used, final=True)

    def _rest(self, knobs: Knobs) -> None:
        """Leave the trials that are left for later."""
        self._done = self._epoch.resting = True
        because = "trials have lost all the time that they may; the search goes on when the job's steps allow it"
        self._deploy(knobs, "rest", because=because, trials=self._epoch.used)

    def _due(self) -> bool:
        """Whether the search goes on: after a rest, or in the background."""
        epoch, budget = self._epoch, self._budget()
        if epoch.resting:
            return budget.refilled
        return self.settings.background > 0 and epoch.idle >= epoch.interval and not budget.spent

    def _resume(self) -> None:
        """Go on where the search rested, or begin a round: what is deployed is what has to be beaten."""
        epoch = self._epoch
        why = "trials may lose time again"
        if not epoch.resting:
            why = "in the background: perhaps there is something better"
            epoch.round += 1
            epoch.standing = self._deployed
            epoch.allowed = epoch.used + self.settings.background
            epoch.baseline = [self._deployed]
        epoch.resting = self._done = False
        self._write({"row": "decide", "decision": "resume", "knobs": dict(self._deployed), "why": why})

    def _drifted(self, score: Score) -> bool:
        """Whether the deployed setting's times are no longer what they were."""
        if self._watch is None:
            known = [told.score for told in self._now() if told.trial.knobs == self._deployed]
            self._watch = PageHinkley(*pooled(known, self._surrogate().noise))
        return self._watch.add(score.log, score.error)

    def _reopen(self) -> None:
        """Begin a new epoch, in which the deployed setting is the standing one."""
        baseline = [self._deployed] + [self.default] * (self.default != self._deployed)
        allowed = min(self.settings.after_drift, self.max_trials)
        self._epoch = Epoch(self._epoch.number + 1, self._deployed, allowed, baseline)
        self._done, self._watch = False, None
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

    def _most_promising(self, surrogate: Surrogate) -> tuple[Knobs, float]:
        """The setting with the greatest expected improvement, as a share, that the budget allows."""
        if self._found is not None and self._found[0] is surrogate:
            return self._found[1]
        rng = np.random.default_rng([self.seed, self._asked, self._epoch.number])
        x, seen = self._candidates(surrogate, rng)
        means, _ = surrogate.predict(seen, self._epoch.number)
        best = means.min(axis=1)
        value = self._value(surrogate, x, best)
        closer = around(self.space, x[int(np.argmax(value))], 0.04, NEAREST, rng)
        closer = within_reach(self.space, closer, self._good())
        x, value = np.concatenate([x, closer]), np.concatenate([value, self._value(surrogate, closer, best)])
        k = int(np.argmax(value))
        self._found = surrogate, (self.space.decode(x[k]), float(math.exp(value[k])))
        return self._found[1]

    def _least_known(self, surrogate: Surrogate) -> Knobs | None:
        """The setting farthest from all measured ones, among those expected to be nearly as fast as the best."""
        x, seen = self._candidates(surrogate, np.random.default_rng([self.seed, self._asked, self._epoch.number, 1]))
        expected, _ = surrogate.mixture(x, self._epoch.number)
        best, _ = surrogate.mixture(seen, self._epoch.number)
        x = x[expected < best.min() + NEARLY]
        apart = ((x[:, None] - seen[None]) ** 2).sum(axis=2).min(axis=1)
        return self.space.decode(x[int(np.argmax(apart))]) if len(x) else None

    def _candidates(self, surrogate: Surrogate, rng: np.random.Generator) -> tuple[Array, Array]:
        """Settings that may be proposed, and those measured in this epoch: shapes (m, w) and (n, w)."""
        number = self._epoch.number
        seen = self._history.encoded(self._history.measured(number))
        means, _ = surrogate.mixture(seen, number)
        x = candidates(self.space, seen[np.argsort(means, kind="stable")[:3]], rng)
        return within_reach(self.space, x, self._good()), seen

    def _good(self) -> Array:
        """Measured settings that are not much slower than the fastest: shape (n, w)."""
        slowest = min(told.score.log for told in self._now()) + math.log(self.settings.abort_above)
        return np.array([told.x for told in self._now() if told.score.log <= slowest])

    def _searched(self) -> int:
        """Number of trials of this epoch that were proposed by the surrogate."""
        return sum(told.trial.phase == "search" for told in self._now())

    def _promise(self, knobs: Knobs) -> float:
        """Expected improvement of one setting, as a share."""
        surrogate, number = self._surrogate(), self._epoch.number
        means, _ = surrogate.predict(self._history.encoded(self._history.measured(number)), number)
        return float(np.exp(self._value(surrogate, self.space.encode(knobs)[None], means.min(axis=1)))[0])

    def _value(self, surrogate: Surrogate, x: Array, best: Array) -> Array:
        """log expected improvement, less for a setting that would probably cost more than the budget allows."""
        each = surrogate.predict(x, self._epoch.number)
        value = log_expected_improvement(*each, best, surrogate.weights)
        mean, deviation = surrogate.mixed(*each)
        mean = mean - surrogate.mixture(self._history.encoded([self._epoch.standing]), self._epoch.number)[0]
        z = mean / deviation
        loss = mean * ndtr(z) + deviation * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        value -= np.maximum(0.0, loss / self._budget().shares(self._left()) - 1.0)
        return np.asarray(value - WARNED * np.log1p(self._nearby(x) / self._budget().at_once))

    def _nearby(self, x: Array) -> Array:
        """Steps lost by the trial nearest to each setting: the surrogate softens large losses."""
        worst = self._history.worst(self._epoch.number)
        if max(worst.values(), default=0.0) <= self._budget().at_once:
            return np.zeros(len(x))
        told = {told.key: told.x for told in self._now()}
        at = np.array(list(told.values()))
        nearest = np.argmin(((x[:, None, :] - at[None]) ** 2).sum(axis=2), axis=1)
        return np.asarray(np.array([worst[key] for key in told])[nearest])

    def _budget(self) -> Budget:
        """The budget of this epoch, as it is now."""
        epoch = self._epoch
        state = len(self.history), tuple(self._pending), epoch.number, epoch.round, epoch.passed
        if self._balance is None or self._balance[0] != state:
            stood = [told for told in self._now() if told.trial.knobs == epoch.standing]
            standing = weighted(stood) if stood else 0.0
            lost, steps = sum(self._history.lost(epoch.number)), self._history.steps(epoch.number)
            self._balance = state, Budget(self.settings, lost, epoch.passed, steps, standing)
        return self._balance[1]

    # What it knows

    def _remember(self, trial: Trial, samples: list[float], status: str) -> None:
        epoch = self._epoch
        self._history.add(trial, epoch, samples, status)
        epoch.passed += len(samples)
        epoch.idle = 0
        corner = epoch.outward.pop(key(trial.knobs), None)
        slower = self._history.told[-1].score.log - self._history.reference(epoch.number)
        if corner is not None and epoch.corners > 0 and slower < WORSE:
            epoch.design.append(corner)
            epoch.corners -= 1
        terrible = self._history.lost(epoch.number)[-1] > self._budget().at_once
        if terrible and epoch.design:  # the others may be as bad: first half as far
            epoch.design = [
                knobs if knobs in self.first else design.nearer(self.space, knobs, epoch.standing)
                for knobs in epoch.design
            ]

    def _pass(self, steps: int) -> None:
        """Count steps of the job that were no trial's."""
        self._epoch.passed += steps
        self._epoch.idle += steps

    def _proof(self, surrogate: Surrogate) -> Proof:
        return Proof(self._history, surrogate, self._epoch, self.settings)

    def _surrogate(self) -> Surrogate:
        """All trials told so far, those in flight as expected."""
        state = len(self.history), tuple(self._pending), self._epoch.number
        if self._known is None or self._known[0] != state:
            self._known = state, self._history.learn(list(self._pending.values()), self._epoch.number)
        return self._known[1]

    def _now(self) -> list[Told]:
        """Trials of this epoch."""
        return self._history.of(self._epoch.number)

    def _left(self) -> int:
        return self._epoch.allowed - self._epoch.used


EXPLORING = 4  # of so many trials of the search, one goes where little is known: the surrogate is too sure of itself
NEARLY = 0.1  # logarithm of a ratio of times: such a setting is expected to be nearly as fast as the best
WORSE = 0.05  # logarithm of a ratio of times: no trial goes on from a setting so much slower to a corner of the space

# Power of a neighbour's lost steps, in multiples of what one trial may lose, by which a setting's value is divided.
WARNED = 2.0


def _checked(samples: Sequence[float], what: str) -> list[float]:
    values = [float(sample) for sample in samples]
    if not values:
        raise ValueError(f"{what}: no samples")
    for k, value in enumerate(values):
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"{what}: sample {k} is {value}, but a step takes a positive, finite number of seconds")
    return values
