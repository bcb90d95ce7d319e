"""Model of a job around the driver's state machine: hosts, agents, workers, and the worlds in which they meet.

The model knows the truth, of which the machine hears late and in part: which processes run, and what they could write.
What happens next is drawn from bytes, so that a sequence that breaks a promise can be shown and shrunk.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.elastic import events
from engine.elastic.events import Why
from engine.elastic.limits import JobLimits
from engine.elastic.machine import Machine, Phase
from engine.elastic.places import Slot

LIMITS = [
    JobLimits(2, 1, 4, barren_limit=4),
    JobLimits(3, 2, 4, reset_limit=3, cooldown=(5.0, 20.0)),
    JobLimits(2, 2, 2, barren_limit=2),
    JobLimits(4, 2, 6, multiple=2, cooldown=(10.0, 100.0)),
    JobLimits(2, 1, 4, sizes=frozenset({1, 2, 4})),
]
HOSTS = ("a", "b", "c")
AGENT_LEASE = 0.8  # share of the machine's lease after which a cut-off agent has killed its workers


class Bytes:
    """Draws numbers from bytes, and zeros when the bytes are used up."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._content)

    def below(self, bound: int) -> int:
        if not self.left:
            return 0
        self._at += 1
        return self._content[self._at - 1] % bound


@dataclass
class Process:
    """True state of a worker."""

    number: int
    slot: Slot
    at: str = "boots"  # gate, meets, trains, returned, ends
    alive: bool = True
    world: int = 0
    commit: int | None = None
    updated: bool = False
    dies_at: float | None = None  # time at which its agent, which is cut off, kills it
    seen: bool = False  # whether its death is then observed and reported
    said: deque[events.Event] = field(default_factory=deque)  # its messages, and those about it, that are unread


class Job:
    """One job; `act` makes something happen, `close_well` and `close_silently` bring the job to its end."""

    def __init__(self, draw: Bytes) -> None:
        self.draw = draw
        self.limits = LIMITS[draw.below(len(LIMITS))]
        self.now = 0.0
        self.machine = Machine(self.limits, self.now)
        self.processes: dict[int, Process] = {}
        self.worlds: dict[int, tuple[int, ...]] = {}
        self.broken: set[int] = set()  # worlds that have lost a member
        self.void: set[int] = set()
        self.committed: set[int] = set()
        self.barren = 0
        self.newest: int | None = None  # of what the machine heard
        self.failed: set[str] = set()  # everything that has ever failed
        self.member_failed = False  # whether a member has failed since the last commit, as the machine knows
        self.stopped = self.mute = False
        self.cut = False  # whether the data cable is cut, so that no world of several hosts meets
        self.tell(events.Found({"a": 3, "b": 2}))

    # The machine and its promises.

    def tell(self, event: events.Event) -> None:
        machine = self.machine
        before = machine.phase
        self._note(event)
        actions = machine.handle(self.now, event)
        if before is Phase.GATHERING and machine.phase is Phase.RESETTING and machine.roster.list_computing():
            told = [set(action.workers) for action in actions if isinstance(action, events.Void)]
            meeting = {worker.number for worker in machine.roster.list_computing()}
            assert len(told) == 1 and told[0] >= meeting, "members that meet are not told"
        for action in actions:
            self._obey(action)
        if machine.phase is Phase.RESETTING or machine.phase is Phase.GATHERING:
            assert machine.next_deadline() is not None, "a wait without an end"

    def _note(self, event: events.Event) -> None:
        trains = self.machine.phase in (Phase.GATHERING, Phase.RUNNING)
        if trains and isinstance(event, events.Committed) and event.world == self.machine.world:
            self.member_failed = False
            self.barren = 0
        if isinstance(event, events.Committed | events.Ready) and event.commit is not None:
            self.newest = max(event.commit, -1 if self.newest is None else self.newest)
        if isinstance(event, events.Ready) and event.why is Why.HOSTS and self.machine.phase is Phase.RUNNING:
            self.member_failed = False
            self.barren = 0

    def _obey(self, action: events.Action) -> None:
        match action:
            case events.StartWorker(number, slot):
                running = [each for each in self.processes.values() if each.alive and each.slot == slot]
                assert not running, f"{slot} is taken by worker {running[0].number}"
                assert number not in self.processes, "a number is used again"
                self.processes[number] = Process(number, slot)
                assert self.machine.phase not in (Phase.DRAINING, Phase.OVER)
            case events.KillWorker(number):
                process = self.processes[number]
                self.failed.add(f"worker {number} ")
                self._check_worth(process, action.why)
                if not self.mute and process.dies_at is None:
                    self.end(process, -9, asked=True)
            case events.Disown(host):
                self.failed.add(f"host {host}")
                self._cut(host)
            case events.Assign():
                self._assigned(action)
            case events.Void(world):
                self.void.add(world)
            case events.Update():
                assert set(action.workers) == set(self.worlds[action.world]), "not all members are told"
                if action.kinds == ("there are newcomers",):
                    assert action.world in self.committed, "a world grows before it has committed"
                for number in action.workers:
                    self.processes[number].updated = True
            case events.EndWorker(number, why):
                assert why
                process = self.processes[number]
                trains = self.machine.phase in (Phase.GATHERING, Phase.RUNNING)
                assert process.world == 0 or not trains, f"worker {number} may write beside world {self.machine.world}"
                if process.alive:
                    assert process.at in ("gate", "returned", "ends")
                    process.at = "returned" if action.good and process.world == self.machine.world else "ends"
            case events.Over():
                self._over(action)

    def _check_worth(self, process: Process, why: str) -> None:
        """Check that a world that does not meet costs no worker with a commit, if another member has none."""
        worker = self.machine.roster.get(process.number)
        if "did not meet" in why and worker is not None and worker.commit is not None:
            newcomers = [
                each for each in self.machine.roster.list_computing() if each.commit is None and not each.joined
            ]
            assert not newcomers, f"worker {process.number} is given up with its commit"

    def _assigned(self, action: events.Assign) -> None:
        places = action.places
        assert action.world == max(self.worlds, default=0) + 1, "worlds are numbered one after the other"
        assert self.limits.find_largest_size(len(places)) == len(places), f"{len(places)} is not an allowed size"
        assert len({place.slot for place in places.values()}) == len(places)
        assert [place.rank for place in places.values()] == list(range(len(places)))
        for process in self.processes.values():
            if process.alive and process.world > 0 and process.number not in places:
                assert process.at == "gate", f"worker {process.number} {process.at} beside world {action.world}"
        at_gate = [worker.commit for worker in self.machine.roster if worker.state.value == "at the gate"]
        brought = [self.processes[number].commit for number in places]
        known = [commit for commit in (*at_gate, *brought) if commit is not None]
        assert self.newest is None or known, "a world without a commit, though there was one"
        assert not known or max(known) in brought, "the newest commit is left out"
        self.worlds[action.world] = tuple(places)
        self.barren += 1
        barren, resets = self.limits.barren_limit, self.limits.reset_limit
        assert barren is None or self.barren <= barren + 1, f"{self.barren} worlds without a commit"
        assert resets is None or len(self.machine.causes.resets) <= resets, "too many resets"
        for number in places:
            process = self.processes[number]
            assert process.at == "gate" or not process.alive
            process.at, process.world, process.updated = "meets", action.world, False

    def _over(self, action: events.Over) -> None:
        if not action.good:
            assert action.why
            if self.member_failed and not self.stopped:
                assert any(name in action.why for name in self.failed), f"no cause is named: {action.why}"

    # Events.

    def end(self, process: Process, code: int, asked: bool = False, exception: str = "") -> None:
        if not process.alive:
            return
        process.alive = False
        if process.world and process.at in ("meets", "trains"):
            self.broken.add(process.world)
        if process.dies_at is None or (process.seen and not self.mute):
            what = "killed by SIGKILL" if code < 0 else f"ended with exit code {code}"
            process.said.append(events.Ended(process.number, code, what, exception))

    def _cut(self, host: str) -> None:
        for process in self.processes.values():
            if process.slot.host == host and process.alive and process.dies_at is None:
                process.dies_at = self.now + self.limits.lease * AGENT_LEASE
                process.seen = self.draw.below(2) == 0

    def pass_time(self, until: float) -> None:
        for process in self.processes.values():
            if process.alive and process.dies_at is not None and process.dies_at <= until:
                self.end(process, -9)
        self.now = until

    def living(self, *states: str) -> list[Process]:
        return [each for each in self.processes.values() if each.alive and each.at in states]

    def healthy(self, process: Process) -> bool:
        return process.world not in self.broken and process.world not in self.void

    def come(self, process: Process, why: Why, text: str = "", culprit: int | None = None) -> None:
        if process.at in ("meets", "trains"):
            self.broken.add(process.world)
        process.at = "gate"
        process.said.append(events.Ready(process.number, process.world, why, text, culprit, process.commit))

    def move(self, process: Process) -> bool:
        """Let a worker take its next step by itself; return whether it did anything."""
        match process.at:
            case "boots":
                self.come(process, Why.NEW)
            case "meets":
                if process.world in self.void:
                    self.come(process, Why.VOID)
                elif process.world in self.broken or (self.cut and len(self.hosts_of(process.world)) > 1):
                    return False
                elif all(self.processes[number].at in ("meets", "trains") for number in self.worlds[process.world]):
                    process.at = "trains"
                    process.commit = max(self.commits(process.world), default=0)
                    process.said.append(events.Joined(process.number, process.world))
                else:
                    return False
            case "trains":
                if self.healthy(process):
                    return False
                gone = [n for n in self.worlds[process.world] if not self.processes[n].alive]
                self.come(process, Why.FAILURE, "RankDiedError", gone[0] if gone else None)
            case "returned":
                self.end(process, 0)
            case "ends":
                self.end(process, 1)
            case _:
                return False
        return True

    def hosts_of(self, world: int) -> set[str]:
        return {self.processes[number].slot.host for number in self.worlds[world]}

    def commits(self, world: int) -> list[int]:
        held = (self.processes[number].commit for number in self.worlds[world])
        return [commit for commit in held if commit is not None]

    def running(self) -> list[Process]:
        """Return the members of the newest world if it trains and is complete, else nothing."""
        members = [self.processes[number] for number in self.worlds.get(self.machine.world, ())]
        whole = all(each.alive and each.at == "trains" for each in members)
        return members if members and whole and self.machine.world not in self.broken | self.void else []

    def step_training(self, done: bool) -> bool:
        """Let all members commit, or finish the training; return whether there was a world for it."""
        members = self.running()
        if not members:
            return False
        if done:
            for process in members:
                process.at = "returned"
                process.said.append(events.Done(process.number, process.world))
            return True
        number = max(self.commits(members[0].world), default=0) + 1
        for process in members:
            process.commit = number
        self.committed.add(members[0].world)
        members[0].said.append(events.Committed(members[0].number, members[0].world, number))
        if any(process.updated for process in members):
            for process in members:
                process.commit = number + 1
                self.come(process, Why.HOSTS)
        return True

    def add_reader(self, process: Process) -> None:
        """Let the machine hear a worker's next message."""
        event = process.said.popleft()
        worker = self.machine.roster.get(process.number)
        member = worker is not None and worker.number in self.machine.roster.members
        runs = self.machine.phase in (Phase.GATHERING, Phase.RUNNING, Phase.RESETTING)
        if isinstance(event, events.Ended):
            self.failed.add(f"worker {process.number} ")
            at = worker.state.value if worker is not None else ""
            self.member_failed |= member and runs and at in ("at the gate", "in the world")
        if isinstance(event, events.Ready) and event.why is Why.FAILURE:
            self.failed |= {f"worker {process.number} ", f"worker {event.culprit} "}
            self.member_failed |= member and self.machine.phase is Phase.RUNNING
        self.tell(event)

    def act(self) -> None:
        """Make one randomly drawn event happen."""
        draw = self.draw
        choice = draw.below(32)
        speaking = [each for each in self.processes.values() if each.said]
        if choice < 3:
            self.flow()
        elif choice < 14 and speaking:
            self.add_reader(speaking[draw.below(len(speaking))])
        elif choice < 22 and (living := self.living("boots", "meets", "trains", "returned", "ends")):
            self.move(living[draw.below(len(living))])
        elif choice < 25:
            self.step_training(done=draw.below(12) == 0)
        elif choice < 27:
            self.wait(draw.below(2) == 0)
        else:
            self.disturb(choice)

    def wait(self, whole: bool) -> None:
        deadline = self.machine.next_deadline()
        if deadline is not None:
            assert deadline > self.now, "a deadline in the past is waited for without end"
            self.pass_time(deadline if whole else min(deadline, self.now + 1.0))
            self.tell(events.Tick())

    def disturb(self, choice: int) -> None:
        draw = self.draw
        living = self.living("boots", "gate", "meets", "trains", "returned")
        if choice == 27 and living:
            exception = ("", "", "", "ValueError at train.py:7")[draw.below(4)]
            self.end(living[draw.below(len(living))], 1 if exception else -9, exception=exception)
        elif choice == 28:
            self.tell(events.Found({host: slots for host in HOSTS if (slots := draw.below(4))}))
        elif choice == 29 and draw.below(3) == 0:
            host = HOSTS[draw.below(3)]
            self._cut(host)
            self.failed.add(f"host {host}")
            self.tell(events.AgentLost(host, "its agent is out of reach"))
        elif choice == 29:
            self.cut = not self.cut
        elif choice == 30 and living:
            worker = living[draw.below(len(living))].number
            self.tell((events.Leaves(worker), events.Slow(worker, "50 ms"))[draw.below(2)])
        elif choice == 31 and draw.below(8) == 0:
            if draw.below(4) == 0:
                self.stopped = True
                self.tell(events.Stop("the user has ended the job"))
            else:
                self.tell(events.HostLeaves(HOSTS[draw.below(3)]))

    # The end.

    def flow(self) -> bool:
        """Let the machine hear all messages, and then all workers move; return whether one did."""
        for process in list(self.processes.values()):
            while process.said:
                self.add_reader(process)
        return any([self.move(each) for each in self.living("boots", "meets", "trains", "returned", "ends")])

    def close_well(self) -> None:
        """Check that, if everything works from now on, the job completes or ends for a stated reason."""
        self.cut = False
        if self.machine.phase is not Phase.OVER:
            self.tell(events.Found({"a": 3, "b": 2}))
        for _ in range(400):
            if self.machine.finished:
                return
            if not self.flow():
                trained = self.machine.phase is Phase.RUNNING and self.step_training(done=self.draw.below(3) == 0)
                if not trained and not any(each.said for each in self.processes.values()):
                    self.wait(whole=True)
        raise AssertionError(f"the job does not end: {self.machine.phase}, {list(self.machine.roster)}")

    def close_silently(self) -> None:
        """Check that all waits of the machine end if nobody says or does anything from now on, agents included."""
        self.mute = True
        if self.machine.phase is Phase.RUNNING and (members := self.machine.roster.list_computing()):
            process = self.processes[members[0].number]
            self.end(process, -9)
            while process.said:
                self.add_reader(process)
        for _ in range(2000):
            assert self.machine.phase is not Phase.RUNNING
            if self.machine.phase is Phase.DRAINING:  # a program that is done may run on without a limit
                for process in [each for each in self.processes.values() if each.at == "returned"]:
                    self.end(process, 0)
                    while process.said:
                        self.add_reader(process)
            if self.machine.finished:
                return
            deadline = self.machine.next_deadline()
            assert deadline is not None, f"a wait without an end: {self.machine.phase}, {list(self.machine.roster)}"
            self.pass_time(deadline)
            self.tell(events.Tick())
        raise AssertionError(f"a wait does not end: {self.machine.phase}, {list(self.machine.roster)}")


def run(content: bytes, silent: bool) -> Job:
    """Play a job."""
    draw = Bytes(content)
    job = Job(draw)
    for _ in range(draw.below(6)):  # with 5 the first world trains
        job.flow()
    while draw.left and not job.machine.finished:
        job.act()
    if silent:
        job.close_silently()
    else:
        job.close_well()
    return job
