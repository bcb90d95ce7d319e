"""Tuner: decides which setting to try next, and which to deploy. Pure: it measures nothing and uses no clock.

A search has four phases. The *default* is measured first, as the reference for all others. A *design* of a few
settings, on the way to the corners of the space, gives the surrogate its first data. The *search* proposes the setting
with the greatest expected improvement, and now and then one of which little is known; it expands from settings known
to be good. To *confirm*, the best setting found is measured again, alternating with the standing one, because the best
of many noisy measurements looks better than it is. A setting is deployed only if these fresh measurements, and the
surrogate with all its data, show it to be better than the standing one.

After that, `observe` watches the deployed setting. A drift reopens the search in a new epoch, in which old measurements
count as those of a similar surface. Without drift, the search goes on in the background, in *rounds* of a few trials
that become rarer as long as they change nothing. Trials that have used up the budget pause the search in a *rest*,
until the job's steps have refilled the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.design import build_first_epoch
from autotune.drift import PageHinkley
from autotune.history import pool_scores
from autotune.proof import Proof
from autotune.proposals import Proposals
from autotune.score import TrialScore, check_samples
from autotune.search_state import SearchState
from autotune.space import Knobs, Space
from autotune.trials import CompletedTrial, Epoch, Phase, Settings, Trial

Array = NDArray[np.float64]


class Tuner:
    """Search by trials for the setting with the least time per step.

    Parameters
    ----------
    space : Space
    default : mapping
        Setting that is deployed unless another one is proven better; also the first trial.
    seed : int
        Seed; equal seeds and samples give equal proposals, bit for bit with equal versions of numpy and scipy.
    max_trials : int
        Number of `ask` calls until `done`, including repetitions of the default and of the best.
    first : sequence of mapping
        Settings to try right after the default: the best of an earlier search, or of a model of the transport.
    settings : Settings, optional
    journal : callable, optional
        Callback for each row of the log, a dict in JSON's types; `Journal(path)` writes them to a file.

    Raises
    ------
    ValueError
        `default` or one of `first` is not in the space, or `max_trials` is below 1.

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
        self._deployed = self.default
        self._done = False
        self._watch: PageHinkley | None = None
        epoch = build_first_epoch(space, self.default, self.first, max_trials, seed)
        self._state = SearchState(space, seed, self.settings, epoch, self.first)
        self._proposals = Proposals(self._state)
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

    # Methods for callers

    @property
    def done(self) -> bool:
        """True if there is nothing to try for now: then `best()` is the result, and `observe` watches it."""
        return self._done

    @property
    def resting(self) -> bool:
        """True if the search is paused with trials left, until the job's steps have refilled its budget."""
        return self._state.epoch.resting

    @property
    def lost(self) -> float:
        """Steps that all trials so far have lost."""
        return self._state.lost

    @property
    def history(self) -> list[CompletedTrial]:
        """Completed trials so far."""
        return self._state.history.told

    def ask(self, as_logged: tuple[Mapping[str, Any], float] | None = None) -> Trial:
        """Return the next trial. Each call counts; pending trials are assumed to have the expected result.

        Parameters
        ----------
        as_logged : (mapping, float), optional
            Setting of a log, and a tolerance, for a replay on another machine. The setting replaces the proposal if its
            expected improvement is at most that share smaller.

        Raises
        ------
        RuntimeError
            The search is over.
        """
        if self._done:
            raise RuntimeError("the search is over: best() has its result, and observe() may open it again")
        knobs, phase, why = self._propose_setting()
        if as_logged is not None and phase == "search":
            logged, tolerance = self.space.check(as_logged[0]), as_logged[1]
            improvement = self._proposals.compute_improvement
            if improvement(logged) >= (1.0 - tolerance) * improvement(knobs):
                knobs = logged
        return self._issue_trial(knobs, phase, why)

    def tell(self, trial_id: int, samples: Sequence[float], status: str = "ok", exposed: float | None = None) -> None:
        """Record the samples of a trial.

        Parameters
        ----------
        trial_id : int
            Number of a trial that `ask` has returned and that has no result yet.
        samples : sequence of float
            Seconds of each step, without the warm-up; at least one.
        status : str
            `"ok"`, or `"aborted"` for a trial that was cut short.
        exposed : float, optional
            Share of a step spent waiting for communication, 0 to 1; it is only written to the journal.

        Raises
        ------
        ValueError
            The trial, a sample, the status or the share is invalid, or there are no samples.
        """
        trial = self._state.pending.get(trial_id)
        if trial is None:
            open_ = ", ".join(map(str, self._state.pending)) or "none"
            raise ValueError(f"trial {trial_id} is not waiting to be told; these are: {open_}")
        if status not in ("ok", "aborted"):
            raise ValueError(f"a trial's status is 'ok' or 'aborted', not {status!r}")
        values = check_samples(samples, f"trial {trial_id}")
        told = {} if exposed is None else {"exposed": float(exposed)}
        if not 0.0 <= told.get("exposed", 0.0) <= 1.0:
            raise ValueError(f"exposed is a share of a step, 0 to 1, not {exposed}")
        del self._state.pending[trial_id]
        self._write({"row": "tell", "id": trial_id, "status": status, "samples": values, **told})
        self._state.record_trial(trial, values, status)
        if not self._state.pending:
            self._conclude_trial()

    def best(self) -> Knobs:
        """Return the setting to deploy: the standing one, at first the default, unless another is proven better."""
        return dict(self._deployed)

    def observe(self, samples: Sequence[float], steps: int | None = None) -> bool:
        """Watch the deployed setting after the search, by samples of `best()`.

        Parameters
        ----------
        samples : sequence of float
            Seconds of each step.
        steps : int, optional
            Steps of the job since the last trial or call, if more than the samples.

        Returns
        -------
        bool
            Whether there are new trials: after a drift, when the budget of a paused search has refilled, or in the
            background.
        """
        values = check_samples(samples, "what is deployed")
        if steps is not None and steps < len(values):
            raise ValueError(f"{steps} steps have passed, fewer than the {len(values)} samples")
        if self._done:
            self._write({"row": "observe", "samples": values, **({} if steps is None else {"steps": steps})})
            self._state.pass_steps(len(values) if steps is None else steps)
            if self._has_drifted(TrialScore(values, self._state.history.estimate_spread())):
                self._reopen_search()
            elif self._is_due():
                self._resume()
        return not self._done

    def predict(self, settings: Sequence[Mapping[str, Any]]) -> tuple[Array, Array]:
        """Return mean and deviation of the expected log(time / time of the first standing setting): shapes (n,)."""
        at = self._state.history.encode_settings(settings)
        return self._state.get_surrogate().predict_mixture(at, self._state.epoch.number)

    def predict_difference(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
        """Return mean and deviation of the expected log(time of `one` / time of `other`) in this epoch."""
        encode = self.space.encode
        return self._state.get_surrogate().predict_difference(encode(one), encode(other), self._state.epoch.number)

    def load(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take over the trials and decisions of a log, regardless of what this tuner would have proposed or decided."""
        asked: dict[int, Mapping[str, Any]] = {}
        for row in rows:
            if row["row"] == "ask":
                asked[row["id"]] = row
            elif row["row"] == "tell":
                ask = asked[row["id"]]
                trial = Trial(row["id"], self.space.check(ask["knobs"]), ask["phase"], ask["why"])
                self._state.record_trial(trial, row["samples"], row["status"])
            elif row["row"] == "observe":
                self._state.pass_steps(row.get("steps", len(row["samples"])))
            elif row["row"] == "decide":
                self._deployed = self.space.check(row["knobs"])
                if row["decision"] == "reopen":
                    self._reopen_search()
                elif row["decision"] == "resume":
                    self._resume()
                elif row["decision"] == "rest":
                    self._state.epoch.resting = True

    # Decisions

    def _propose_setting(self) -> tuple[Knobs, Phase, str]:
        """Return the next setting, its phase and the reason."""
        state, epoch, budget = self._state, self._state.epoch, self._state.get_budget()
        if epoch.baseline:
            return epoch.baseline[0], "default", "what everything is compared with"
        if epoch.design and state.left > 2 and not budget.spent:
            given = epoch.number == 0 and epoch.design[0] in self.first
            return epoch.design[0], "design", "given to be tried first" if given else "near a corner of the space"
        proof = state.build_proof()
        if proof.is_standing_vague() and state.left > 2:
            return epoch.standing, "default", "steps are noisy: what everything is compared with, measured again"
        challenger = proof.find_challenger()
        knobs, hope = self._proposals.find_most_promising()
        if challenger is not None:
            unsure = hope < self.settings.hope or (budget.spent and proof.is_in_reach(challenger))
            wanted = unsure and not proof.is_proven(challenger)
            if wanted or state.left <= proof.count_reserved_trials(challenger):
                return self._choose_confirmation(proof, challenger)
        if not budget.spent and state.left > EXPLORING and state.searched % EXPLORING == EXPLORING - 1:
            unknown = self._proposals.find_least_known()
            if unknown is not None:
                return unknown, "search", "little is known there, and it may be as fast as the best"
        return knobs, "search", f"may be faster by {hope:.2%} of a step on average"

    def _choose_confirmation(self, proof: Proof, challenger: Knobs) -> tuple[Knobs, Phase, str]:
        """Return the challenger or the standing setting, in turns."""
        pending = [trial.knobs for trial in self._state.pending.values() if trial.phase == "confirm"]
        if proof.choose_turn(challenger, pending) == self._state.epoch.standing:
            return self._state.epoch.standing, "confirm", "to compare with, in the same minutes as the best"
        return challenger, "confirm", "the best so far, measured again"

    def _conclude_trial(self) -> None:
        """Conclude a trial: deploy a proven setting, and check whether the search is over."""
        state, epoch, budget = self._state, self._state.epoch, self._state.get_budget()
        if state.left > 0 and (epoch.baseline or (epoch.design and state.left > 2 and not budget.spent)):
            return
        proof = state.build_proof()
        proven = [
            knobs
            for knobs in state.history.list_measured(epoch.number)
            if proof.is_proven(knobs) or (knobs == self._deployed != epoch.standing and proof.still_holds(knobs))
        ]
        deployed = epoch.standing
        if proven:
            means, _ = self.predict(proven)
            deployed = proven[int(np.argmin(means))]
        challenger = proof.find_challenger()
        settled = challenger is None or challenger == deployed
        if state.left == 0:
            self._finish(deployed, "no trials are left", settled)
        elif budget.overdrawn and (challenger is None or settled or not proof.is_in_reach(challenger)):
            self._pause_search(deployed)
        elif settled and (hope := self._proposals.find_most_promising()[1]) < self.settings.hope:
            if budget.spent:  # more promising settings may cost more than is left
                self._pause_search(deployed)
            else:
                self._finish(deployed, f"one more trial may gain {hope:.2%} of a step on average", settled)
        elif deployed != self._deployed:
            self._deploy_setting(deployed, "deploy")

    def _deploy_setting(self, knobs: Knobs, decision: str, **more: Any) -> None:
        """Decide for a setting, and log the decision with its reason."""
        row = {"row": "decide", "decision": decision, "knobs": dict(knobs), **more}
        if knobs == self._state.epoch.origin:
            row["why"] = "nothing is proven better than what stood"
        else:
            gap, deviation = self._state.build_proof().compute_gain(knobs)
            row |= {"gap": gap, "deviation": deviation}
            least = -math.expm1(gap + 2 * deviation)
            row["why"] = f"faster by {-math.expm1(gap):.1%} (sure of {least:.1%}) than what stood"
        if knobs != self._deployed:
            self._watch = None
        self._deployed = knobs
        self._write(row)

    def _finish(self, knobs: Knobs, because: str, settled: bool) -> None:
        """End the search, or a round of it; the next round comes later if this one has changed nothing."""
        epoch = self._state.epoch
        lasting = epoch.round > 0 and settled and knobs == epoch.standing
        epoch.interval = epoch.interval * self.settings.patience if lasting else float(self.settings.interval)
        self._done = True
        self._deploy_setting(knobs, "finish", because=because, trials=epoch.used, final=True)

    def _pause_search(self, knobs: Knobs) -> None:
        """Pause the search, with its remaining trials."""
        self._done = self._state.epoch.resting = True
        state = self._state
        because = (
            f"the search ended: its trials have lost the time of {state.lost:.0f} steps, all that they may in a job of "
            f"this length ({state.passed} steps so far), and nothing found wins that back; it goes on if the job runs "
            f"for {max(1.0, state.get_budget().lacking):.0f} steps more"
        )
        self._deploy_setting(knobs, "rest", because=because, trials=self._state.epoch.used)

    def _is_due(self) -> bool:
        """Return whether the search goes on, after a rest or in the background."""
        epoch, budget = self._state.epoch, self._state.get_budget()
        if epoch.resting:
            return budget.refilled
        return self.settings.background > 0 and epoch.idle >= epoch.interval and not budget.spent

    def _resume(self) -> None:
        """Resume a paused search, or begin a background round, in which the deployed setting has to be beaten."""
        epoch = self._state.epoch
        why = "trials may lose time again"
        if not epoch.resting:
            why = "in the background: perhaps there is something better"
            epoch.round += 1
            epoch.standing = self._deployed
            epoch.allowed = epoch.used + self.settings.background
            epoch.baseline = [self._deployed]
        epoch.resting = self._done = False
        self._write({"row": "decide", "decision": "resume", "knobs": dict(self._deployed), "why": why})

    def _has_drifted(self, score: TrialScore) -> bool:
        """Return whether the step times of the deployed setting have drifted."""
        if self._watch is None:
            known = [told.score for told in self._state.list_trials() if told.trial.knobs == self._deployed]
            self._watch = PageHinkley(*pool_scores(known, self._state.get_surrogate().noise))
        return self._watch.add(score.log, score.error)

    def _reopen_search(self) -> None:
        """Begin a new epoch, in which the deployed setting is the standing one."""
        baseline = [self._deployed] + [self.default] * (self.default != self._deployed)
        allowed = min(self.settings.after_drift, self.max_trials)
        self._state.epoch = Epoch(self._state.epoch.number + 1, self._deployed, allowed, baseline)
        self._done, self._watch = False, None
        why = "the deployed setting's step times are no longer what they were"
        self._write({"row": "decide", "decision": "reopen", "knobs": dict(self._deployed), "why": why})

    def _issue_trial(self, knobs: Knobs, phase: Phase, why: str) -> Trial:
        epoch = self._state.epoch
        for waiting in (epoch.baseline, epoch.design):
            if waiting and waiting[0] == knobs:
                waiting.pop(0)
                break
        limit = self._state.compute_limit(knobs, bounded=phase not in ("default", "confirm"))
        trial = Trial(self._state.asked, dict(knobs), phase, why, limit)
        self._state.pending[trial.id] = trial
        self._state.asked += 1
        limited = {"limit": limit} if limit < math.inf else {}
        self._write({"row": "ask", "id": trial.id, "knobs": trial.knobs, "phase": phase, "why": why, **limited})
        epoch.used += 1
        return trial


EXPLORING = 4  # one of so many search trials explores where little is known, as the surrogate is overconfident
