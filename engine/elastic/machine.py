"""State machine of the driver: decides from events and their times which workers form which world.

It has no socket, no thread and no clock. `handle` takes an event and the time, and returns actions. `deadline` returns
when it needs a `Tick`. A world never changes: it ends, and the remaining workers form the next one.

| phase | event or condition | consequence |
|---|---|---|
| WAITING | enough workers are at the gate: at first `size`, after `start_timeout` and later `min_size`; \
starting newcomers were waited for during `grow_wait`; no worker is unfenced | GATHERING, the next world |
| | too few workers, and those that may stay have the newest commit | END to those that shall leave |
| | too few workers after `elastic_timeout` | OVER, with the first cause |
| | there was a commit, and no worker at the gate holds one | OVER |
| GATHERING | all members have joined | RUNNING |
| | a member has ended or come back, its agent is lost, or `meeting` is over | VOID to the others; RESETTING |
| | the same, and all members live | newcomers leave if no worker of their host holds a commit; the host backs off |
| RUNNING | a member has ended, its agent is lost, or it has come to the gate | RESETTING |
| | a member shall leave: its host has gone or leaves, it has asked to leave, or it is slow; \
if all members shall, there are enough newcomers for a world with one of them | UPDATE to all, once |
| | a newcomer at the gate shall leave | END; one that was in a world is held until this one is over |
| | a newcomer at the gate has another build | END; its host is blacklisted |
| | newcomers allow a larger world, since `grow_wait`, and the world has committed | UPDATE to all, once |
| RESETTING | members still compute after `stall_limit`; one that has stalled, after `stalled_wait` | they are killed |
| | no member computes any more; enough workers at the gate | END to those that leave; GATHERING if none is unfenced |
| | no member computes any more, and too few workers are at the gate | WAITING |
| | `reset_limit` or `barren_limit` is exceeded; or there was a commit, and no worker at the gate holds one | OVER |
| GATHERING, RUNNING, RESETTING | a member is done | DRAINING |
| DRAINING | a worker comes to the gate | END(good) |
| | a member computes after `stall_limit` | it is killed |
| | a member fails, or a process that is done | recorded as the first cause |
| | no process is left | OVER; good if no failure was recorded |
| OVER | a worker comes to the gate | END |
| all but DRAINING, OVER | two members, or before the first world two workers, raise the same with no commit between; \
an exception that only newcomers raise among trained workers does not count | OVER |
| | a slot is free, and fewer than `max_size` workers may stay | START |
| all | a starting worker is not at the gate after `start_timeout` | it is killed |
| | a worker that was told END runs after `end_grace` | it is killed |
| | a worker that is killed has not ended after `kill_wait` | its host's agent is disowned |
| | an agent is lost or disowned | its workers are dead when `lease` is over, or when they are reported to have ended |
| | the user stops the job | all workers are killed; OVER |

A worker is *unfenced* if it was in a world and may still run, but neither computes in the newest world nor is at the
gate. No world gathers as long as there is such a worker: it could write what now belongs to others.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from ..config.builds import Builds
from . import events, texts
from .causes import Cause, Causes, Kind
from .events import Action, Event, Why
from .hosts import HostRegistry
from .limits import JobLimits
from .orders import WorkerOrders
from .roster import Roster, Worker, WorkerState

TOLD_EVERY = {"RESETTING": 10.0, "WAITING": 60.0}  # seconds between two lines that say what the job waits for


class Phase(Enum):
    """Phase of the job."""

    WAITING = "too few workers for a world"
    GATHERING = "the members of a world meet"
    RUNNING = "a world trains"
    RESETTING = "a world is over, and its members come to the gate"
    DRAINING = "the training is complete, and processes end"
    OVER = "the job's end is decided"


class Machine:
    """State machine of the driver. Times are seconds of any clock that does not go back.

    Its `hosts`, `roster` and `causes` are read-only for callers.
    """

    def __init__(self, limits: JobLimits, now: float) -> None:
        self.limits = limits
        self.phase = Phase.WAITING
        self.world = 0  # number of the newest world; 0: there was none
        self.outcome: events.Over | None = None  # outcome of the job, once it is decided
        self.hosts = HostRegistry(limits)
        self.roster = Roster(limits, self.hosts)
        self._orders = WorkerOrders(limits, self.hosts, self.roster)
        self.causes = Causes(limits)
        self._builds = Builds()
        self._now = self._began = self._since = self._told = now
        self._newest: int | None = None  # the newest commit that was reported
        self._committed = False  # whether the newest world has committed
        self._enough_since: float | None = None  # WAITING: since when there are enough workers
        self._grow_since: float | None = None  # RUNNING: since when there are newcomers for a larger world
        self._updates = 0
        self._updated = False  # whether the newest world was told to come to the gate
        self._kinds: tuple[str, ...] = ()  # reasons of that update
        self._kind = Kind.HOSTS  # their kind
        self._spoilt = ""  # DRAINING: the first failure

    @property
    def finished(self) -> bool:
        """True once the outcome is decided and no process may run any more."""
        return self.phase is Phase.OVER and len(self.roster) == 0

    def handle(self, now: float, event: Event) -> list[Action]:
        """Process an event, and return the actions to execute, in this order.

        `now` is in seconds; a ValueError if it is before that of the last call.
        """
        if now < self._now:
            raise ValueError(f"it was {self._now} already, and now it is {now}")
        self._now = now
        self._orders.begin_round(now)
        # If a world cannot meet, only the first of these workers is killed: the others then get more time.
        for worker in self.roster.by_worth():
            if worker.until is not None and worker.until <= now:
                self._handle_late_worker(worker)
        _REACTIONS[type(event)](self, event)
        self._turn_away()
        before = None
        while before is not self.phase:
            before = self.phase
            _STEPS[before](self)
        if room := self._count_startable():
            self._orders.start(room)
        self._report_waiting()
        return self._orders.given

    def next_deadline(self) -> float | None:
        """Return the time of the next `Tick` if no event comes before; None if no deadline is pending."""
        times = [worker.until for worker in self.roster]
        if self.phase is Phase.WAITING:
            times += [
                self._since + self.limits.elastic_timeout,
                _add_seconds(self._enough_since, self.limits.grow_wait),
            ]
            times += [self._began + self.limits.start_timeout] if self.world == 0 else []
        if self.phase is Phase.RUNNING and self._committed and not self._updated:
            times.append(_add_seconds(self._grow_since, self.limits.grow_wait))
        if self.phase.name in TOLD_EVERY:
            times.append(self._told + TOLD_EVERY[self.phase.name])
        if self._count_startable() > 0:
            times.append(self.hosts.next_free(self.roster.collect_taken_slots(), self._now))
        return min((time for time in times if time is not None and time > self._now), default=None)

    # Reactions to events.

    def _handle_tick(self, event: events.Tick) -> None:
        """Handle a tick: only time has passed."""

    def _handle_found(self, event: events.Found) -> None:
        self.hosts.update(event.slots)

    def _handle_agent_lost(self, event: events.AgentLost) -> None:
        if self.hosts.knows_host(event.host):
            self._handle_lost_host(event.host, event.why, event.within)

    def _handle_host_leaves(self, event: events.HostLeaves) -> None:
        if self.hosts.knows_host(event.host):
            self.hosts.mark_leaving(event.host)

    def _handle_leaves(self, event: events.Leaves) -> None:
        if (worker := self.roster.get(event.worker)) is not None:
            worker.leaving = f"{worker} has asked to leave"

    def _handle_slow(self, event: events.Slow) -> None:
        """Let a slow member leave, unless its world is about to end anyway or would become too small."""
        worker = self.roster.get(event.worker)
        due = self.phase is not Phase.RUNNING or self._updated or self._grow_since is not None
        if worker is None or not self.roster.is_member(worker) or due:
            return
        if self.limits.find_largest_size(len(self.roster.list_computing()) - 1):
            worker.leaving, worker.slow = f"{worker} is slow: {event.why}", True
            alone = sum(other.slot.host == worker.slot.host for other in self.roster.list_computing()) == 1
            self.hosts.exclude_slot(worker.slot, whole=alone, now=self._now)
            self._orders.issue_order(events.ShowLine(f"{worker.leaving}; it shall leave"))

    def _handle_ended(self, event: events.Ended) -> None:
        worker = self.roster.remove(event.worker)
        if (
            worker is None
            or worker.state in (WorkerState.ENDING, WorkerState.KILLED, WorkerState.LOST)
            or (worker.state is WorkerState.DONE and event.code == 0)
        ):
            return
        self._handle_failure(worker, event.what, event.exception, own=event.code > 0)

    def _handle_ready(self, event: events.Ready) -> None:
        self._record_newest_commit(event.commit)
        worker = self.roster.get(event.worker)
        if worker is None or worker.state in (WorkerState.GATE, WorkerState.KILLED, WorkerState.LOST):
            return
        if worker.state in (WorkerState.DONE, WorkerState.ENDING):
            self._orders.issue_order(
                events.EndWorker(worker.number, "there is no place for it any more in this job", False)
            )
            return
        worker.state, worker.until, worker.commit, worker.build = WorkerState.GATE, None, event.commit, event.build
        if not self.roster.is_member(worker) or self.phase not in (Phase.GATHERING, Phase.RUNNING):
            return
        if event.why is Why.HOSTS:
            self._forgive_failures()  # each member has committed on its way to the gate
            self._reset(Cause(", ".join(self._kinds) or "the hosts have changed", kind=self._kind))
        else:
            if event.why is Why.FAILURE:
                self._exclude_unreachable_hosts(event.culprit)
            self._fail_world(self._record_reported_failure(worker, event))
            self._shorten_deadline(event)

    def _handle_joined(self, event: events.Joined) -> None:
        worker = self.roster.get(event.worker)
        if worker is not None and worker.state is WorkerState.WORLD and event.world == worker.world:
            worker.joined = True
            if self.phase is Phase.GATHERING:
                worker.until = None

    def _handle_committed(self, event: events.Committed) -> None:
        self._record_newest_commit(event.commit)
        if event.world == self.world and self.phase in (Phase.GATHERING, Phase.RUNNING):
            self._forgive_failures()

    def _handle_done(self, event: events.Done) -> None:
        worker = self.roster.get(event.worker)
        if worker is None or worker.state is not WorkerState.WORLD or event.world != worker.world:
            return
        worker.state, worker.until = WorkerState.DONE, None
        if self.phase in (Phase.GATHERING, Phase.RUNNING, Phase.RESETTING):
            self._enter_phase(Phase.DRAINING)
            self._orders.set_deadline(self.limits.stall_limit)

    def _handle_stop(self, event: events.Stop) -> None:
        self._end_job(event.why)
        for worker in self.roster.list_workers(
            WorkerState.STARTING, WorkerState.GATE, WorkerState.WORLD, WorkerState.DONE, WorkerState.ENDING
        ):
            self._orders.kill(worker, event.why)

    # Steps of each phase.

    def _turn_away(self) -> None:
        """End newcomers with another build than the job's: no world with them could meet."""
        for worker in self.roster.list_workers(WorkerState.GATE):
            if worker.world == 0 and (why := self._builds.describe_difference(worker.build)):
                self.hosts.blacklist_host(worker.slot.host, self._now)
                self._orders.issue_order(events.ShowLine(f"{worker} is turned away, and its host blacklisted: {why}"))
                self._orders.end(worker, why, False)

    def _form_world(self) -> None:
        """WAITING, RESETTING: form the next world, if all conditions hold."""
        if self.phase is Phase.RESETTING and self.roster.list_computing():
            return
        if reason := self._find_end_reason():
            self._end_job(reason)
            return
        at_first = self.world == 0 and self._now < self._began + self.limits.start_timeout
        chosen = self.roster.choose_members(self.limits.size if at_first else self.limits.min_size)
        if not chosen:
            self._handle_too_few()
        elif not self._awaits_newcomers(chosen):
            numbers = {worker.number for worker in chosen}
            self._orders.end_leaving_workers(
                worker for worker in self.roster.list_workers(WorkerState.GATE) if worker.number not in numbers
            )
            if not self.roster.list_unfenced():
                self._start_gathering(chosen)

    def _handle_too_few(self) -> None:
        """Handle too few workers at the gate. Workers that shall leave may, unless only they hold the newest commit."""
        self._enough_since = None
        stay = [
            worker for worker in self.roster.list_workers(WorkerState.GATE) if not self.roster.departure_reason(worker)
        ]
        if stay and self.roster.keeps_newest(stay):
            self._orders.end_leaving_workers(self.roster.list_workers(WorkerState.GATE))
        if self.phase is Phase.RESETTING:
            self.roster.members.clear()
            self._enter_phase(Phase.WAITING)
        elif self._now >= self._since + self.limits.elastic_timeout:
            self._end_job(texts.describe_too_few(self.roster, self.limits))

    def _awaits_newcomers(self, chosen: list[Worker]) -> bool:
        """Return whether to wait for newcomers that are about to come. Survivors of a failure never wait for them."""
        if (
            self.phase is Phase.RESETTING
            or len(chosen) == self.limits.max_size
            or not self.roster.list_workers(WorkerState.STARTING)
        ):
            return False
        self._enough_since = self._now if self._enough_since is None else self._enough_since
        return self._now < self._enough_since + self.limits.grow_wait

    def _start_gathering(self, chosen: list[Worker]) -> None:
        self.world += 1
        self.causes.count_world()
        self._committed = self._updated = False
        self._kinds, self._kind = (), Kind.HOSTS
        self._grow_since = self._enough_since = None
        self._orders.assign_world(self.world, chosen)
        self._enter_phase(Phase.GATHERING)

    def _check_meeting(self) -> None:
        """GATHERING: start to run once all members have met."""
        members = self.roster.list_computing()
        if all(worker.joined for worker in members):
            self.hosts.record_meeting({worker.slot.host for worker in members})
            self._builds.record_build(members[0].build if members else {})
            self._enter_phase(Phase.RUNNING)

    def _request_update(self) -> None:
        """RUNNING: tell the members to come to the gate, if a worker shall leave or can be added."""
        # A former member stays at the gate until this world is over: once let go, its program could write beside it.
        self._orders.end_leaving_workers(
            worker for worker in self.roster.list_workers(WorkerState.GATE) if worker.world == 0
        )
        members = self.roster.list_computing()
        reasons = [reason for worker in members if (reason := self.roster.departure_reason(worker))]
        kinds = tuple(sorted({*reasons})) if len(reasons) < len(members) or self._may_replace() else ()
        if self._may_grow(members):
            kinds += ("there are newcomers",)
        if kinds and not self._updated:
            self._updated, self._kinds = True, kinds
            self._kind = self.roster.classify_departures(
                worker for worker in members if self.roster.departure_reason(worker)
            )
            self._updates += 1
            self._orders.issue_order(
                events.Update(self.world, tuple(worker.number for worker in members), self._updates, kinds)
            )

    def _may_replace(self) -> bool:
        """Return whether there are enough newcomers at the gate for a world with one of the members.

        It is asked when all members shall leave: they go on until others come to whom they can hand over their state.
        """
        joining = sum(not self.roster.departure_reason(worker) for worker in self.roster.list_workers(WorkerState.GATE))
        return joining > 0 and self.limits.find_largest_size(joining + 1) >= max(2, self.limits.min_size)

    def _may_grow(self, members: list[Worker]) -> bool:
        joining = [
            worker for worker in self.roster.list_workers(WorkerState.GATE) if not self.roster.departure_reason(worker)
        ]
        if self.limits.find_largest_size(len(members) + len(joining)) <= len(members):
            self._grow_since = None
            return False
        self._grow_since = self._now if self._grow_since is None else self._grow_since
        return self._committed and self._now >= self._grow_since + self.limits.grow_wait

    def _drain(self) -> None:
        """DRAINING: start nothing, and tell all workers at the gate that the training is complete."""
        for worker in self.roster.list_workers(WorkerState.STARTING):
            self._orders.kill(worker, "the training is complete")
        for worker in self.roster.list_workers(WorkerState.GATE):
            if self.roster.is_member(worker):
                worker.state = WorkerState.DONE
                self._orders.issue_order(events.EndWorker(worker.number, "the training is complete", True))
            else:
                self._orders.end(worker, "the training is complete", True)
        if len(self.roster) == 0:
            self._decide_outcome(not self._spoilt, self._spoilt)

    def _close(self) -> None:
        """OVER: tell all workers at the gate that the job is over."""
        assert self.outcome is not None
        for worker in self.roster.list_workers(WorkerState.STARTING):
            self._orders.kill(worker, "the job is over")
        for worker in self.roster.list_workers(WorkerState.GATE):
            self._orders.end(worker, self.outcome.why, self.outcome.good)

    # Ends of worlds.

    def _handle_late_worker(self, worker: Worker) -> None:
        """Handle a worker that has missed its deadline."""
        worker.until = None
        if worker.state is WorkerState.LOST:
            self.roster.remove(worker.number)
        elif worker.state is WorkerState.KILLED:
            self._orders.issue_order(
                events.Disown(worker.slot.host, f"it has not ended {worker} within {self.limits.kill_wait:g} s")
            )
            self._handle_lost_host(worker.slot.host, f"its agent has not ended {worker}")
        else:
            text = texts.describe_late_worker(worker, self.phase is Phase.GATHERING, self.limits)
            if self.roster.is_member(worker):
                self._exclude_unreachable_hosts(None)
            told_to_end = worker.state is WorkerState.ENDING
            self._orders.kill(worker, text)
            if not told_to_end:
                self._handle_failure(worker, text)

    def _handle_failure(self, worker: Worker, text: str, exception: str = "", own: bool = True) -> None:
        """Handle the failure of a worker, by its `own` doing or killed. Its slot is charged; a member's world ends."""
        if self.phase is Phase.OVER:
            return
        member = self.roster.is_member(worker)
        cause = Cause(f"{worker}: {text}", worker.number)
        if member or self.phase is Phase.WAITING:
            self.causes.record_failure(cause)
        self._charge_slot(worker, unproven=own and worker.world == 0)
        if member:
            self._fail_world(cause)
        if exception and self.phase is not Phase.DRAINING and (member or self.world == 0):
            strange = not worker.trained and any(each.trained for each in self.roster)
            earlier = self.causes.record_exception(exception, worker.number, strange)
            if earlier is not None:
                self._end_job(f"workers {earlier} and {worker.number} raised the same: {exception}")

    def _handle_lost_host(self, host: str, why: str, within: float | None = None) -> None:
        """Handle the loss of a host's agent. Its workers run at most until their lease expires."""
        lost = self._orders.mark_lost(host, within)
        self.hosts.blacklist_host(host, self._now)
        cause = Cause(f"host {host}: {why}", kind=Kind.HOST_LOST)
        if any(self.roster.is_member(worker) for worker in lost) and self.phase is not Phase.OVER:
            self.causes.record_failure(cause)
            self._fail_world(cause)

    def _record_reported_failure(self, worker: Worker, event: events.Ready) -> Cause:
        """Record the failure that a member reports. A live culprit is charged, too, so that it cannot go on failing."""
        cause = Cause(f"{worker} says: {event.text or event.why.value}", event.culprit, reported=True)
        self.causes.record_failure(cause)
        culprit = self.roster.get(event.culprit)
        if culprit is not None and self.roster.is_member(culprit) and self._charge_slot(culprit):
            self._orders.kill(culprit, "world after world has failed because of it")
        return cause

    def _shorten_deadline(self, event: events.Ready) -> None:
        """RESETTING: shorten the deadline of a stalled culprit, since the others have already waited for it."""
        culprit = self.roster.get(event.culprit) if event.stalled else None
        if self.phase is Phase.RESETTING and culprit is not None and culprit in self.roster.list_computing():
            culprit.until = min(culprit.until or self._now, self._now + self.limits.stalled_wait)

    def _exclude_unreachable_hosts(self, culprit: int | None) -> None:
        """Handle a world that could not meet, though all its members live.

        Members that hold a commit go on without the newcomers of hosts where no worker holds one. Those hosts are tried
        again later.
        """
        members = [worker for worker in self.roster if self.roster.is_member(worker)]
        if self.phase is not Phase.GATHERING or len(members) < len(self.roster.members):
            return
        holders = {worker.slot.host for worker in members if worker.commit is not None}
        strange = {worker.slot.host for worker in members} - holders
        blamed = {worker.slot.host for worker in members if worker.number == culprit} & strange
        for host in sorted(blamed or strange) if holders else ():
            rest = self.hosts.record_failed_meeting(host, self._now)
            self._orders.issue_order(
                events.ShowLine(
                    f"host {host} cannot be met by the others, which go on without it; next try in {rest:.0f} s"
                )
            )
            for worker in self.roster.list_workers_on(host):
                if worker.commit is None:
                    worker.leaving = worker.leaving or f"host {host} cannot be met by the others"

    def _charge_slot(self, worker: Worker, unproven: bool = False) -> bool:
        """Charge a failure to a worker's slot, at most once a world; return whether its host was blacklisted."""
        if worker.charged == self.world:
            return False
        worker.charged = self.world
        out = self.hosts.record_failure(worker.slot, self._now, unproven=unproven)
        if out:
            self._orders.issue_order(
                events.ShowLine(f"host {worker.slot.host} is blacklisted: failures in a row in {worker.slot}")
            )
        return out

    def _fail_world(self, cause: Cause) -> None:
        """Handle a failure of the newest world, which cannot go on."""
        if self.phase is Phase.DRAINING:
            self._spoilt = self._spoilt or cause.text
        elif self.phase in (Phase.GATHERING, Phase.RUNNING):
            self._reset(cause)

    def _reset(self, cause: Cause) -> None:
        if self.phase is Phase.GATHERING:
            self._orders.cancel_world(self.world)
        self.causes.reset(cause)
        self._enter_phase(Phase.RESETTING)
        self._orders.set_deadline(self.limits.stall_limit)

    def _find_end_reason(self) -> str:
        """Return why there can be no further world; empty if there can."""
        if self._newest is not None and all(
            worker.commit is None for worker in self.roster.list_workers(WorkerState.GATE)
        ):
            return "no worker is left that holds a commit, and to go on from random weights would be no training"
        return self.causes.too_many()

    # Common helpers.

    def _record_newest_commit(self, commit: int | None) -> None:
        if commit is not None:
            self._newest = commit if self._newest is None else max(commit, self._newest)

    def _forgive_failures(self) -> None:
        """Handle a commit of the newest world: earlier failures are forgiven."""
        self._committed = True
        for worker in self.roster.list_computing():
            worker.trained = True
        self.hosts.reset_failures(worker.slot for worker in self.roster if self.roster.is_member(worker))
        self.causes.record_commit()

    def _count_startable(self) -> int:
        """Return how many workers may be started."""
        over = self.phase in (Phase.DRAINING, Phase.OVER)
        return 0 if over else max(0, self.limits.max_size - self.roster.count_staying())

    def _end_job(self, reason: str) -> None:
        first = self.causes.first_failure
        self._decide_outcome(False, reason if first is None else f"{first.text}\nThe job ends: {reason}")

    def _decide_outcome(self, good: bool, why: str) -> None:
        if self.phase is Phase.OVER:
            return
        if self.phase is Phase.GATHERING:
            self._orders.cancel_world(self.world)
        self._enter_phase(Phase.OVER)
        self._orders.set_deadline(self.limits.stall_limit)
        self.outcome = events.Over(good, why)
        self._orders.issue_order(self.outcome)

    def _report_waiting(self) -> None:
        every = TOLD_EVERY.get(self.phase.name)
        if every is not None and self._now >= self._told + every:
            self._told = self._now
            self._orders.issue_order(
                events.ShowLine(texts.describe_wait(self.roster, self.limits, self.hosts, self._now))
            )

    def _enter_phase(self, phase: Phase) -> None:
        self.phase = phase
        self._since = self._told = self._now


_REACTIONS: dict[type[Any], Callable[[Machine, Any], None]] = {
    events.Tick: Machine._handle_tick,
    events.Found: Machine._handle_found,
    events.AgentLost: Machine._handle_agent_lost,
    events.HostLeaves: Machine._handle_host_leaves,
    events.Ended: Machine._handle_ended,
    events.Ready: Machine._handle_ready,
    events.Joined: Machine._handle_joined,
    events.Committed: Machine._handle_committed,
    events.Done: Machine._handle_done,
    events.Leaves: Machine._handle_leaves,
    events.Slow: Machine._handle_slow,
    events.Stop: Machine._handle_stop,
}
_STEPS: dict[Phase, Callable[[Machine], None]] = {
    Phase.WAITING: Machine._form_world,
    Phase.GATHERING: Machine._check_meeting,
    Phase.RUNNING: Machine._request_update,
    Phase.RESETTING: Machine._form_world,
    Phase.DRAINING: Machine._drain,
    Phase.OVER: Machine._close,
}


def _add_seconds(time: float | None, seconds: float) -> float | None:
    return None if time is None else time + seconds
