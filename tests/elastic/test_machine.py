"""The driver's state machine: each row of its table, and its promises over random sequences of events."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.elastic import events, machine
from engine.elastic.causes import Causes, Kind
from engine.elastic.events import Action, Event, Why
from engine.elastic.limits import JobLimits
from engine.elastic.machine import Machine, Phase
from engine.elastic.orders import WorkerOrders
from engine.elastic.places import Slot
from engine.elastic.roster import Roster, WorkerState

from .model import Job, run

SEQUENCES = 10_000
LENGTHS = (48, 64, 80, 96, 112)  # bytes of sequences; 80 make about 35 events before those of the end

A = TypeVar("A")
UPDATE = Machine._request_update


class Driver:
    """A machine with the time, and its actions since the last query."""

    def __init__(self, limits: JobLimits, **slots: int) -> None:
        self.now = 0.0
        self.machine = Machine(limits, 0.0)
        self.actions: list[Action] = []
        self.tell(events.Found(slots))

    def tell(self, *told: Event) -> Driver:
        for event in told:
            self.actions += self.machine.handle(self.now, event)
        return self

    def ready(
        self, *workers: int, world: int = 0, why: Why = Why.NEW, commit: int | None = None, **more: Any
    ) -> Driver:
        return self.tell(*(events.Ready(worker, world, why, commit=commit, **more) for worker in workers))

    def join(self, *workers: int) -> Driver:
        return self.tell(*(events.Joined(worker, self.machine.world) for worker in workers))

    def at(self, now: float) -> Driver:
        """Let time pass, with a tick at every deadline."""
        while (deadline := self.machine.next_deadline()) is not None and deadline < now:
            self.now = deadline
            self.tell(events.Tick())
        self.now = now
        return self.tell(events.Tick())

    def train(self, *workers: int, commit: int | None = None) -> Driver:
        """Form a first world of these workers."""
        self.ready(*workers).join(*workers)
        assert self.machine.phase is Phase.RUNNING
        if commit is not None:
            self.tell(events.Committed(workers[0], self.machine.world, commit))
        self.actions.clear()
        return self

    def taken(self, kind: type[A]) -> list[A]:
        """Return and remove the actions of a kind."""
        found = [action for action in self.actions if isinstance(action, kind)]
        self.actions = [action for action in self.actions if not isinstance(action, kind)]
        return found

    def members(self) -> list[int]:
        """Return the members of the newest world by rank, according to the last `Assign`."""
        return list(self.taken(events.Assign)[-1].places)

    @property
    def phase(self) -> Phase:
        return self.machine.phase

    @property
    def why(self) -> str:
        assert self.machine.outcome is not None and not self.machine.outcome.good
        return self.machine.outcome.why


def killed(worker: int) -> events.Ended:
    return events.Ended(worker, -9, "killed by SIGKILL")


def raised(worker: int, exception: str) -> events.Ended:
    return events.Ended(worker, 1, "ended with exit code 1", exception)


# Rows of the table, in order.


def test_the_first_world_has_the_size_that_was_asked_for() -> None:
    driver = Driver(JobLimits(3, 1, 3), a=4)
    assert [(start.worker, start.slot) for start in driver.taken(events.StartWorker)] == [
        (n, Slot("a", n)) for n in range(3)
    ]
    assert driver.ready(2, 0).phase is Phase.WAITING
    assert driver.ready(1).phase is Phase.GATHERING
    assert driver.members() == [0, 1, 2]
    assert driver.join(0, 1).phase is Phase.GATHERING
    assert driver.join(2).phase is Phase.RUNNING


def test_after_the_start_timeout_the_first_world_may_be_smaller() -> None:
    driver = Driver(JobLimits(3, 2, 3, start_timeout=60), a=2).ready(0, 1)
    assert driver.at(59.9).phase is Phase.WAITING
    assert driver.at(60).phase is Phase.GATHERING


def test_newcomers_that_start_are_waited_for_a_little() -> None:
    driver = Driver(JobLimits(2, 1, 4, grow_wait=2), a=4).ready(0, 1)
    assert driver.at(1.9).phase is Phase.WAITING
    driver.ready(2).at(2)
    assert driver.members() == [0, 1, 2]


def test_waiting_ends_with_the_first_cause() -> None:
    driver = Driver(JobLimits(2, 2, 2, elastic_timeout=600), a=1, b=1).train(0, 1, commit=3)
    driver.tell(events.AgentLost("b", "no word for 30 s")).ready(0, world=1, why=Why.FAILURE, commit=3)
    assert driver.phase is Phase.WAITING
    assert driver.at(599).phase is Phase.WAITING
    lines = [said.text for said in driver.taken(events.ShowLine)]
    assert any(
        "waiting for workers of a world of at least 2: 1 ready, 0 starting; blacklisted: b (for good)" in line
        for line in lines
    )
    driver.at(600)
    assert driver.phase is Phase.OVER
    assert driver.why.splitlines()[0] == "host b: no word for 30 s"
    assert [end.good for end in driver.taken(events.EndWorker)] == [False]


@pytest.mark.parametrize("victim", range(3))
def test_a_death_while_members_meet_calls_the_world_off_at_once(victim: int) -> None:
    driver = Driver(JobLimits(3, 2, 3), a=3).ready(0, 1, 2)
    others = tuple({0, 1, 2} - {victim})
    driver.join(others[0]).tell(killed(victim))
    assert driver.phase is Phase.RESETTING
    assert driver.taken(events.Void) == [events.Void(1, others)]
    driver.ready(others[0], world=1, why=Why.FAILURE).ready(others[1], why=Why.VOID)
    assert driver.phase is Phase.GATHERING and driver.machine.world == 2
    assert driver.members() == list(others)


def test_who_does_not_meet_the_others_is_killed() -> None:
    driver = Driver(JobLimits(3, 2, 3, start_timeout=60), a=3).ready(0, 1, 2).join(0, 1).at(60)
    assert [kill.worker for kill in driver.taken(events.KillWorker)] == [2]
    assert driver.taken(events.Void) == [events.Void(1, (0, 1))]


def test_survivors_go_on_at_once_and_the_replacement_joins_later() -> None:
    driver = Driver(JobLimits(3, 2, 3), a=3).train(0, 1, 2, commit=7)
    driver.tell(killed(1)).ready(0, 2, world=1, why=Why.FAILURE, commit=7)
    assert driver.members() == [0, 2]
    driver.join(0, 2).at(1)
    assert driver.taken(events.StartWorker) == [events.StartWorker(3, Slot("a", 1))]  # its slot cools down for a second
    driver.ready(3).at(10)
    assert driver.taken(events.Update) == []  # only after a commit
    driver.tell(events.Committed(0, 2, 8))
    assert driver.taken(events.Update) == [events.Update(2, (0, 2), 1, ("there are newcomers",))]
    driver.ready(0, 2, world=2, why=Why.HOSTS, commit=9)
    assert driver.members() == [0, 3, 2]  # in the order of slots


def test_newcomers_are_collected() -> None:
    driver = Driver(JobLimits(1, 1, 3, grow_wait=2), a=3)
    driver.ready(0).at(2).join(0).tell(events.Committed(0, 1, 1)).ready(1).at(3.9).ready(2)
    assert driver.taken(events.Update) == []
    assert len(driver.at(4).taken(events.Update)) == 1
    assert driver.at(100).taken(events.Update) == []


def test_two_deaths_shrink_a_reset_and_make_no_other() -> None:
    driver = Driver(JobLimits(4, 2, 4), a=4).train(0, 1, 2, 3)
    driver.tell(killed(1)).ready(0, world=1, why=Why.FAILURE).tell(killed(3))
    assert driver.phase is Phase.RESETTING
    driver.ready(2, world=1, why=Why.FAILURE)
    assert driver.members() == [0, 2] and len(driver.machine.causes.resets) == 1


def test_whom_a_reset_waits_for_is_told_and_killed_in_the_end() -> None:
    driver = Driver(JobLimits(3, 1, 3, stall_limit=50), a=3).train(0, 1, 2)
    driver.tell(killed(1)).ready(0, world=1, why=Why.FAILURE).at(30)
    assert [said.text for said in driver.taken(events.ShowLine)][-1].startswith(
        "world 1 is over; waiting for worker 2 in slot 2"
    )
    driver.at(50)
    assert [kill.worker for kill in driver.taken(events.KillWorker)] == [2]
    assert driver.phase is Phase.RESETTING  # it may still run
    assert driver.tell(killed(2)).phase is Phase.GATHERING


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (events.Found({"a": 2}), "host b is not among the hosts any more"),
        (events.Found({"a": 2, "b": 0}), "host b has 0 slots now"),
        (events.HostLeaves("b"), "host b leaves"),
        (events.Leaves(2), "worker 2 in slot 0 of b has asked to leave"),
        (events.Slow(2, "50 ms"), "worker 2 in slot 0 of b is slow: 50 ms"),
    ],
)
def test_who_shall_leave_does_so_after_a_commit_and_is_gone_before_the_next_world(event: Event, kind: str) -> None:
    driver = Driver(JobLimits(3, 1, 3), a=2, b=1).train(0, 1, 2, commit=5).tell(event)
    assert driver.taken(events.Update) == [events.Update(1, (0, 1, 2), 1, (kind,))]
    driver.ready(0, 1, 2, world=1, why=Why.HOSTS, commit=6)
    assert [(end.worker, end.good) for end in driver.taken(events.EndWorker)] == [(2, False)]
    assert driver.phase is Phase.RESETTING
    driver.tell(events.Ended(2, 1, "ended with exit code 1"))
    assert driver.members() == [0, 1]


def test_a_slow_worker_stays_where_its_world_would_be_too_small() -> None:
    driver = Driver(JobLimits(2, 2, 2), a=2).train(0, 1).tell(events.Slow(1, "50 ms"))
    assert driver.taken(events.Update) == []


@pytest.mark.parametrize("slots", [{"a": 1, "b": 1}, {"a": 2}], ids=["alone on its host", "beside others"])
def test_where_a_slow_worker_was_nobody_is_started_for_a_while(slots: dict[str, int]) -> None:
    """The host is to blame if the worker was alone there, otherwise the slot: its other workers were not slow."""
    driver = Driver(JobLimits(2, 1, 2, cooldown=(5.0, 5.0)), **slots).train(0, 1, commit=1)
    driver.tell(events.Slow(0, "50 ms")).ready(0, 1, world=1, why=Why.HOSTS, commit=2)
    driver.tell(events.Ended(0, 1, "ended with exit code 1"))
    assert driver.machine.causes.resets[-1].kind is Kind.SLOW
    assert driver.members() == [1] and driver.taken(events.StartWorker) == []
    assert bool(driver.machine.hosts.describe_blacklist(driver.now)) is (len(slots) == 2)
    assert driver.at(4.9).taken(events.StartWorker) == []
    assert [start.slot for start in driver.at(5.1).taken(events.StartWorker)] == [Slot("a", 0)]


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (events.Found({"a": 2}), Kind.HOSTS),
        (events.Leaves(2), Kind.LEFT),
        (events.Slow(2, "50 ms"), Kind.SLOW),
        (events.Ended(2, -9, "killed by SIGKILL"), Kind.FAILURE),
        (events.AgentLost("b", "gone"), Kind.HOST_LOST),
        (events.Found({"a": 2, "b": 2}), Kind.NEWCOMERS),
    ],
)
def test_each_reset_is_told_in_a_word(event: Event, kind: Kind) -> None:
    driver = Driver(JobLimits(3, 1, 4), a=2, b=1).train(0, 1, 2, commit=5).tell(event)
    if kind is Kind.NEWCOMERS:
        driver.ready(3).at(10.0)
    driver.ready(0, 1, world=1, why=Why.FAILURE if kind is Kind.FAILURE else Why.HOSTS, commit=6)
    assert [cause.kind for cause in driver.machine.causes.resets] == [kind]


def test_a_host_that_comes_back_before_the_reset_keeps_its_workers() -> None:
    driver = Driver(JobLimits(2, 1, 2), a=1, b=1).train(0, 1, commit=1).tell(events.Found({"a": 1}))
    assert len(driver.taken(events.Update)) == 1
    driver.tell(events.Found({"b": 1, "a": 1})).ready(0, 1, world=1, why=Why.HOSTS, commit=2)
    assert driver.members() == [0, 1] and driver.taken(events.EndWorker) == []


def test_all_hosts_are_exchanged_without_losing_the_commit() -> None:
    driver = Driver(JobLimits(2, 2, 2, start_timeout=9), a=2).train(0, 1, commit=4)
    driver.tell(events.Found({"b": 2}))
    assert [start.worker for start in driver.taken(events.StartWorker)] == [2, 3]
    assert driver.phase is Phase.RUNNING and driver.taken(events.Update) == []  # there is no other worker yet
    driver.ready(2, 3).ready(0, 1, world=1, why=Why.HOSTS, commit=5)
    assert [end.worker for end in driver.taken(events.EndWorker)] == [1]
    driver.tell(events.Ended(1, 1, "ended with exit code 1"))
    assert driver.members() == [0, 2]  # the old host still ranks as the older one
    driver.join(0, 2)
    assert [update.world for update in driver.taken(events.Update)] == [1, 2]
    driver.ready(0, 2, world=2, why=Why.HOSTS, commit=6).tell(events.Ended(0, 1, "ended with exit code 1"))
    assert driver.members() == [2, 3]


def test_the_last_worker_goes_on_until_there_are_enough_to_whom_it_can_leave_what_it_has() -> None:
    driver = Driver(JobLimits(1, 1, 2), a=1).train(0, commit=4).tell(events.Leaves(0))
    assert driver.at(1000).phase is Phase.RUNNING and driver.actions == []
    driver.tell(events.Found({"a": 1, "b": 2})).ready(1)
    assert [update.world for update in driver.taken(events.Update)] == [1]
    driver.ready(0, world=1, why=Why.HOSTS, commit=5)
    assert driver.members() == [0, 1]
    few = Driver(JobLimits(3, 3, 3), a=3).train(0, 1, 2, commit=4).tell(events.Found({"b": 3})).ready(3)
    assert few.taken(events.Update) == []
    assert [update.world for update in few.ready(4).taken(events.Update)] == [1]


def test_the_last_worker_goes_on_after_a_failure_though_it_shall_leave() -> None:
    driver = Driver(JobLimits(1, 1, 1), a=1).train(0, commit=4).tell(events.Leaves(0))
    driver.ready(0, world=1, why=Why.FAILURE, commit=4)
    assert driver.members() == [0]


def test_a_world_of_one_that_can_hand_nothing_over_goes_on() -> None:
    driver = Driver(JobLimits(1, 1, 1), a=1, b=1).train(0, commit=4).tell(events.Leaves(0)).ready(1)
    assert driver.at(1000).taken(events.Update) == [] and driver.phase is Phase.RUNNING


def test_those_that_shall_leave_go_on_where_newcomers_are_too_few_for_what_they_have() -> None:
    driver = Driver(JobLimits(3, 3, 4), a=3).train(0, 1, 2, commit=4).tell(events.Found({"b": 1})).ready(3).at(100)
    assert len(driver.taken(events.Update)) == 1  # the world can grow
    driver.ready(0, 1, 2, world=1, why=Why.HOSTS, commit=5)
    assert len(driver.members()) == 4


def test_who_leaves_makes_room_where_the_others_are_too_few() -> None:
    driver = Driver(JobLimits(2, 2, 2), a=2).train(0, 1, commit=4).tell(events.Leaves(0))
    driver.ready(0, 1, world=1, why=Why.HOSTS, commit=5)
    assert [end.worker for end in driver.taken(events.EndWorker)] == [0] and driver.phase is Phase.WAITING
    driver.tell(events.Ended(0, 0, "ended with exit code 0"))
    assert [start.slot for start in driver.taken(events.StartWorker)] == [Slot("a", 0)]
    assert sorted(driver.ready(2).members()) == [1, 2]


def test_who_was_in_a_world_is_not_let_go_beside_the_next() -> None:
    """No world of an allowed size has room for it, and then its host leaves: its program could still write."""
    driver = Driver(JobLimits(4, 2, 4, multiple=2), a=2, b=1, c=1).train(0, 1, 2, 3, commit=1).tell(killed(0))
    driver.ready(1, 2, 3, world=1, why=Why.FAILURE, commit=1).join(1, 2)
    assert driver.phase is Phase.RUNNING and driver.members() == [1, 2]
    assert driver.tell(events.HostLeaves("c")).taken(events.EndWorker) == []
    driver.tell(killed(1)).ready(2, world=2, why=Why.FAILURE, commit=1).at(1).ready(4, 5)
    assert [end.worker for end in driver.taken(events.EndWorker)] == [3] and driver.phase is Phase.WAITING
    driver.tell(events.Ended(3, 1, "ended with exit code 1"))
    assert driver.members() == [4, 2]


def test_no_world_begins_beside_a_worker_that_may_run() -> None:
    """The worker's agent is cut off: the worker may write until the lease ends."""
    driver = Driver(JobLimits(3, 1, 3, lease=30), a=2, b=1).train(0, 1, 2)
    driver.at(10).tell(events.AgentLost("b", "no word")).ready(0, 1, world=1, why=Why.FAILURE)
    assert driver.at(39.9).phase is Phase.RESETTING
    assert driver.at(40).phase is Phase.GATHERING


def test_a_lease_that_has_run_for_a_while_is_waited_for_as_long_as_it_lasts() -> None:
    driver = Driver(JobLimits(3, 1, 3, lease=30), a=2, b=1).train(0, 1, 2)
    driver.tell(events.AgentLost("b", "no word", 1.5)).ready(0, 1, world=1, why=Why.FAILURE)
    assert driver.at(1.4).phase is Phase.RESETTING
    assert driver.at(1.5).phase is Phase.GATHERING


def test_who_is_known_to_run_no_more_is_not_waited_for() -> None:
    """An observer has looked at the host of the lost agent. Another worker of it may still run."""
    driver = Driver(JobLimits(4, 1, 4, lease=30), a=2, b=2).train(0, 1, 2, 3)
    driver.tell(events.AgentLost("b", "no word")).ready(0, 1, world=1, why=Why.FAILURE)
    assert driver.tell(events.Ended(2, 0, "ended with its agent")).phase is Phase.RESETTING
    assert driver.tell(events.Ended(3, 0, "ended with its agent")).phase is Phase.GATHERING
    assert len(driver.machine.causes.resets) == 1


def test_who_has_stalled_is_not_waited_for_as_long_again() -> None:
    """A worker that others blame for something else gets its time: it may be at work."""
    blamed = {"world": 1, "why": Why.FAILURE, "text": "RankStalledError: rank 1", "culprit": 1}
    driver = Driver(JobLimits(2, 1, 2, stall_limit=50, stalled_wait=1), a=1, b=1).train(0, 1)
    assert driver.ready(0, **blamed, stalled=True).at(0.9).taken(events.KillWorker) == []
    assert [kill.worker for kill in driver.at(1).taken(events.KillWorker)] == [1]
    other = Driver(JobLimits(2, 1, 2, stall_limit=50, stalled_wait=1), a=1, b=1).train(0, 1)
    assert other.ready(0, **blamed).at(49.9).taken(events.KillWorker) == []


def test_an_agent_that_does_not_kill_is_disowned() -> None:
    driver = Driver(JobLimits(2, 1, 2, stall_limit=50, kill_wait=15, lease=30), a=1, b=1).train(0, 1)
    driver.ready(0, world=1, why=Why.FAILURE, text="RankStalledError: rank 1", culprit=1).at(64.9)
    assert driver.taken(events.Disown) == []
    driver.at(65)
    assert [disown.host for disown in driver.taken(events.Disown)] == ["b"]
    assert driver.at(94.9).phase is Phase.RESETTING
    assert driver.at(95).phase is Phase.GATHERING


def test_who_was_told_to_end_and_does_not_is_killed() -> None:
    driver = Driver(JobLimits(2, 1, 2, end_grace=30), a=1, b=1).train(0, 1, commit=1).tell(events.HostLeaves("b"))
    driver.ready(0, 1, world=1, why=Why.HOSTS, commit=2).at(30)
    assert [kill.worker for kill in driver.taken(events.KillWorker)] == [1]
    assert driver.tell(killed(1)).phase is Phase.GATHERING


def test_who_does_not_come_after_its_start_is_killed_and_started_again() -> None:
    driver = Driver(JobLimits(1, 1, 1, start_timeout=60), a=1).at(60)
    assert [kill.worker for kill in driver.taken(events.KillWorker)] == [0]
    driver.tell(killed(0)).at(61)
    assert [start.worker for start in driver.taken(events.StartWorker)] == [0, 1]


def test_the_end_is_one_decision() -> None:
    """One worker is done, and another has died: the others are done, too, and none trains again."""
    driver = Driver(JobLimits(3, 1, 3), a=3).train(0, 1, 2, commit=1)
    driver.ready(2, world=1, why=Why.FAILURE, commit=1).tell(events.Done(0, 1))
    assert driver.phase is Phase.DRAINING
    driver.ready(1, world=1, why=Why.FAILURE, commit=1)
    assert [(end.worker, end.good) for end in driver.taken(events.EndWorker)] == [(2, True), (1, True)]
    driver.tell(*(events.Ended(worker, 0, "ended") for worker in range(3)))
    assert driver.machine.outcome == events.Over(True, "")
    assert driver.machine.finished and driver.machine.next_deadline() is None


def test_a_late_newcomer_is_told_that_the_training_is_complete() -> None:
    driver = Driver(JobLimits(2, 1, 3), a=3).ready(0, 1).at(2).join(0, 1).ready(2).tell(events.Done(0, 1))
    assert [(end.worker, end.good) for end in driver.taken(events.EndWorker)] == [(2, True)]
    assert (
        Driver(JobLimits(1, 1, 2), a=2)
        .ready(0)
        .at(2)
        .join(0)
        .tell(events.Done(0, 1))
        .taken(events.KillWorker)[0]
        .worker
        == 1
    )


def test_a_member_that_dies_while_others_are_done_is_the_jobs_failure() -> None:
    driver = Driver(JobLimits(2, 1, 2), a=2).train(0, 1).tell(events.Done(0, 1), killed(1), events.Ended(0, 0, "ended"))
    assert driver.why == "worker 1 in slot 1 of a: killed by SIGKILL"


def test_a_program_that_fails_after_its_training_fails_the_job() -> None:
    driver = Driver(JobLimits(1, 1, 1), a=1).train(0).tell(events.Done(0, 1), raised(0, "OSError at save.py:3"))
    assert driver.why == "worker 0 in slot 0 of a: ended with exit code 1"


def test_a_second_question_is_answered() -> None:
    driver = Driver(JobLimits(1, 1, 1), a=1).train(0).tell(events.Done(0, 1)).ready(0, world=1)
    assert [end.good for end in driver.taken(events.EndWorker)] == [False]


def test_resets_are_counted_and_told() -> None:
    driver = Driver(JobLimits(2, 1, 2, reset_limit=1, cooldown=(1, 1)), a=2).train(0, 1, commit=1)
    driver.tell(killed(1)).ready(0, world=1, why=Why.FAILURE, commit=1).join(0).tell(events.Committed(0, 2, 2)).at(5)
    driver.ready(2).at(10).ready(0, world=2, why=Why.HOSTS, commit=3)
    assert driver.why.splitlines() == [
        "1 resets were allowed (reset_limit)",
        "  reset 1: worker 1 in slot 1 of a: killed by SIGKILL",
        "  reset 2: there are newcomers",
    ]


def test_worlds_that_end_before_a_commit_are_counted() -> None:
    driver = Driver(JobLimits(2, 1, 2, barren_limit=2), a=2).train(0, 1)
    for world in (1, 2, 3):
        driver.ready(0, 1, world=world, why=Why.FAILURE, text="RankLostError").join(0, 1)
    assert driver.why.startswith("worker 0 in slot 0 of a says: RankLostError\nThe job ends: 3 worlds in a row")


def test_who_is_to_blame_for_world_after_world_is_killed() -> None:
    driver = Driver(JobLimits(2, 1, 2), a=1, b=1).train(0, 1)
    for world in (1, 2, 3):
        driver.ready(0, 1, world=world, why=Why.FAILURE, culprit=1, text="RankLostError: rank 1").join(0, 1)
    assert [kill.worker for kill in driver.taken(events.KillWorker)] == [1]


def test_nobody_goes_on_from_random_weights() -> None:
    driver = Driver(JobLimits(2, 1, 3), a=3).ready(0, 1).at(2).join(0, 1).tell(events.Committed(0, 1, 1))
    driver.ready(2).tell(killed(0), killed(1))
    assert driver.why.startswith(
        "worker 0 in slot 0 of a: killed by SIGKILL\nThe job ends: no worker is left that holds"
    )


def test_the_same_exception_twice_is_the_programs() -> None:
    error = "ValueError at train.py:7"
    driver = Driver(JobLimits(3, 1, 3), a=3).train(0, 1, 2, commit=1).tell(raised(1, error))
    driver.ready(0, 2, world=1, why=Why.FAILURE, commit=1).join(0, 2).tell(raised(2, error))
    assert driver.why == (
        "worker 1 in slot 1 of a: ended with exit code 1\nThe job ends: workers 1 and 2 raised the same: " + error
    )


def test_the_same_exception_with_a_commit_between_is_bad_luck() -> None:
    error = "ValueError at train.py:7"
    driver = Driver(JobLimits(3, 1, 3), a=3).train(0, 1, 2, commit=1).tell(raised(1, error))
    driver.ready(0, 2, world=1, why=Why.FAILURE, commit=1).join(0, 2).tell(events.Committed(0, 2, 2))
    assert driver.tell(raised(2, error)).phase is Phase.RESETTING


def test_newcomers_that_all_fail_do_not_end_a_world_that_trains() -> None:
    """Their host may lack a module, for example; before the first world such failures would end the job."""
    error = "ModuleNotFoundError at train.py:1"
    driver = Driver(JobLimits(1, 1, 3), a=1, b=2).ready(0).at(2).join(0)
    assert driver.tell(raised(1, error), raised(2, error)).phase is Phase.RUNNING
    assert Driver(JobLimits(2, 1, 2), a=2).tell(raised(0, error), raised(1, error)).phase is Phase.OVER


def test_a_newcomer_of_another_build_is_turned_away_alone() -> None:
    """The newcomer ends no world and joins none, and nothing more is started on its host."""
    driver = Driver(JobLimits(2, 1, 4), a=2)
    for worker in (0, 1):
        driver.ready(worker, build={"protocol": 7, "ENGINE_LANES": "tcp"})
    driver.join(0, 1).tell(events.Committed(0, 1, 1), events.Found({"a": 2, "b": 1, "c": 1}))
    driver.actions.clear()
    driver.ready(2, build={"protocol": 8, "ENGINE_LANES": "mpi"}).at(20)
    assert [end.worker for end in driver.taken(events.EndWorker)] == [2]
    (said,) = driver.taken(events.ShowLine)
    assert said.text == (
        "worker 2 in slot 0 of b is turned away, and its host blacklisted: it has protocol 8, the job has 7: install "
        "the same build; it has ENGINE_LANES mpi, the job has tcp: set it alike"
    )
    driver.tell(events.Ended(2, 0, "ended with exit code 0")).at(30)
    assert not driver.taken(events.Update) and driver.phase is Phase.RUNNING
    assert "b" not in {start.slot.host for start in driver.taken(events.StartWorker)}
    driver.ready(3, build={"protocol": 7, "ENGINE_LANES": "tcp"}).at(40)
    assert driver.taken(events.Update)


def test_before_a_world_has_met_nobody_knows_whose_build_is_the_jobs() -> None:
    driver = Driver(JobLimits(2, 1, 2), a=2).ready(0, build={"protocol": 7}).ready(1, build={"protocol": 8})
    assert driver.phase is Phase.GATHERING and not driver.taken(events.EndWorker)


@pytest.mark.parametrize("trained", [False, True])
def test_what_newcomers_alone_raise_does_not_end_those_that_have_trained(trained: bool) -> None:
    """A host that lacks what the program needs in a world ends nothing; the same error elsewhere ends the job."""
    error = "KeyError at model.py:3"
    driver = Driver(JobLimits(2, 1, 4), a=2).train(0, 1, commit=1).tell(events.Found({"a": 2, "b": 2}))
    driver.ready(2, 3).at(5).ready(0, 1, world=1, why=Why.HOSTS, commit=2).join(0, 1, 2, 3)
    assert driver.tell(raised(2, error)).phase is Phase.RESETTING
    driver.tell(raised(0 if trained else 3, error))
    assert driver.phase is (Phase.OVER if trained else Phase.RESETTING)
    if not trained:
        driver.ready(0, 1, world=2, why=Why.FAILURE, commit=2).join(0, 1)
        assert driver.phase is Phase.RUNNING


def test_what_the_agent_tells_takes_the_place_of_what_others_say() -> None:
    driver = Driver(JobLimits(2, 2, 2), a=2).train(0, 1, commit=1)
    driver.ready(0, world=1, why=Why.FAILURE, commit=1, culprit=1, text="RankDiedError: rank 1").tell(killed(1))
    first = driver.machine.causes.first_failure
    assert first is not None
    assert driver.machine.causes.resets[0].text == first.text == "worker 1 in slot 1 of a: killed by SIGKILL"


def test_words_of_a_world_that_is_over_mean_nothing() -> None:
    driver = Driver(JobLimits(2, 1, 2), a=2).ready(0, 1).tell(killed(1)).ready(0, why=Why.VOID)
    driver.tell(events.Joined(0, 1), events.Joined(1, 2), events.Done(0, 1), events.Ready(77, 1, Why.FAILURE))
    assert driver.phase is Phase.GATHERING and driver.machine.world == 2


def test_the_user_stops_the_job() -> None:
    driver = Driver(JobLimits(2, 1, 2), a=2).train(0, 1).tell(events.Stop("SIGTERM"))
    assert driver.why == "SIGTERM" and [kill.worker for kill in driver.taken(events.KillWorker)] == [0, 1]
    assert driver.tell(killed(0), killed(1)).machine.finished


def test_time_does_not_go_back() -> None:
    driver = Driver(JobLimits(1, 1, 1), a=1).at(5)
    with pytest.raises(ValueError, match="it was 5"):
        driver.machine.handle(4, events.Tick())


# Promises, over random sequences.


def sequence(number: int) -> bytes:
    return random.Random(number).randbytes(LENGTHS[number % len(LENGTHS)])


def play(numbers: Iterable[int]) -> list[Job]:
    """Return the jobs of some sequences; every other one falls silent at its end."""
    jobs = []
    for number in numbers:
        try:
            jobs.append(run(sequence(number), silent=number % 2 == 1))
        except Exception as error:
            raise AssertionError(f"sequence({number}): {error}") from error
    return jobs


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(4))
def test_promises_hold_over_random_sequences(part: int) -> None:
    jobs = play(range(part * SEQUENCES // 4, (part + 1) * SEQUENCES // 4))
    good = sum(job.machine.outcome == events.Over(True, "") for job in jobs)
    worlds = [job.machine.world for job in jobs]
    assert min(good, len(jobs) - good) > len(jobs) // 10 and sum(world > 2 for world in worlds) > len(jobs) // 10


@given(st.binary(max_size=LENGTHS[-1]), st.booleans())
@settings(max_examples=200)
def test_promises_hold_over_drawn_sequences(content: bytes, silent: bool) -> None:
    """Same as over random sequences, but sequences that break a promise are shrunk."""
    run(content, silent)


def _without_order(self: Roster, need: int) -> list[Any]:
    gate = [worker for worker in self.list_workers(WorkerState.GATE) if not self.departure_reason(worker)]
    size = self._limits.find_largest_size(len(gate))
    return [] if size < max(need, 1) else gate[::-1][:size]


def _without_deadline(self: WorkerOrders, worker: Any, why: str) -> None:
    worker.state, worker.until = WorkerState.KILLED, None
    self.issue_order(events.KillWorker(worker.number, why))


def _forever(self: Machine, event: events.Joined) -> None:
    """Handle `Joined` as an earlier version did: a late message of a member ended the only wait for it."""
    worker = self.roster.get(event.worker)
    if worker is not None and worker.state is WorkerState.WORLD and event.world == worker.world:
        worker.joined, worker.until = True, None


def _lets_go(self: Machine) -> None:
    """Handle an update as an earlier version did."""
    self._orders.end_leaving_workers(self.roster.list_workers(WorkerState.GATE))
    UPDATE(self)


def _at_once(self: Machine, members: list[Any]) -> bool:
    return self.limits.find_largest_size(len(members) + len(self.roster.list_workers(WorkerState.GATE))) > len(members)


@pytest.mark.parametrize("told", ["late", "by the holder", "by the newcomer"])
def test_who_holds_a_commit_goes_on_without_a_host_that_cannot_be_met(told: str) -> None:
    """The data cable is cut, but the driver reaches both: the newcomer leaves, and another comes later."""
    driver = Driver(JobLimits(2, 1, 2, start_timeout=20.0), a=1, b=1).train(0, 1, commit=1)
    driver.tell(events.Ended(1, -9, "killed by SIGKILL"))
    driver.ready(0, world=1, why=Why.FAILURE, commit=1)
    assert driver.members() == [0]
    driver.join(0).tell(events.Committed(0, 2, 2))
    waits = []
    for world in (3, 5, 7):
        before = driver.now
        while not (started := driver.taken(events.StartWorker)):
            deadline = driver.machine.next_deadline()
            assert deadline is not None
            driver.at(deadline)
        waits.append(driver.now - before)
        newcomer = started[-1].worker
        driver.ready(newcomer).at(driver.now + 3.0)
        assert driver.taken(events.Update)
        driver.ready(0, world=world - 1, why=Why.HOSTS, commit=world)
        assert sorted(driver.members()) == [0, newcomer]
        if told == "late":
            driver.at(driver.now + 20.5)
        elif told == "by the holder":
            driver.ready(0, world=world, why=Why.FAILURE, culprit=newcomer, commit=world)
        else:
            driver.ready(newcomer, world=world, why=Why.FAILURE, culprit=0)
        assert [action.worker for action in driver.taken(events.KillWorker)] == [newcomer] * (told == "late")
        if told != "by the holder":
            driver.ready(0, world=world, why=Why.VOID, commit=world)
        if told != "late":
            driver.ready(newcomer, world=world, why=Why.VOID)
        driver.tell(events.Ended(newcomer, -9, "ended"))
        assert driver.members() == [0] and driver.machine.phase is Phase.GATHERING
        driver.join(0).tell(events.Committed(0, world + 1, world + 1))
    assert waits[1] > 9.0 and waits[2] > waits[1] + 5.0
    assert driver.machine.outcome is None


def test_a_host_that_could_not_be_met_joins_when_it_can() -> None:
    known = Driver(JobLimits(2, 1, 2), a=1, b=1).machine.hosts
    assert [known.record_failed_meeting("b", 0.0) for _ in range(8)] == [
        10.0,
        20.0,
        40.0,
        80.0,
        160.0,
        320.0,
        600.0,
        600.0,
    ]
    assert known.find_free_slots((), 599.0) == [Slot("a", 0)] and known.next_free((), 599.0) == 600.0
    known.record_meeting(["b"])
    assert known.find_free_slots((), 599.0) == [Slot("a", 0), Slot("b", 0)]
    assert known.record_failed_meeting("b", 0.0) == 10.0


MUTANTS: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "no fence": (Roster, "list_unfenced", lambda self: [], "beside world"),
    "a fence without those whose agent is lost": (
        Roster,
        "list_unfenced",
        lambda self: [
            worker for worker in self.list_workers(WorkerState.ENDING, WorkerState.KILLED) if worker.world > 0
        ],
        "beside world",
    ),
    "who was in a world is let go beside the next": (Machine, "_request_update", _lets_go, "may write beside world"),
    "worlds are not called off": (
        WorkerOrders,
        "cancel_world",
        lambda self, world: None,
        "members that meet are not told",
    ),
    "newest commits are not preferred": (Roster, "choose_members", _without_order, "the newest commit is left out"),
    "a killed worker is waited for without end": (
        WorkerOrders,
        "kill",
        _without_deadline,
        "a wait without an end|does not end",
    ),
    "members are waited for without end": (
        WorkerOrders,
        "set_deadline",
        lambda self, seconds: None,
        "a wait without an end",
    ),
    "who joins late is waited for without end": (
        Machine,
        "_handle_joined",
        _forever,
        "a wait without an end|does not end",
    ),
    "slots of lost workers are used again": (
        Roster,
        "collect_taken_slots",
        lambda self: {worker.slot for worker in self if worker.state is not WorkerState.LOST},
        "is taken by",
    ),
    "newcomers are added before a commit": (Machine, "_may_grow", _at_once, "grows before it has committed"),
    "resets without a limit": (Causes, "too_many", lambda self: "", "too many resets|without a commit"),
    "from random weights": (
        Machine,
        "_find_end_reason",
        lambda self: self.causes.too_many(),
        "without a commit, though",
    ),
    "who holds a commit is given up first": (Roster, "by_worth", lambda self: list(self), "given up with its commit"),
    "causes are forgotten": (Causes, "record_failure", lambda self, cause: None, "no cause is named"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_model_notices_a_rule_that_is_left_out(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, noticed = MUTANTS[mutant]
    tables: list[dict[Any, Any]] = [machine._REACTIONS, machine._STEPS]
    for table in tables:
        for key in [key for key, method in table.items() if method is owner.__dict__[name]]:
            monkeypatch.setitem(table, key, replacement)
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(AssertionError, match=noticed):
        play(range(SEQUENCES // 4))
