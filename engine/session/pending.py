"""State of a process of an elastic job while it is in no world: before the first one, and between two worlds.

Nothing communicates in this state. `rank()`, `size()` and similar queries return planned numbers: those of the launcher
before the first world, later those of the world that the process is about to enter.
"""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..collectives.process_sets import ProcessSet, global_process_set
from ..config import config
from ..config.world import World
from ..errors import ConfigError
from ..metrics.export.in_process import InProcess, listen
from ..native import core
from ..net.rendezvous import CancellationToken
from ..text import logs
from ..tuning.trial_loop import Spent
from .optimizers import move_optimizers
from .registry import split_gathered
from .session import EngineSession, RankState
from .startup import start_tuning

GATE = "ENGINE_GATE"
"""Variable of every process of an elastic job: the address at which it asks for its place in a world."""
FEWEST_TRIALS = 2
"""Remaining trials of a job that a new search needs: one for the knobs in force, and one for others."""
_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two polls while waiting for the other ranks


@dataclass
class PendingSession:
    """State that a process carries into its next world."""

    world: World  # planned world, or the one that this process was told to enter
    given: dict[str, Any]  # settings that the user has chosen, by name
    sets: list[ProcessSet] = field(default_factory=list)  # process sets in the order in which they were added
    # State of the previous world that this process will tell the other ranks
    state: RankState = field(default_factory=RankState)
    metrics_service: InProcess | None = None  # metrics service that keeps running

    def __post_init__(self) -> None:
        self.pid = os.getpid()
        self.settings = config.Config(**self.given)
        self.await_world(self.world)

    @staticmethod
    def take_state(session: EngineSession) -> tuple[dict[str, Any], list[ProcessSet], RankState, InProcess | None]:
        """Take the fields of this class, except `world`, out of a world that this process is about to leave."""
        tuning, serving = session.tuning, session.metrics_service
        session.metrics_service = None
        knobs = session.engine.knobs() if tuning is None else tuning.best
        told = RankState(
            last=session.generation,
            # Only the rank with the tuner knows good knobs during a search; the others return those before the search.
            knobs=session.state.knobs if session.searching and tuning is None else knobs,
            spent=_estimate_spent(session),
            searched=session.state.searched + (session.world.size,) * (tuning is not None and tuning.concluded),
        )
        return session.given, [*session.sets.added, *session.lost], told, serving

    def await_world(self, world: World) -> None:
        """Plan the world that this process waits for, also in its process sets."""
        self.world = world
        global_process_set._await_world(world.rank, tuple(range(world.size)))
        for each in self.sets:
            each._await_world(world.rank, each._ranks)

    def add(self, chosen: ProcessSet | Iterable[int]) -> ProcessSet:
        """Register a process set that is to be formed in the next world."""
        added = chosen if isinstance(chosen, ProcessSet) else ProcessSet(chosen)
        if not added._ranks:
            raise ValueError("a process set of an elastic job is given by its ranks, at least one")
        if any(added is each or added._ranks == each._ranks for each in self.sets):
            raise ValueError(f"there is a process set with the ranks {list(added.ranks)} already")
        added._await_world(self.world.rank, added._ranks)
        self.sets.append(added)
        return added

    def remove(self, process_set: ProcessSet) -> bool:
        """Unregister a process set; return False if it was not registered."""
        if process_set not in self.sets:
            return False
        self.sets.remove(process_set)
        process_set._leave_world()
        return True

    def free_metrics_port(self) -> None:
        """Stop the metrics service, unless this rank serves its host in the next world, too."""
        if self.metrics_service is not None and self.world.local_rank != 0:
            service, self.metrics_service = self.metrics_service, None
            service.stop()

    def begin_numbers(self) -> None:
        """Reset the counters of names in a new world, since its new ranks have not seen the previous worlds."""
        for each in (global_process_set, *self.sets):
            each._begin_numbers()

    def close(self) -> None:
        """End the wait for a world: reset the process sets and stop the metrics service."""
        for each in (global_process_set, *self.sets):
            each._leave_world()
        if self.metrics_service is not None:
            self.metrics_service.stop()


def exchange_states(engine: core.Engine, state: RankState, cancel: CancellationToken | None) -> list[RankState]:
    """Exchange the state of all ranks of a new world; return it by rank. Collective.

    When it returns, the engines of all ranks run. It raises CalledOff if the world was called off before all ranks have
    come here, since one of them may never come.
    """
    handle = engine.allgather(array("b", pickle.dumps(state)), "engine.enter", cancel is None)
    pause = _SHORTEST
    while cancel is not None and not handle.done:
        cancel.wait(pause)
        pause = min(2 * pause, _LONGEST)
    handle.wait()
    return [pickle.loads(each) for each in split_gathered(handle)]


def restore_state(session: EngineSession, pending: PendingSession, everybody: Sequence[RankState]) -> None:
    """Carry the state of earlier worlds, that of this process and that of all ranks by rank, into a new one.

    Collective.
    """
    world = session.world
    pending.begin_numbers()
    knobs = _common_knobs(everybody, session.engine)
    session.searching = _may_search(everybody, session.settings, world.size)
    session.state.spent = _most_spent(everybody)
    session.state.searched = tuple({size for told in everybody for size in told.searched})
    session.state.knobs = knobs
    version = session.engine.set_knobs(**knobs) if world.rank == 0 and knobs else None
    for process_set in _in_order(pending.sets, everybody):
        why = _explain_missing_set(process_set, world, everybody)
        if why:
            process_set._record_loss(why)
            session.lost.append(process_set)
        else:
            process_set._leave_world()
            session.record_process_set(session.sets.add(process_set, moved=True))
    move_optimizers(min(told.optimizers for told in everybody), _find_newest_rank(everybody))
    _serve(session, pending)
    if world.rank == 0 and (session.searching or not (session.settings.autotune or knobs)):
        start_tuning(session, knobs, version)


def _serve(session: EngineSession, pending: PendingSession) -> None:
    """Continue to serve metrics, or start to, if this rank is the one that does on its host."""
    serving = pending.metrics_service
    if serving is None:
        try:
            serving = listen(session.settings, session.world.local_rank)
        except ConfigError as error:  # The world has started; this is no reason to end it.
            logs.logger.warning("%s", error)
    if serving is not None:
        session.metrics_service = serving
        serving.start(session.pids)


def _find_newest_rank(everybody: Sequence[RankState]) -> int | None:
    """Return the lowest rank among those from the newest earlier world; None if no rank was in a world."""
    last = max((told.last for told in everybody if told.last is not None), default=None)
    return next((rank for rank, told in enumerate(everybody) if last is not None and told.last == last), None)


def _common_knobs(everybody: Sequence[RankState], engine: core.Engine) -> dict[str, Any]:
    """Return the knobs of earlier worlds to apply in a new one, limited to what its hosts support.

    Knobs that are in force already are left out. Empty if no rank knows any.
    """
    known = [told for told in everybody if told.knobs is not None]
    if not known:
        return {}
    best = max(known, key=lambda told: -1 if told.last is None else told.last)  # the first of several
    knobs = {name: value for name, value in (best.knobs or {}).items() if name in config.list_knobs()}
    if not engine.chainable:
        knobs.pop("between_hosts", None)
    if "sockets_per_lane" in knobs:
        knobs["sockets_per_lane"] = min(knobs["sockets_per_lane"], engine.sockets_per_lane or 1)
    return {name: value for name, value in knobs.items() if value != engine.knobs()[name]}


def _estimate_spent(session: EngineSession) -> Spent:
    """Return the cost of trials for the job. Ranks without the tuner estimate two changes of knobs per trial."""
    if session.tuning is not None:
        return session.tuning.spent
    before = session.state.spent
    return replace(before, trials=before.trials + session.engine.knobs()["version"] // 2 * session.searching)


def _most_spent(everybody: Sequence[RankState]) -> Spent:
    """Return the largest cost of trials that any rank knows of."""
    return Spent(max(told.spent.trials for told in everybody), max(told.spent.lost for told in everybody))


def _may_search(everybody: Sequence[RankState], settings: config.Config, size: int) -> bool:
    """Return whether the tuner starts a search in a new world.

    It does not if a search has ended in a world of this size, or if too few trials are left.
    """
    left = settings.autotune_trials - _most_spent(everybody).trials
    known = any(size in told.searched for told in everybody)
    first = not any(told.spent.trials for told in everybody)
    return settings.autotune and not known and (first or left >= FEWEST_TRIALS)


def _in_order(sets: Sequence[ProcessSet], everybody: Sequence[RankState]) -> list[ProcessSet]:
    """Sort process sets in the order of rank 0's, which is the same on all ranks; sets that rank 0 lacks go last."""
    first = {ranks: place for place, ranks in enumerate(everybody[0].sets)}
    return sorted(sets, key=lambda each: first.get(each._ranks, len(first)))


def _explain_missing_set(process_set: ProcessSet, world: World, everybody: Sequence[RankState]) -> str:
    """Return the reason why a set of an earlier world cannot be formed in a new one; empty: it can."""
    ranks = process_set._ranks
    text = f"{process_set} is not in world {world.number}, which has {world.size} ranks"
    if ranks[-1] >= world.size:
        return f"{text}: it comes back in a world that has all of its ranks"
    lacking = [rank for rank, told in enumerate(everybody) if ranks not in told.sets]
    return f"{text}: rank {lacking[0]} has not added it. Add it before elastic.run, on every rank" if lacking else ""
