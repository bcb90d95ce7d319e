"""The driver of an elastic job: it feeds events to `engine.elastic.machine`, and carries out the machine's decisions.

It makes no decisions, starts no workers, and never blocks. Agents start workers (`elastic_agent`), and report what
happens to them. It has one thread and one selector, like the conductor.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..elastic import events
from ..elastic.limits import Limits
from ..elastic.machine import Machine, Phase
from ..elastic.places import Place, Slot
from ..exit_report.report import ExitReport
from ..host import private_files, processes
from ..host.network import Address
from ..host.patience import STEP
from ..host.signals import read_signals
from ..text import readable
from .cli.elastic_options import MARGIN, Elastic
from .cli.options import Options
from .elastic.agents import Fleet
from .elastic.cluster import Cluster
from .elastic.discovery import Discovery, Fixed, Names, Script, changes
from .elastic.job_watch import Watch
from .elastic.slots import Slots
from .elastic.worker_messages import WorkerMessageError, check, event_of
from .errors import LaunchError
from .hosts import remote_files
from .hosts.channel import CODES, PIDS, WORLDS, ChannelError, Message
from .hosts.host_list import own_names
from .process.console import Console
from .process.plan import Job
from .process.supervisor import ENDING_SIGNALS, PASSED_SIGNALS
from .report.elastic_report import Last, Result, first_failure, how, last_of, reason, resets

KEPT = 64  # most failed workers whose last output is kept


@dataclass
class _Worker:
    """A worker that may be running."""

    slot: Slot
    number: int  # number of its slot in the job, used for files, the prefix of lines and the page of counters
    since: int  # size in bytes of the slot's stderr file when the worker began
    came: bool = False  # whether it has connected to its agent
    port: int = 0  # port on which it listens for other hosts


class Driver:
    """Driver of an elastic job. After any exception call `abandon`, which leaves no process behind.

    Parameters
    ----------
    options : Options
        Options that have `elastic`.
    job : Job
    limits : Limits
    consoles : sequence of Console
        The launcher's stdout and stderr.
    pages : sequence of int
        Descriptors by slot number, to which workers' pages of counters are copied; empty if nothing is counted.
    environment : mapping of str to str
        The launcher's environment.
    say : callable
        Shows a line of the launcher's own.
    wakeup : socket.socket
        Socket that delivers the numbers of signals (`engine.host.signals`).
    seconds : float
        Seconds in which a new agent must answer.
    used : callable
        Called with the number of a slot before a worker is started in it.
    watch : Watch
    cluster : Cluster, optional
        Cluster that discovers hosts and starts agents, instead of the means of the command line.

    Attributes
    ----------
    slots : Slots
        Slots of the job, with the output of their workers.
    """

    def __init__(
        self,
        options: Options,
        job: Job,
        limits: Limits,
        consoles: Sequence[Console],
        pages: Sequence[int],
        environment: Mapping[str, str],
        say: Callable[[str], None],
        wakeup: socket.socket,
        seconds: float,
        used: Callable[[int], None],
        watch: Watch,
        cluster: Cluster | None = None,
    ) -> None:
        assert options.elastic is not None
        self.slots = Slots(job.directory, options.most, consoles, timestamps=options.timestamps)
        self._options, self._job = options, job
        self._say = say
        self._wakeup = wakeup
        self._used = used
        self._watch = watch
        self._cluster = cluster
        here = None if options.reach.launch_agent or cluster is not None else own_names()
        self._names = Names(here)
        self._several = cluster is not None or options.elastic.several(here)
        self._clock = _Clock()
        writers = [self.slots.files, *(console.writer for console in consoles)]
        for writer in writers:
            writer.start()
        self._machine = Machine(limits, self._clock.now())
        self._fleet = Fleet(
            options, job, self._names, self._several, environment, writers, pages, seconds,
            self._act, self._lost, self._cleared, self._refused, say, cluster,
        )  # fmt: skip
        self._fleet.board.add_reader(wakeup.fileno(), self._signals)
        self._discovery = self._discover(options.elastic)
        self._hosts: dict[str, int] = {}  # hosts of the last answer, and removed hosts that still have workers
        self._answer: dict[str, int] | None = None  # the last answer of the discovery
        self._workers: dict[int, _Worker] = {}
        self._places: Mapping[int, Place] = {}  # of the newest world
        self._ends: dict[int, Last] = {}
        self._events: deque[events.Event] = deque()
        self._over: events.Over | None = None
        self._signum: int | None = None
        self._hurry = False
        self._told = ""
        self._refusal = ""

    def runs(self, number: int) -> bool:
        """Return whether the slot of that number has a worker."""
        return any(worker.number == number for worker in self._workers.values())

    @property
    def members(self) -> list[int]:
        """Slot numbers of the newest world's members, by rank."""
        return [self.slots[place.slot] for place in sorted(self._places.values(), key=lambda place: place.rank)]

    def add_reader(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call `act` whenever a descriptor is readable; `act` reads it, and must not block."""
        self._fleet.board.add_reader(descriptor, act)

    def run(self) -> Result:
        """Run until the job is over and no process of its workers is left.

        Returns
        -------
        Result

        Raises
        ------
        LaunchError
            There are no hosts, or they cannot start a worker.
        """
        private_files.write(self._job.directory / remote_files.TOKEN, self._job.name.encode())
        while not self._machine.finished:
            now = self._clock.now()
            answer = None if self._signum is not None else self._discovery.look(now)
            if answer is not None:
                self._found(self._names.merge(answer))
            deadline = self._machine.deadline()
            if deadline is not None and deadline <= now:
                self._feed(events.Tick())
            elif self._hopeless(now):
                self._feed(events.Stop("all hosts are blacklisted for good, and no others will come"))
            if self._refusal:
                raise LaunchError(self._refusal)
            if (slow := self._watch.slow(self._machine, self._numbered(), now)) is not None:
                self._feed(slow)
            if not self._machine.finished:
                self._fleet.step(0.5 if deadline is None else max(0.0, deadline - now))
        self._end_discovery()
        self._fleet.finish()
        self.abandon()
        return self._result()

    def abandon(self) -> None:
        """End all agents and workers; none is left when this returns. A second call does nothing."""
        self._end_discovery()
        self._fleet.close()
        self.slots.close()

    def _end_discovery(self) -> None:
        """Stop discovery, and kill a script that runs. This must precede the end of the selector that watches it."""
        self._discovery.close()
        self._discovery = Fixed({})

    def _hopeless(self, now: float) -> bool:
        """Return whether nothing runs or ever will: all hosts are blacklisted, and no others can come.

        The machine would wait for ever, because it does not know that the hosts are fixed.
        """
        machine = self._machine
        if machine.phase is not Phase.WAITING or len(machine.roster) or not self._hosts or self._events:
            return False
        return isinstance(self._discovery, Fixed) and not (
            machine.hosts.free((), now) or machine.hosts.next_free((), now)
        )

    def _discover(self, elastic: Elastic) -> Discovery:
        if self._cluster is not None:
            return self._cluster.discovery
        if elastic.script:
            return Script(elastic.script, elastic.slots, self._fleet.board, self._say)
        return Fixed(dict(elastic.hosts))

    # ---- the machine

    def _feed(self, event: events.Event) -> None:
        """Feed an event to the machine, and carry out its actions and those of events that follow from them."""
        self._events.append(event)
        if len(self._events) > 1:
            return  # an outer call handles it
        while self._events:
            try:
                for action in self._machine.handle(self._clock.now(), self._events[0]):
                    _DEEDS[type(action)](self, action)
            except (LookupError, TypeError, ValueError) as error:  # the driver's fault, not an agent's
                raise RuntimeError(f"the driver cannot act on {self._events[0]}") from error
            self._events.popleft()
        ranks = {worker.number: self._rank(number) for number, worker in self._workers.items()}
        self._watch.saw(self._machine, ranks, len(self._places), self._clock.now())

    def _numbered(self) -> dict[int, int]:
        return {number: worker.number for number, worker in self._workers.items()}

    def _rank(self, worker: int) -> int:
        """Return a worker's rank in the newest world; -1 if it has none."""
        place = self._places.get(worker)
        return -1 if place is None else place.rank

    def _start(self, action: events.Start) -> None:
        worker, slot = action.worker, action.slot
        number = self.slots.number(slot, {each.number for each in self._workers.values()})
        since = self.slots.open(number)
        self._used(number)
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
            fields["environment"] = self._cluster.variables(slot)
        self._fleet.launch(slot.host, self._hosts[slot.host], fields)

    def _kill(self, action: events.Kill) -> None:
        worker = self._workers.get(action.worker)
        if worker is None:
            return
        if self._fleet.withdraw(worker.slot.host, action.worker):
            self._gone(action.worker)
            self._feed(events.Ended(action.worker, 0, "was not started"))
        elif self._signum is not None:
            # It has had the user's signal and its grace period; it gets the reason at its next commit.
            self._tell(action.worker, "end", why=action.why, good=False, over=False)
        else:
            if self._options.verbose:
                self._say(f"killing worker {action.worker} in {worker.slot}: {action.why}")
            self._fleet.kill(worker.slot.host, action.worker)

    def _disown(self, action: events.Disown) -> None:
        self._say(f"{action.host} is given up: {action.why}")
        self._fleet.disown(action.host)
        self._forget_host(action.host)

    def _assign(self, action: events.Assign) -> None:
        because = self._because()
        self._places = action.places
        hosts = [place.slot.host for place in action.places.values()]
        first = self._workers[next(iter(action.places))]
        address = self._fleet.reached_by(first.slot.host, hosts) if len(set(hosts)) > 1 else ""
        size = len(hosts)
        if not self._options.quiet:
            self._say(f"world {action.world}: {size} rank{'s' * (size > 1)}" + (f", because {because}" * bool(because)))
        for worker, place in action.places.items():
            self._tell(
                worker,
                "place",
                place=asdict(place),
                members=list(action.places),
                hosts=hosts,
                hub=str(Address(address, first.port)) if address else "",
                reason=because or "the job begins",
            )

    def _because(self) -> str:
        """Return why the next world is made; empty for the first."""
        if not self._machine.causes.resets:
            return ""
        return reason(self._machine.causes.resets[-1], self._places)

    def _void(self, action: events.Void) -> None:
        for worker in action.workers:
            self._tell(worker, "void", world=action.world)

    def _update(self, action: events.Update) -> None:
        for worker in action.workers:
            self._tell(worker, "update", world=action.world, count=action.count, kinds=list(action.kinds))

    def _end(self, action: events.End) -> None:
        over = self._machine.phase in (Phase.DRAINING, Phase.OVER)
        self._tell(action.worker, "end", why=action.why, good=action.good, over=over)

    def _speak(self, action: events.Say) -> None:
        self._say(action.text)

    def _decided(self, action: events.Over) -> None:
        self._over = action

    def _tell(self, worker: int, kind: str, /, **fields: Any) -> None:
        if worker in self._workers:
            self._fleet.tell(self._workers[worker].slot.host, worker, kind, **fields)

    # ---- what comes

    def _found(self, hosts: dict[str, int]) -> None:
        if self._answer is not None and (said := changes(self._answer, hosts)) and not self._options.quiet:
            self._say(f"the hosts have changed: {said}")
        self._answer = hosts
        self._hosts = self._hosts | hosts
        self._feed(events.Found(hosts))
        self._hosts = hosts | {host: slots for host, slots in self._hosts.items() if self._holds(host)}

    def _holds(self, host: str) -> bool:
        return any(worker.slot.host == host for worker in self._workers.values())

    def _act(self, host: str, message: Message) -> None:
        kind = message.kind
        if kind == "output":
            self.slots.show(host, message)
        elif kind == "said":
            self._said(host, message)
        elif kind == "end":
            self._ended(host, message)
        elif kind == "leaving":
            self._say(f"{host} is about to go ({message.text('why')}): its workers leave")
            self._feed(events.HostLeaves(host))
        elif kind == "started":
            self._show_start(host, message)
        elif kind == "file":
            self.slots.keep(host, message)
        elif kind == "say":
            if (line := message.text("line")) != self._told:
                self._say(f"{host}: {line}")
        else:
            raise ChannelError(f"it sends {kind!r}, which this launcher does not know; install the same version")

    def _said(self, host: str, message: Message) -> None:
        """Handle a worker's message that its agent has passed on."""
        number, worker = message.number("worker", *WORLDS), self._worker(host, message)
        try:
            said = check(message.head.get("message"))
        except WorkerMessageError as error:
            raise ChannelError(f"of worker {number} {error}") from None
        if said["kind"] == "logged":
            if self._cluster is not None:  # else no one uses it
                self._cluster.logged(said["value"])
            return
        if said["kind"] == "ready":
            worker.came, worker.port = True, said["port"]
        elif said["kind"] == "leaving" and self._signum is None:  # else it leaves because of the user's signal
            self._say(f"worker {number} in {worker.slot} wants to leave")
        self._feed(event_of(number, said))

    def _ended(self, host: str, message: Message) -> None:
        number, code = message.number("worker", *WORLDS), message.number("code", *CODES)
        killed, started = message.truth("killed"), message.truth("started")
        worker = self._worker(host, message)
        display = self.slots.displays[worker.number, "stderr"]
        last = last_of(code, ExitReport.parse(message.body), display, worker.since)
        self._gone(number)
        own = code != 0 and not killed
        if own:
            self.slots.keep_report(worker.number, last.report)
            self._ends[number] = last
            while len(self._ends) > KEPT:
                del self._ends[next(iter(self._ends))]
        what = how(code, worker.came) if started else "could not be started"
        self._feed(events.Ended(number, code, what, last.exception if own else ""))
        if own and last.not_run and not worker.came and self._machine.world == 0:
            self._feed(events.Stop("there is no such program to run; check its spelling, and that each host has it"))
        if code == 0 and started and not killed and not worker.came and self._machine.world == 0:
            self._feed(
                events.Stop(
                    f"worker {number} ended with exit code 0 and never came to elastic.run: another try would do the "
                    "same. Train in a function under elastic.run, or start the program without --min-np, --max-np and "
                    "--host-discovery-script"
                )
            )

    def _show_start(self, host: str, message: Message) -> None:
        if self._options.verbose:
            cpus = message.head["cpus"]
            bound = "any CPU" if cpus is None else f"CPUs {readable.cpus(cpus)}"
            worker, number = self._worker(host, message), message.number("worker", *WORLDS)
            pid = message.number("pid", *PIDS)
            self._say(
                f"worker {number} in {worker.slot}: pid {pid}, {bound}, files in "
                f"{self._job.directory / f'rank.{worker.number}'}"
            )

    def _lost(self, host: str, why: str, within: float) -> None:
        self._say(f"{host} was lost: {why}")
        self._forget_host(host)
        if self._machine.world == 0 and len(self._fleet) == 0:
            self._refusal = self._refusal or f"{host}: {why}"
        self._feed(events.AgentLost(host, why, within))

    def _cleared(self, workers: list[int]) -> None:
        """Record workers of a lost agent that certainly do not run."""
        for worker in workers:
            self._feed(events.Ended(worker, 0, "ended with its agent"))

    def _refused(self, host: str, text: str) -> None:
        if self._machine.world == 0:
            self._refusal = self._refusal or f"{host}: {text}"
        else:
            self._lost(host, text, MARGIN)

    def _forget_host(self, host: str) -> None:
        """Forget the workers of a host whose agent is lost: no one reports their end."""
        for number in [number for number, worker in self._workers.items() if worker.slot.host == host]:
            self._gone(number)

    def _gone(self, number: int) -> None:
        self.slots.flush(self._workers.pop(number).number)

    def _signals(self) -> None:
        """Pass on the signals that have come; a second signal to end kills the workers."""
        for signum in read_signals(self._wakeup):
            if signum in PASSED_SIGNALS:
                self._fleet.signal(signum)
            elif signum in ENDING_SIGNALS:
                self._end_by(signum)

    def _end_by(self, signum: int) -> None:
        name, grace = processes.signal_name(signum), self._options.grace
        first = self._signum is None
        self._hurry = not first
        self._signum = signum if first else self._signum
        if first:
            self._told = f"{name}: passed on to the ranks, which have {grace:g} s to end; once more kills them now"
            self._say(self._told)
        self._fleet.signal(signum)
        if first:
            self._feed(events.Stop(f"ended by {name}"))

    def _worker(self, host: str, message: Message) -> _Worker:
        """Return the worker that a message names, which must be one of its host."""
        worker = self._workers.get(message.number("worker", *WORLDS))
        if worker is None or worker.slot.host != host:
            raise ChannelError(f"it speaks of worker {message.head['worker']}, which is not one of its workers")
        return worker

    # ---- the end

    def _result(self) -> Result:
        assert self._over is not None
        lines = [] if self._options.quiet and self._over.good else resets(self._machine.causes.resets)
        if self._signum is not None and not self._over.good:
            lines.append(f"ended by {processes.signal_name(self._signum)}")
            return Result([], self._signum, self._hurry, False, 128 + self._signum, tuple(lines))
        if self._over.good:
            return Result([], None, False, True, 0, tuple(lines))
        causes = self._machine.causes
        cause = causes.first_failure or (causes.resets[-1] if causes.resets else None)
        last = None if cause is None or cause.worker is None else self._ends.get(cause.worker)
        if last is None and cause is None and self._ends:
            last = next(reversed(self._ends.values()))
        code = 1 if last is None else 128 - last.code if last.code < 0 else last.code
        lines += first_failure(cause, self._over.why, last)
        return Result([], None, False, False, code, tuple(lines))


_DEEDS: dict[type[Any], Callable[[Driver, Any], None]] = {
    events.Start: Driver._start,
    events.Kill: Driver._kill,
    events.Disown: Driver._disown,
    events.Assign: Driver._assign,
    events.Void: Driver._void,
    events.Update: Driver._update,
    events.End: Driver._end,
    events.Say: Driver._speak,
    events.Over: Driver._decided,
}


class _Clock:
    """Clock that leaves out the time in which this process was suspended.

    At most `STEP` seconds count between two calls of `now`, as in `engine.host.patience`.
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._passed = 0.0

    def now(self) -> float:
        now = time.monotonic()
        self._passed += min(now - self._looked, STEP)
        self._looked = now
        return self._passed
