"""Policy of an elastic job: it feeds events to `engine.elastic.machine`, and carries out the machine's decisions.

It makes no decisions itself. Agents start workers (`workers`), and report what happens to them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...elastic import events
from ...elastic.limits import JobLimits
from ...elastic.machine import Machine, Phase
from ...elastic.places import Slot, WorldPlace
from ...exit_report.report import ExitReport
from ...host import processes
from ...host.network import Address
from ...host.patience import STEP
from ..cli.elastic_options import MARGIN, Elastic
from ..driver import Driver, Handler, JobPolicy
from ..hosts.channel import CODES, PIDS, WORLDS, ChannelError, Message
from ..hosts.host_list import own_names
from ..hosts.remote import RemoteHost
from ..process.rank_end import shell_code
from ..report.elastic_report import Last, Result, describe_cause, describe_end, describe_resets, first_failure, last_of
from .agent_pool import AgentPool, ClusterBackend
from .discovery import Discovery, Fixed, Names, Script, describe_changes
from .job_watch import Watch
from .slots import SlotNumbers
from .worker_messages import WorkerMessageError, check, event_of

KEPT = 64  # most failed workers whose last output is kept
LOOK = 0.5  # longest seconds between two calls of `advance_job`


@dataclass
class _Worker:
    """A worker that may be running."""

    slot: Slot
    number: int  # number of its slot in the job, used for files, the prefix of lines and the page of counters
    since: int  # size in bytes of the slot's stderr file when the worker began
    came: bool = False  # whether it has connected to its agent
    port: int = 0  # port on which it listens for other hosts


class ElasticPolicy(JobPolicy):
    """Policy of a job whose workers come and go; it implements `PoolListener`.

    The driver's options must have `elastic`. `cluster` discovers hosts and starts agents, instead of the means of the
    command line.
    """

    def __init__(self, driver: Driver, limits: JobLimits, watch: Watch, cluster: ClusterBackend | None = None) -> None:
        super().__init__(driver)
        options = self._options = driver.setup.options
        assert options.elastic is not None
        self._say = driver.setup.say
        self._watch = watch
        self._cluster = cluster
        self._slots = SlotNumbers(options.most)
        here = None if options.reach.launch_agent or cluster is not None else own_names()
        self._names = Names(here)
        self._several = cluster is not None or options.elastic.spans_hosts(here)
        self._clock = _Clock()
        self._machine = Machine(limits, self._clock.read_seconds())
        self._pool = AgentPool(driver, self._names, self._several, self, cluster)
        self._discovery = self._make_discovery(options.elastic)
        self._hosts: dict[str, int] = {}  # hosts of the last answer, and removed hosts that still have workers
        self._answer: dict[str, int] | None = None  # the last answer of the discovery
        self._workers: dict[int, _Worker] = {}
        self._places: Mapping[int, WorldPlace] = {}  # of the newest world
        self._ends: dict[int, Last] = {}
        self._events: deque[events.Event] = deque()
        self._over: events.Over | None = None
        self.handlers: Mapping[str, Handler] = {
            "end": self._note_end,
            "leaving": self._note_leaving_host,
            "said": self._handle_worker_message,
            "started": self._note_start,
            **self._pool.handlers,
        }

    @property
    def agents(self) -> Collection[RemoteHost]:
        """Agents of all hosts that have one."""
        return self._pool.agents

    @property
    def members(self) -> list[int]:
        """Slot numbers of the newest world's members, by rank."""
        return [self._slots[place.slot] for place in sorted(self._places.values(), key=lambda place: place.rank)]

    def start(self) -> None:
        """Start the writers' threads; workers are started by other processes."""
        self._driver.start_output()

    def advance_job(self) -> float | None:
        """Feed what is due to the machine; return None once the job is over and no worker runs."""
        machine = self._machine
        self._pool.give_up_silent()
        if machine.finished:
            return None
        now = self._clock.read_seconds()
        answer = None if self._driver.signum is not None else self._discovery.poll_hosts(now)
        if answer is not None:
            self._note_hosts(self._names.merge(answer))
        deadline = machine.next_deadline()
        if deadline is not None and deadline <= now:
            self._feed_event(events.Tick())
        elif self._is_hopeless(now):
            self._feed_event(events.Stop("all hosts are blacklisted for good, and no others will come"))
        numbers = {number: worker.number for number, worker in self._workers.items()}
        if not self._driver.refused and (slow := self._watch.find_slow_worker(machine, numbers, now)) is not None:
            self._feed_event(slow)
        if self._machine.finished:
            return None
        return LOOK if deadline is None else max(0.0, min(LOOK, deadline - now))

    def prepare_finish(self) -> None:
        """End the discovery, and give up agents that have started no worker."""
        self.close()
        self._pool.give_up_unready()

    def admit_message(self, agent: RemoteHost, message: Message) -> bool:
        """Return whether a message is from the present agent of its host."""
        return self._pool.admit_message(agent, message)

    def owned_numbers(self, agent: RemoteHost) -> Collection[int]:
        """Return the slot numbers that an agent's host has or had."""
        return self._slots.written_by(agent.name)

    def counted_numbers(self, agent: RemoteHost) -> Collection[int]:
        """Return the slot numbers that an agent's host was the last to use."""
        return self._slots.held_by(agent.name)

    def agent_lost(self, agent: RemoteHost, how: str) -> None:
        """Handle the loss of an agent."""
        self._pool.agent_lost(agent, how)

    def end_by(self, signum: int, again: bool) -> None:
        """Let the machine end the job; a second signal has reached the workers already."""
        if not again:
            self._feed_event(events.Stop(f"ended by {processes.signal_name(signum)}"))

    def is_running(self, number: int) -> bool:
        """Return whether the slot of that number has a worker."""
        return any(worker.number == number for worker in self._workers.values())

    def close(self) -> None:
        """Stop discovery, and kill a script that runs. This must precede the end of the selector that watches it."""
        self._discovery.close()
        self._discovery = Fixed({})

    def _is_hopeless(self, now: float) -> bool:
        """Return whether nothing runs or ever will: all hosts are blacklisted, and no others can come.

        The machine would wait for ever, because it does not know that the hosts are fixed.
        """
        machine = self._machine
        if machine.phase is not Phase.WAITING or len(machine.roster) or not self._hosts or self._events:
            return False
        return isinstance(self._discovery, Fixed) and not (
            machine.hosts.find_free_slots((), now) or machine.hosts.next_free((), now)
        )

    def _make_discovery(self, elastic: Elastic) -> Discovery:
        if self._cluster is not None:
            return self._cluster.discovery
        if elastic.script:
            return Script(elastic.script, elastic.slots, self._driver.loop, self._say)
        return Fixed(dict(elastic.hosts))

    # ---- the machine

    def _feed_event(self, event: events.Event) -> None:
        """Feed an event to the machine, and carry out its actions and those of events that follow from them."""
        self._events.append(event)
        if len(self._events) > 1:
            return  # an outer call handles it
        while self._events:
            try:
                for action in self._machine.handle(self._clock.read_seconds(), self._events[0]):
                    _ACTIONS[type(action)](self, action)
            except (LookupError, TypeError, ValueError) as error:  # the driver's fault, not an agent's
                raise RuntimeError(f"the driver cannot act on {self._events[0]}") from error
            self._events.popleft()
        places = {number: place.rank for number, place in self._places.items()}
        ranks = {worker.number: places.get(number, -1) for number, worker in self._workers.items()}
        self._watch.record_state(self._machine, ranks, len(self._places), self._clock.read_seconds())

    def _start_worker(self, action: events.StartWorker) -> None:
        worker, slot = action.worker, action.slot
        number = self._slots.assign_number(slot, {each.number for each in self._workers.values()})
        since = self._driver.output.open(number)["stderr"].taken
        self._driver.setup.note_start(number)
        self._workers[worker] = _Worker(slot, number, since)
        size = max(self._options.size, number + 1)
        fields: dict[str, Any] = {
            "worker": worker,
            "number": number,
            "slot": slot.number,
            "rank": number,
            "size": size,
            "local_size": min(self._hosts[slot.host], size) if self._several else size,
        }
        if self._cluster is not None:
            fields["environment"] = self._cluster.list_variables(slot)
        self._pool.start_worker(slot.host, self._hosts[slot.host], fields)

    def _kill_worker(self, action: events.KillWorker) -> None:
        worker = self._workers.get(action.worker)
        if worker is None:
            return
        if self._pool.cancel_start(worker.slot.host, action.worker):
            self._forget_worker(action.worker)
            self._feed_event(events.Ended(action.worker, 0, "was not started"))
        elif self._driver.signum is not None:
            # It has had the user's signal and its grace period; it gets the reason at its next commit.
            self._tell_worker(action.worker, "end", why=action.why, good=False, over=False)
        else:
            if self._options.verbose:
                self._say(f"killing worker {action.worker} in {worker.slot}: {action.why}")
            self._pool.kill(worker.slot.host, action.worker)

    def _disown_host(self, action: events.Disown) -> None:
        self._say(f"{action.host} is given up: {action.why}")
        self._pool.give_up_host(action.host)
        self._forget_host(action.host)

    def _assign_places(self, action: events.Assign) -> None:
        resets = self._machine.causes.resets
        because = describe_cause(resets[-1], self._places) if resets else ""  # empty: the first world
        self._places = action.places
        hosts = [place.slot.host for place in action.places.values()]
        first = self._workers[next(iter(action.places))]
        address = self._pool.reached_by(first.slot.host, hosts) if len(set(hosts)) > 1 else ""
        size = len(hosts)
        if not self._options.quiet:
            self._say(f"world {action.world}: {size} rank{'s' * (size > 1)}" + (f", because {because}" * bool(because)))
        for worker, place in action.places.items():
            self._tell_worker(
                worker,
                "place",
                place=asdict(place),
                members=list(action.places),
                hosts=hosts,
                hub=str(Address(address, first.port)) if address else "",
                reason=because or "the job begins",
            )

    def _void_world(self, action: events.Void) -> None:
        for worker in action.workers:
            self._tell_worker(worker, "void", world=action.world)

    def _announce_update(self, action: events.Update) -> None:
        for worker in action.workers:
            self._tell_worker(worker, "update", world=action.world, count=action.count, kinds=list(action.kinds))

    def _end_worker(self, action: events.EndWorker) -> None:
        over = self._machine.phase in (Phase.DRAINING, Phase.OVER)
        self._tell_worker(action.worker, "end", why=action.why, good=action.good, over=over)

    def _say_text(self, action: events.ShowLine) -> None:
        self._say(action.text)

    def _note_result(self, action: events.Over) -> None:
        self._over = action

    def _tell_worker(self, worker: int, kind: str, /, **fields: Any) -> None:
        if worker in self._workers:
            self._pool.tell(self._workers[worker].slot.host, worker, kind, **fields)

    # ---- what comes

    def _note_hosts(self, hosts: dict[str, int]) -> None:
        if self._answer is not None and (said := describe_changes(self._answer, hosts)) and not self._options.quiet:
            self._say(f"the hosts have changed: {said}")
        self._answer = hosts
        self._hosts = self._hosts | hosts
        self._feed_event(events.Found(hosts))
        used = {worker.slot.host for worker in self._workers.values()}
        self._hosts = hosts | {host: slots for host, slots in self._hosts.items() if host in used}

    def _note_leaving_host(self, agent: RemoteHost, message: Message) -> None:
        self._say(f"{agent.name} is about to go ({message.get_text('why')}): its workers leave")
        self._feed_event(events.HostLeaves(agent.name))

    def _handle_worker_message(self, agent: RemoteHost, message: Message) -> None:
        """Handle a worker's message that its agent has passed on."""
        number, worker = self._find_worker(agent, message)
        try:
            said = check(message.head.get("message"))
        except WorkerMessageError as error:
            raise ChannelError(f"of worker {number} {error}") from None
        if said["kind"] == "logged":
            if self._cluster is not None:  # else no one uses it
                self._cluster.take_logged_value(said["value"])
            return
        if said["kind"] == "ready":
            worker.came, worker.port = True, said["port"]
        elif said["kind"] == "leaving" and self._driver.signum is None:  # else it leaves because of the user's signal
            self._say(f"worker {number} in {worker.slot} wants to leave")
        self._feed_event(event_of(number, said))

    def _note_start(self, agent: RemoteHost, message: Message) -> None:
        self._pool.note_start(agent, message)
        if self._options.verbose:
            number, worker = self._find_worker(agent, message)
            pid, cpus = message.get_number("pid", *PIDS), message.head["cpus"]
            self._driver.say_started(f"worker {number} in {worker.slot}", worker.number, pid, cpus)

    def _note_end(self, agent: RemoteHost, message: Message) -> None:
        self._pool.note_end(agent, message)
        code, killed, started = (
            message.get_number("code", *CODES),
            message.get_bool("killed"),
            message.get_bool("started"),
        )
        number, worker = self._find_worker(agent, message)
        output = self._driver.output
        last = last_of(code, ExitReport.parse(message.body), output.displays[worker.number, "stderr"], worker.since)
        self._forget_worker(number)
        own = code != 0 and not killed
        if own:
            output.keep_report(worker.number, last.report)
            self._ends[number] = last
            while len(self._ends) > KEPT:
                del self._ends[next(iter(self._ends))]
        what = describe_end(code, worker.came) if started else "could not be started"
        self._feed_event(events.Ended(number, code, what, last.exception if own else ""))
        if worker.came or self._machine.world != 0:
            return
        if own and last.not_run:
            self._feed_event(
                events.Stop("there is no such program to run; check its spelling, and that each host has it")
            )
        if code == 0 and started and not killed:
            self._feed_event(
                events.Stop(
                    f"worker {number} ended with exit code 0 and never came to elastic.run: another try would do the "
                    "same. Train in a function under elastic.run, or start the program without --min-np, --max-np and "
                    "--host-discovery-script"
                )
            )

    # ---- the agents: this implements `PoolListener`

    def host_lost(self, host: str, why: str, within: float) -> None:
        """Let the machine end the world of a host's workers."""
        self._say(f"{host} was lost: {why}")
        self._forget_host(host)
        if self._machine.world == 0 and len(self._pool) == 0:
            self._driver.refuse_job(f"{host}: {why}")
        self._feed_event(events.AgentLost(host, why, within))

    def workers_cleared(self, workers: list[int]) -> None:
        """Record workers of a lost agent that certainly do not run."""
        for worker in workers:
            self._feed_event(events.Ended(worker, 0, "ended with its agent"))

    def host_refused(self, host: str, text: str) -> None:
        """End the job if no world has begun; else the host is lost."""
        if self._machine.world == 0:
            self._driver.refuse_job(f"{host}: {text}")
        else:
            self.host_lost(host, text, MARGIN)

    def _forget_host(self, host: str) -> None:
        """Forget the workers of a host whose agent is lost: no one reports their end."""
        for number in [number for number, worker in self._workers.items() if worker.slot.host == host]:
            self._forget_worker(number)

    def _forget_worker(self, number: int) -> None:
        self._driver.output.flush(self._workers.pop(number).number)

    def _find_worker(self, agent: RemoteHost, message: Message) -> tuple[int, _Worker]:
        """Return the worker that a message names, with its number; it must be one of the agent's host."""
        number = message.get_number("worker", *WORLDS)
        worker = self._workers.get(number)
        if worker is None or worker.slot.host != agent.name:
            raise ChannelError(f"it speaks of worker {number}, which is not one of its workers")
        return number, worker

    # ---- the end

    def make_outcome(self) -> Result:
        """Return the outcome of the job, with the report on it."""
        assert self._over is not None
        lines = [] if self._options.quiet and self._over.good else describe_resets(self._machine.causes.resets)
        signum = self._driver.signum
        if signum is not None and not self._over.good:
            lines.append(f"ended by {processes.signal_name(signum)}")
            return Result([], signum, self._driver.hurried, False, shell_code(-signum), tuple(lines))
        if self._over.good:
            return Result([], None, False, True, 0, tuple(lines))
        causes = self._machine.causes
        cause = causes.first_failure or (causes.resets[-1] if causes.resets else None)
        last = None if cause is None or cause.worker is None else self._ends.get(cause.worker)
        if last is None and cause is None and self._ends:
            last = next(reversed(self._ends.values()))
        code = 1 if last is None else shell_code(last.code)
        lines += first_failure(cause, self._over.why, last)
        return Result([], None, False, False, code, tuple(lines))


_ACTIONS: dict[type[Any], Callable[[ElasticPolicy, Any], None]] = {
    events.StartWorker: ElasticPolicy._start_worker,
    events.KillWorker: ElasticPolicy._kill_worker,
    events.Disown: ElasticPolicy._disown_host,
    events.Assign: ElasticPolicy._assign_places,
    events.Void: ElasticPolicy._void_world,
    events.Update: ElasticPolicy._announce_update,
    events.EndWorker: ElasticPolicy._end_worker,
    events.ShowLine: ElasticPolicy._say_text,
    events.Over: ElasticPolicy._note_result,
}


class _Clock:
    """Clock that leaves out the time in which this process was suspended.

    At most `STEP` seconds count between two calls of `read_seconds`, as in `engine.host.patience`.
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._passed = 0.0

    def read_seconds(self) -> float:
        now = time.monotonic()
        self._passed += min(now - self._looked, STEP)
        self._looked = now
        return self._passed
