"""Training under random failures, compared with an undisturbed one: `python -m tests.elastic.chaos --help`.

The job runs under enginerun, on hosts that are namespaces of this machine or on this machine alone. Faults are drawn
one after the other:

| fault | what happens |
|---|---|
| kill | any worker is killed, perhaps rank 0, the coordinator |
| stop | a worker is stopped, and resumed some time after it was given up |
| leave | a worker gets SIGTERM, as before a preemption |
| agent | the agent of a host is killed, and with it the host is lost |
| starter | the process that carries the agent's channel is killed, like an ssh |
| coordinator | rank 0 and the agent of its host are killed at once |
| lost | a host is cut off from all others and from the launcher, and comes back after it was given up |
| host | the discovery script no longer names a host, and names it again later |
| cable | data between a host and others is lost for up to 12 s; the launcher still reaches the host |

The training is right if the final parameters are those of an undisturbed run, and each sample of each epoch has counted
once. A table shows the delays by each kind of fault, and how many were over the kind's limit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from ..netns import Hosts
from ..waiting import NotWithin, let_pass, until
from . import chaos_program

ROOT = Path(__file__).parents[2]
STALL_LIMIT = 4.0
LEASE = 10.0  # the default of enginerun
ALLOWED = {
    "kill": 3.0,
    "stop": STALL_LIMIT + 5.0,
    "leave": 3.0,
    "agent": 3.0,
    "starter": 3.0,
    "coordinator": 3.0,
    "host": 5.0,
    "cable": 10.0,
    "lost": 4.0,
}
"""Most seconds from a fault to the next step in a later world; `cable` counts from its end, `lost` adds the lease."""
KEPT = 20  # number of worlds whose flight records are kept
LONGEST = 120.0  # seconds after which the job counts as hung
WEIGHTS = dict.fromkeys(ALLOWED, 1) | {"kill": 10, "leave": 3, "agent": 2}
HERE = ("kill", "leave")  # faults for which one host is enough, except the slow `stop`


@dataclass(frozen=True)
class Step:
    """A line of a worker's file of steps."""

    time: float
    world: int
    step: int
    rank: int
    size: int


@dataclass
class Chaos:
    """A job under faults."""

    directory: Path  # empty directory for the job's files
    seed: int
    hosts: Hosts | None = None  # None: this machine only
    slots: int = 3  # slots of each host
    lease: float = LEASE
    options: Sequence[str] = ()  # further options of enginerun
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.random = random.Random(self.seed)
        self.names = ["here"] if self.hosts is None else [self.hosts.address(host) for host in range(self.hosts.count)]
        self.log = self.directory / "log"
        self._steps: list[Step] = []  # steps since the last fault
        self._last: dict[int, Step] = {}  # last step by worker
        self._newest = 0
        self._read: dict[int, int] = {}  # bytes read of each worker's file

    def start(self) -> None:
        """Start the job, and wait for its first step."""
        self._name_hosts(self.names)
        (self.directory / "discover").write_text(f"#!/bin/sh\ncat {self.directory}/hosts\n")
        (self.directory / "discover").chmod(0o755)
        most = self.slots * len(self.names)
        command = [sys.executable, "-m", "engine.launch", "-np", str(most), "--min-np", "1", "--max-np", str(most)]
        command += ["--blacklist-cooldown-range", "1", "5", "--lease", str(self.lease)]
        command += ["--output-dir", str(self.directory / "job"), *self.options]
        if self.hosts is not None:
            command += ["--host-discovery-script", str(self.directory / "discover")]
            command += [
                "--launch-agent",
                f"{sys.executable} -m tests.elastic.chaos_entering {self.directory} {self._entries()} {{host}}",
            ]
        command += [sys.executable, "-m", chaos_program.__name__, str(self.directory)]
        environment = os.environ | {"CHAOS": self.mark, "ENGINE_STALL_LIMIT": str(STALL_LIMIT)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.await_step(0, 60.0)

    def _entries(self) -> str:
        assert self.hosts is not None
        return ",".join(f"{name}={pid}" for name, pid in zip(self.names, self.hosts.pids, strict=True))

    def _name_hosts(self, names: list[str]) -> None:
        """Make the discovery script print these hosts, atomically."""
        new = self.directory / "hosts.new"
        new.write_text("".join(f"{name}:{self.slots}\n" for name in names))
        new.rename(self.directory / "hosts")

    # ---- observation

    def _look(self) -> None:
        """Read the steps since the last call."""
        for path in self.directory.glob("steps.*"):
            worker = int(path.suffix[1:])
            with path.open("rb") as file:
                file.seek(self._read.get(worker, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[worker] = self._read.get(worker, 0) + len(whole) + bool(whole)
            for line in whole.splitlines():
                words = line.split()
                self._last[worker] = Step(float(words[0]), *map(int, words[1:]))
                self._steps.append(self._last[worker])

    def _clear(self) -> None:
        """Forget earlier steps, and remove the files of old worlds and of workers that have ended."""
        for path in self.directory.glob("job/world.*"):
            if int(path.suffix[1:]) < self._newest - KEPT:
                shutil.rmtree(path, ignore_errors=True)
        running = self.workers()
        self._look()
        self._steps.clear()
        for worker in [worker for worker in self._last if worker not in running]:
            (self.directory / f"steps.{worker}").unlink(missing_ok=True)
            del self._last[worker], self._read[worker]

    def newest(self) -> int:
        """Return the newest world in which there was a step."""
        self._look()
        self._newest = max(self._newest, max((step.world for step in self._last.values()), default=0))
        return self._newest

    def await_step(self, world: int, seconds: float, after: float = 0.0) -> float:
        """Wait for a step in a later world than this one and after this time; return the time of the first."""

        def first() -> float | None:
            if self.process.poll() is not None:
                raise AssertionError(f"the job has ended with {self.process.returncode}:\n{self.tail()}")
            self._look()
            return min((step.time for step in self._steps if step.world > world and step.time > after), default=None)

        try:
            found = until(first, f"a step in a world after {world}", seconds, 0.01)
        except NotWithin as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None
        assert found is not None
        return found

    def tail(self) -> str:
        """Return the last lines that the job has printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def workers(self) -> dict[int, int]:
        """Return the pids of workers, by their numbers, that have made a step or are about to."""
        return dict(self._marked("ENGINE_WORKER"))

    def agents(self) -> dict[int, int]:
        """Return the pids of agents by host: the oldest process that is no worker; its forked child is the guardian."""
        oldest: dict[int, int] = {}
        workers = set(self.workers().values())
        for host, pid in sorted(self._marked("CHAOS_AGENT"), key=lambda each: _began(each[1])):
            if pid not in workers:
                oldest.setdefault(host, pid)
        return oldest

    def _marked(self, variable: str) -> Iterator[tuple[int, int]]:
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "environ").read_bytes().split(b"\0")
                told = dict(word.partition(b"=")[::2] for word in words)
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if told.get(b"CHAOS") == self.mark.encode() and variable.encode() in told and state != "Z":
                    yield int(told[variable.encode()]), int(path.name)

    # ---- faults

    def fault(self, kind: str) -> None:
        """Inject a fault into the job, and wait until it goes on."""
        self._clear()
        world = self.newest()
        began = time.monotonic()
        undo = getattr(self, f"_{kind}")()
        if undo is None:
            return
        if kind == "cable":  # a short cut does not end the world
            world, began = 0, time.monotonic()
        try:
            self.seconds[kind].append(self.await_step(world, LONGEST, began) - began)
        except AssertionError as error:
            error.add_note(f"the fault: {kind}")
            raise
        finally:
            undo()

    def settle(self) -> None:
        """Wait until two workers train in the newest world, so that a commit survives the next fault."""
        now = time.monotonic()

        def trains() -> bool:
            world = self.newest()
            return sum(step.world == world and step.time > now for step in self._last.values()) > 1

        until(trains, "two workers that train", LONGEST, 0.01)

    def _training(self) -> list[int]:
        """Return the pids of workers that train in the newest world, ordered by their numbers."""
        world = self.newest()
        trains = {worker for worker, step in self._last.items() if step.world == world}
        return [pid for number, pid in sorted(self.workers().items()) if number in trains]

    def _any_worker(self) -> int | None:
        """Return the pid of a random worker that trains, or None if it is the only one."""
        found = self._training()
        return self.random.choice(found) if len(found) > 1 else None

    def _signal(self, number: signal.Signals) -> int | None:
        pid = self._any_worker()
        if pid is not None:
            os.kill(pid, number)
        return pid

    def _kill(self) -> Callable[[], None] | None:
        return None if self._signal(signal.SIGKILL) is None else lambda: None

    def _leave(self) -> Callable[[], None] | None:
        return None if self._signal(signal.SIGTERM) is None else lambda: None

    def _stop(self) -> Callable[[], None] | None:
        pid = self._signal(signal.SIGSTOP)
        if pid is None:
            return None

        def wake() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        return wake

    def _spared(self) -> dict[int, int]:
        """Return the agents of hosts with some but not all members, by host, so that a commit survives."""
        hosts = {host for host, pid in self._marked("CHAOS_AGENT") if pid in self._training()}
        return {host: pid for host, pid in self.agents().items() if host in hosts and hosts - {host}}

    def _agent(self) -> Callable[[], None] | None:
        agents = self._spared()
        if not agents:
            return None
        os.kill(agents[self.random.choice(sorted(agents))], signal.SIGKILL)
        return lambda: None

    def _starter(self) -> Callable[[], None] | None:
        agents = self._spared()
        if not agents:
            return None
        os.kill(_parent(agents[self.random.choice(sorted(agents))]), signal.SIGKILL)
        return lambda: None

    def _coordinator(self) -> Callable[[], None] | None:
        world = self.newest()
        first = next((worker for worker, step in self._last.items() if step.world == world and step.rank == 0), None)
        pid = self.workers().get(-1 if first is None else first)
        host = next((host for host, each in self._marked("CHAOS_AGENT") if each == pid), None)
        agent = None if host is None else self._spared().get(host)
        if pid is None or agent is None:
            return None
        os.kill(agent, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return lambda: None

    def _lost(self) -> Callable[[], None] | None:
        agents = self._spared()
        if not agents or self.hosts is None:
            return None
        hosts, host = self.hosts, self.random.choice(sorted(agents))
        carrier, dark = _parent(agents[host]), self.directory / f"dark.{host}"
        dark.touch()
        hosts.cut(host)
        os.kill(carrier, signal.SIGSTOP)

        def restore() -> None:
            dark.unlink()
            hosts.restore(host)
            with suppress(ProcessLookupError):
                os.kill(carrier, signal.SIGCONT)

        return restore

    def _host(self) -> Callable[[], None] | None:
        if len(self.names) < 2:
            return None
        hosts = sorted({host for host, pid in self._marked("CHAOS_AGENT") if pid in self._training()})
        if not hosts:
            return None
        gone = self.names[self.random.choice(hosts)]
        self._name_hosts([name for name in self.names if name != gone])
        return lambda: self._name_hosts(self.names)

    def _cable(self) -> Callable[[], None] | None:
        if self.hosts is None:
            return None
        host = self.random.randrange(self.hosts.count)
        self.hosts.cut(host)
        let_pass(self.random.uniform(1.0, 12.0))  # hosts notice a lost connection after about 6 s
        self.hosts.restore(host)
        return lambda: None

    # ---- the end

    def finish(self) -> int:
        """Let the training end, check its result, and return the number of its steps."""
        (self.directory / "enough").touch()
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not come to its end:\n{self.tail()}") from None
        assert code == 0, self.tail()
        results = sorted(self.directory.glob("result.*.npz"))
        assert results, self.tail()
        for path in results:
            with np.load(path) as result:
                steps, epoch, seen, weights = (
                    int(result["step"]),
                    int(result["epoch"]),
                    result["seen"],
                    result["weights"],
                )
            assert np.array_equal(seen, np.full(chaos_program.SAMPLES, epoch)), f"of {epoch} epochs: {seen}"
            expected = chaos_program.undisturbed(steps)
            assert np.allclose(weights, expected, rtol=0, atol=1e-9), np.abs(weights - expected).max()
        left = until(lambda: not self.workers() and not self.agents(), "the end of all processes", 20)
        assert left
        return steps

    def close(self) -> None:
        """End all processes of the job."""
        self.process.kill()
        self.process.wait()
        for pid in (*self.workers().values(), *self.agents().values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _began(pid: int) -> int:
    """Return the start time of a process, in ticks of the system."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return sys.maxsize


@contextmanager
def chaos(
    directory: Path,
    seed: int,
    hosts: Hosts | None = None,
    slots: int = 3,
    lease: float = LEASE,
    options: Sequence[str] = (),
) -> Iterator[Chaos]:
    """Yield a job that trains, and leave nothing of it behind."""
    job = Chaos(directory, seed, hosts, slots, lease, options)
    try:
        job.start()
        yield job
    finally:
        job.close()


def play(job: Chaos, count: float, minutes: float, kinds: Sequence[str], show: Callable[[str], None] = print) -> int:
    """Inject random faults of these kinds until the count or the time is reached; return their number."""
    began, done = time.monotonic(), 0
    end = began + 60 * minutes
    while done < count and time.monotonic() < end:
        kind = job.random.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        before = len(job.seconds[kind])
        job.settle()
        job.fault(kind)
        done += len(job.seconds[kind]) - before
        if len(job.seconds[kind]) > before and done % 10 == 0:
            spent = (time.monotonic() - began) / 60
            show(f"{spent:.1f} min: {done} faults, {job.newest()} worlds; last {kind}: {job.seconds[kind][-1]:.2f} s")
        let_pass(job.random.uniform(0.0, 0.8))
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="play for so long (default 10)")
    parser.add_argument("--count", type=float, default=float("inf"), help="or until there were so many faults")
    parser.add_argument("--seed", type=int, default=1, help="draw others with another (default 1)")
    parser.add_argument("--hosts", type=int, default=3, help="namespaces as hosts; 0: this machine alone (default 3)")
    parser.add_argument("--slots", type=int, default=2, help="ranks of a host (default 2)")
    parser.add_argument("--lease", type=float, default=LEASE, help=f"of agents, in seconds (default {LEASE:g})")
    parser.add_argument("--faults", metavar="KIND,KIND", help="draw these alone (default: all that can be)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        made = Hosts(options.hosts) if options.hosts else None
        try:
            with chaos(Path(name), options.seed, made, options.slots, options.lease) as job:
                kinds = options.faults.split(",") if options.faults else [*WEIGHTS] if made else HERE
                done = play(job, options.count, options.minutes, kinds, lambda text: print(text, flush=True))
                steps = job.finish()
                worlds = job.newest()
        finally:
            if made is not None:
                made.close()
    print(
        f"seed {options.seed}: {done} faults, {worlds} worlds, {steps} steps; the model is that of an undisturbed run"
    )
    print(table(job.seconds, options.lease))


def table(seconds: dict[str, list[float]], lease: float) -> str:
    """Return the cost of each kind of fault as a table, in the form of `benchmarks/history/elastic.md`."""
    lines = [
        "| fault | times | seconds to the next step: median | longest | allowed | longer |",
        "|---|---|---|---|---|---|",
    ]
    for kind, each in sorted(seconds.items()):
        if each:
            allowed = ALLOWED[kind] + lease * (kind == "lost")
            longer = sum(one > allowed for one in each)
            lines.append(f"| {kind} | {len(each)} | {median(each):.2f} | {max(each):.2f} | {allowed:g} | {longer} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
