"""Loop of trials on rank 0: applies the knobs that the tuner's process proposes, and measures steps under them.

A daemon thread, started by `Tuning.start` and ended by `stop`, looks five times a second at the steps that have ended
and sleeps otherwise. Between trials, and when the tuner is gone, the best known setting is in force.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..config import config
from ..errors import EngineError
from ..native import core
from ..text.logs import logger
from .job import describe_job, describe_model, summarize_traffic
from .knobs import KNOBS, Knobs, clamp_knobs, describe_misfit, format_knobs, on_gpus, space_of
from .listener import Listener
from .process import TunerError, TunerProcess
from .progress import Progress
from .steps import Changed, Sample, Score, Steps

if TYPE_CHECKING:
    from ..collectives.process_sets import ProcessSetEngines

PERIOD = 0.2  # seconds between two looks while searching
WATCH = 10.0  # seconds between two looks after the search
OBSERVED = 20  # maximum number of steps reported by a look after the search
SETTLING = 2  # steps after a change that are not measured
AHEAD = 64  # maximum entries by which a program is ahead of its GPU (DEVICE_OUTSTANDING)
MOST = 256  # maximum steps of a trial
ABORT_AFTER = 3  # steps after which a slow trial can be cut short
STARTING = 60.0  # seconds that the process may take to start: it imports scipy
ANSWERING = 20.0  # seconds that an answer may take: the process has a low priority
IDLE = 60.0  # seconds without anything to score after which a warning is logged


@dataclass(frozen=True)
class Spent:
    """Cost of the trials of a job."""

    trials: int = 0
    lost: float = 0.0  # loss of the trials, in steps


class _Ended(Exception):
    """Signal that the job ends, or that its program sets the knobs itself."""


class Tuning:
    """Search for better knobs during a training job, from `start` to `stop`, with the engine of rank 0."""

    def __init__(
        self,
        engine: core.Engine,
        settings: config.Config,
        held: Collection[str],  # knobs that are not tuned, because the user has chosen them
        cpus: Sequence[int],  # CPUs on which the tuner's process may run
        first: Mapping[str, Any],  # knobs to try right after the default; missing ones take the default's values
        about: Mapping[str, Any],  # facts about the job for the log
        sets: ProcessSetEngines | None = None,  # process sets of the world, which have knobs of their own
        crews: Sequence[int] = (),  # number of ranks of each host; by default, there is one host
        # Knobs just put into force, and perhaps used by no entry; the search begins with them
        began: Mapping[str, Any] = MappingProxyType({}),
        version: int | None = None,  # result of `set_knobs` for `began`
        spent: Spent | None = None,  # cost of trials in earlier worlds of the job
        elastic: bool = False,  # whether the world may end soon; if so, the process is started only after the warm-up
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._known = first
        self._space = space_of(engine, held)
        self._held = {name: value for name, value in engine.knobs().items() if name in KNOBS and name in held}
        now = engine.knobs() | dict(began)
        self._default = self._running = {name: value for name, value in now.items() if name in self._space}
        self._best: Knobs = self._default
        self._version = int(now["version"]) if version is None else version
        self._cpus = cpus
        known = self._default | clamp_knobs(first, self._space)
        self._first = [known] if known != self._default else []
        self._about = dict(about)
        self._sets = sets
        self._crews = crews
        self._before = spent or Spent()
        self._made, self._lost = 0, 0.0  # trials of this world, and their loss in steps
        self._most = settings.autotune_trials - self._before.trials
        self._elastic = elastic
        self._steps = Steps(engine)
        self._settling = SETTLING
        self._unsettled = 0  # samples since the last change that are still to be skipped
        self._progress = Progress(engine)
        self._process: TunerProcess | None = None
        self._turning = threading.Lock()  # held while knobs are set, and while the search is ended
        self._ending = threading.Event()
        self._progress.enter("waiting")
        self._state = "before the first trial"  # for a warning if the job ends now; empty: no search is running
        self._trials = 0
        self._concluded: tuple[Knobs, bool] | None = None  # knobs of the last decision, and whether the search rests
        self._thread = threading.Thread(target=self._run, name="engine-tuning", daemon=True)

    @property
    def searching(self) -> bool:
        """True while trials are made or awaited."""
        return bool(self._state)

    @property
    def best(self) -> Knobs:
        """Best known setting."""
        return dict(self._best)

    @property
    def concluded(self) -> bool:
        """True if a search has completed; one that only rests would go on."""
        return self._concluded is not None and not self._concluded[1]

    @property
    def spent(self) -> Spent:
        """Cost of the job's trials, including those of this world."""
        return Spent(self._before.trials + self._made, self._before.lost + self._lost)

    @property
    def pid(self) -> int | None:
        """Process id of the tuner; None before it is started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the thread, which starts the process."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread and the process. The engine must still be open."""
        unfinished = self._state if not self._ending.is_set() and self._engine.failure is None else ""
        self._end()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if unfinished:
            known = "nothing was proven better than" if self._best == self._default else "the best so far was"
            logger.warning("autotune: the job ended %s; %s %s", unfinished, known, format_knobs(self._best))

    def leave_knobs(self) -> None:
        """End the search because the program sets the knobs itself."""
        self._end()
        self._progress.enter("left")
        if self._state:
            logger.warning("autotune: the tuning ends here, because engine.set_knobs was called")
        self._state = ""

    def _end(self) -> None:
        with self._turning:
            self._ending.set()
        if self._process is not None:
            self._process.interrupt_request()

    def _run(self) -> None:
        try:
            while True:
                try:
                    score = self._warm_up() if self._elastic else None
                    with TunerProcess() as self._process:
                        self._tune_knobs(self._process, score)
                except Changed as change:
                    self._begin_anew(change)
        except _Ended:
            return
        except EngineError:
            self._state = ""  # the end of the world is reported elsewhere
        except TunerError as error:
            self._give_up(error)

    def _give_up(self, error: TunerError) -> None:
        """Deploy the best setting so far and end the search; training goes on."""
        try:
            self._apply_knobs(self._best)
        except (_Ended, EngineError):
            return
        self._state = ""
        self._progress.enter("lost")
        logger.error("autotune: %s; training goes on with %s", error, format_knobs(self._best))

    def _update_space(self) -> None:
        """Update the knobs to search, after reductions have shown whether compression and host memory do anything."""
        self._space = space_of(self._engine, self._held)
        new = {
            name: value for name, value in self._engine.knobs().items() if name in self._space.keys() - self._default
        }
        first = self._first[0] if self._first else self._default
        # Knobs are removed if all tensors are on GPUs.
        self._default, self._running, self._best, first = (
            {name: knob for name, knob in (each | new).items() if name in self._space}
            for each in (self._default, self._running, self._best, first)
        )
        known = first | new | clamp_knobs(self._known, {name: self._space[name] for name in new})
        self._first = [known] if known != self._default else []

    def _begin_anew(self, change: Changed) -> None:
        """Begin a new search, because the score of steps changes."""
        logger.warning("autotune: from now on %s: the search begins anew", change)
        self._first = [self._best] if self._best != self._default else self._first
        self._best, self._state, self._trials, self._concluded = self._default, "before the first trial", 0, None
        self._apply_knobs(self._best)

    def _warm_up(self) -> Score:
        return self._listen(self._settings.autotune_warmup * self._settings.autotune_steps)

    def _tune_knobs(self, tuner: TunerProcess, score: Score | None) -> None:
        settings = self._settings
        self._ask_tuner(tuner, STARTING, type="prepare", cpus=list(self._cpus))
        score = score or self._warm_up()
        self._update_space()
        what, most = ", ".join(self._space), self._most
        logger.info("autotune: tuning %s by %s, in at most %d trials", what, score.unit, most)
        if not score.busy:  # else tensors have no names by which the job could be recognized
            self._recall_result(tuner)
        answer = self._ask_tuner(
            tuner,
            ANSWERING,
            type="begin",
            space=self._space,
            default=self._default,
            first=self._first,
            traffic=self._summarize_traffic(score),
            seed=0,
            max_trials=self._most,
            spent=self._before.lost,
            ran=self._steps.before,
            settling=self._settling,
            minute=60.0 / score.every if not score.busy else None,
            log=None if settings.autotune_log is None else str(settings.autotune_log),
            about=self._about | {"score": score.unit},
        )
        self._progress.record_search_start()
        while True:
            if answer["type"] == "trial":
                samples, status = self._measure_trial(answer)
                self._progress.record_trial(statistics.median(sample.value for sample in samples), whole=status == "ok")
                self._apply_knobs(self._best)
                told = {
                    "status": status,
                    "samples": [sample.value for sample in samples],
                    "exposed": statistics.median(sample.exposed for sample in samples),
                }
                answer = self._ask_tuner(tuner, ANSWERING, type="told", id=answer.get("id"), **told)
                self._steps.count_new_steps()  # discards the steps of the trial, which are reported already
            else:
                if answer["type"] == "done":
                    self._deploy_result(answer)
                watched = self._observe_steps()
                passed = max(self._steps.count_new_steps(), len(watched))
                answer = self._ask_tuner(tuner, ANSWERING, type="observe", samples=watched, steps=passed)

    def _summarize_traffic(self, score: Score) -> dict[str, Any] | None:
        """Return data for the model of the transport; None if a sample is not the seconds of one step or period."""
        if score.busy or score.every > 1 or "bytes" not in self._about:
            return None
        _, marks = self._engine.steps(0)
        ends = [mark[0] / 1e9 for mark in marks if mark[2] == score.source]
        return summarize_traffic(self._engine.history(), ends) | {"bytes": self._about["bytes"]}

    def _recall_result(self, tuner: TunerProcess) -> None:
        """Try the result of earlier searches for a job like this, right after the user's choice."""
        cache, reduced = self._settings.autotune_cache, describe_model(self._engine.definitions(), self._steps.before)
        if reduced is None:
            return
        self._about |= reduced
        if cache is False:
            return
        about = describe_job(reduced, self._crews or (self._engine.size,), len(self._cpus), self._held)
        answer = self._ask_tuner(
            tuner, ANSWERING, type="recall", job=about, cache=None if cache is None else str(cache)
        )
        knobs, why = answer.get("knobs"), answer.get("why")
        self._about["recalled"] = why
        if not isinstance(knobs, dict):
            logger.info("autotune: %s", why)
            return
        fitting = {
            name: value for name, value in knobs.items() if name in self._space and not describe_misfit(name, value)
        }
        known = self._default | clamp_knobs(fitting, self._space)
        if known not in (self._default, *self._first):
            self._first.append(known)
        logger.info("autotune: recalled from %s: %s", why, format_knobs(known))

    def _ask_tuner(self, tuner: TunerProcess, seconds: float, **message: Any) -> dict[str, Any]:
        if self._ending.is_set():
            raise _Ended
        try:
            answer = tuner.send_request(message, seconds)
        except TunerError:
            if self._ending.is_set():
                raise _Ended from None
            raise
        warnings = answer.get("warnings", [])
        for warning in warnings if isinstance(warnings, list) else [warnings]:
            logger.warning("autotune: %s", warning)
        lost = answer.get("lost")
        self._lost = max(self._lost, lost) if isinstance(lost, int | float) else self._lost
        if answer["type"] not in ("ready", "known", "trial", "done", "watching"):
            raise TunerError(f"the tuner's process has answered {answer['type']!r}, which is not known here")
        return answer

    def _listen(self, steps: int) -> Score:
        """Wait for the end of the warm-up, in which buffers are allocated and clocks change, and choose the score."""
        listener, began, told = Listener(self._engine, self._steps, steps), time.monotonic(), False
        while (score := listener.choose_score()) is None:
            self._sleep_unless_ended(PERIOD)
            if not told and listener.idle and time.monotonic() - began > IDLE:
                told = True
                logger.warning("autotune: %s", self._explain_waiting())
        self._steps.follow_score(score, listener.count_steps(score))
        ahead = self._bound_lead(listener.compute_mean_entries(score), score) if on_gpus(self._engine) else 0
        self._settling = SETTLING + ahead
        return score

    def _bound_lead(self, entries: float, score: Score) -> int:
        """Return by how many samples the program may be ahead of its GPU, for this many entries per step or period.

        The end of a step is recorded when the program has enqueued it. This happens at the GPU's pace, because the
        program is at most `AHEAD` entries ahead. So the first steps after a change still have the pace of those before
        it. The result is at most the length of a trial: larger leads are rare, as most programs use a result in each
        step.
        """
        return min(math.ceil(AHEAD / max(entries, 1.0) / score.every), self._settings.autotune_steps)

    def _explain_waiting(self) -> str:
        """Return the warning that nothing can be scored yet, with the reason."""
        if self._sets is not None and self._sets.largest_membership > 1:
            return (
                f"no step over all ranks has ended in the first {IDLE:g} s. Process sets, which this job has, are not "
                "tuned, and steps of their optimizers do not count"
            )
        return (
            f"no step of a DistributedOptimizer over all ranks has ended in the first {IDLE:g} s, and too few tensors "
            "were reduced to tune by; tuning waits"
        )

    def _measure_trial(self, trial: Mapping[str, Any]) -> tuple[list[Sample], str]:
        """Apply the knobs of a trial, and time the steps that run under them."""
        limit = trial.get("limit")
        if not (limit is None or isinstance(limit, int | float)):
            raise TunerError(f"the tuner's process has sent a limit of {limit!r}, which is no number of seconds")
        self._best = self._check_knobs(trial.get("best"))
        self._apply_knobs(self._check_knobs(trial.get("knobs")))
        if trial.get("drift"):
            self._progress.record_search_start()
            logger.info("autotune: steps are no longer as fast, or as slow, as they were: searching again")
        self._progress.enter("searching")
        self._trials += 1
        self._made += 1
        if self._concluded is None or self._state or trial.get("drift"):  # a background search is never unfinished
            self._state = f"in trial {self._trials}"
            if self._trials <= self._most:
                self._state += f" of at most {self._most}"
        logger.info("autotune: trial %d, %s: %s", self._trials, trial.get("phase"), format_knobs(self._running))
        needed = self._settings.autotune_steps
        samples: list[Sample] = []
        while len(samples) < needed:
            self._sleep_unless_ended(PERIOD)
            samples += self._read_settled_samples()
            # The median is used, so that a pause or two, for a validation or a checkpoint, do not end a trial.
            enough = len(samples) >= ABORT_AFTER
            slow = limit is not None and enough and statistics.median(each.value for each in samples) > limit
            if slow and len(samples) < needed:
                return samples, "aborted"
        return samples[: max(needed, MOST)], "ok"

    def _observe_steps(self) -> list[float]:
        """Return durations of recent steps under the deployed setting; wait until there are enough."""
        samples: list[float] = []
        while len(samples) < ABORT_AFTER:
            self._sleep_unless_ended(WATCH)
            samples += [each.value for each in self._read_settled_samples()]
        return samples[-OBSERVED:]

    def _read_settled_samples(self) -> list[Sample]:
        """Return new samples under the setting in force, without the first ones after the change."""
        new = [sample for sample in self._steps.read() if sample.version == self._version]
        settled = new[self._unsettled :]
        self._unsettled -= len(new) - len(settled)
        return settled

    def _deploy_result(self, done: Mapping[str, Any]) -> None:
        """Deploy the result of a search, and log it."""
        self._best, before = self._check_knobs(done.get("best")), self._concluded
        self._apply_knobs(self._best)
        resting = done.get("resting") is True
        self._state = "after its search, whose trials had lost all that they may" if resting else ""
        self._concluded = self._best, resting
        gain, sure, log = done.get("gain"), done.get("sure"), done.get("log")
        self._progress.record_search_end(gain if isinstance(gain, float) else None, resting=resting)
        if isinstance(gain, float) and isinstance(sure, float):
            subject, spent = self._steps.score.subject, self._steps.score.spent
            found = f"{subject} takes {gain:.0%} less {spent} than before" + (f" (at least {sure:.0%})" * (sure > 0))
        else:
            found = "nothing is proven faster than this, with which it began"
        where = f"; log in {log}" if log else ""
        rest = f"; {done.get('because')}" if resting else ""
        # A background search that only confirms the setting is not logged again and again.
        level = logging.INFO if before == self._concluded else logging.WARNING
        trials = done.get("trials")
        logger.log(level, "autotune: %s: %s, after %s trials%s%s", format_knobs(self._best), found, trials, rest, where)

    def _check_knobs(self, knobs: Any) -> Knobs:
        """Return knobs that the tuner's process has sent; raise TunerError unless they are those of the space."""
        if not isinstance(knobs, dict) or set(knobs) != set(self._space):
            raise TunerError(f"the tuner's process has sent the knobs {knobs!r}; they are {', '.join(self._space)}")
        return knobs

    def _apply_knobs(self, knobs: Knobs) -> None:
        """Put a setting into force: every rank uses it from the same entry of the schedule on."""
        with self._turning:
            if self._ending.is_set():
                raise _Ended
            if knobs == self._running:
                return
            try:
                self._version = self._engine.set_knobs(**knobs)
            except (TypeError, ValueError) as error:
                raise TunerError(f"the tuner's process has sent knobs that cannot be: {error}") from None
            self._running, self._unsettled = knobs, self._settling
            self._progress.record_change()

    def _sleep_unless_ended(self, seconds: float) -> None:
        if self._ending.wait(seconds):
            raise _Ended
