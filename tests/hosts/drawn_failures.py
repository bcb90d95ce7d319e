"""Randomly drawn failures of ranks, hosts and cables, on hosts that are namespaces of this machine; needs root.

    python -m tests.hosts.drawn_failures --count 200 --seed 1

draws that many, prints each with its seed and its outcome, and a table at the end. `--seed N --count 1` replays one.

All survivors must name the same culprit, which must be one of the harmed ranks, within `WITHIN` of its detection. The
exit of a process is detected at once. A silent host is detected after 4 to 5 s, by the kernel's keepalive or by
unacknowledged data; two hosts that lose only each other, after 6 to 8 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..netns import Hosts, lacking, rest
from ..waiting import let_pass, until

ROOT = Path(__file__).parents[2]
CREWS = [[0, 1], [2, 3], [4]]
SIZE = 5
HOST_OF = {rank: host for host, crew in enumerate(CREWS) for rank in crew}
MOMENTS = ("start", "idle", "busy", "forming")
WITHIN = 5.0  # seconds from the detection to the last survivor's error
DETECTED = {"host unplugged": 5.0, "cable cut": 5.0, "pair cut": 9.0}  # seconds until detection; others at once
START_TIMEOUT = 40.0
ENDED = 90.0  # seconds after which a silent survivor counts as hung


@dataclass
class Failure:
    """Harm to a job, drawn from a seed."""

    seed: int
    kind: str
    moment: str
    victims: list[int]
    hosts: list[int]
    delay: float

    @staticmethod
    def drawn(seed: int) -> Failure:
        """Draw the failure of a seed."""
        draw = random.Random(seed)
        kind = draw.choice(("rank", "leader", "coordinator", "host killed", "host unplugged", "cable cut", "pair cut"))
        moment = draw.choice(MOMENTS)
        host = draw.randrange(len(CREWS))
        hosts = [1, 2] if kind == "pair cut" else [0] if kind == "coordinator" else [host]
        if kind == "rank":
            victims = [draw.choice([1, 3])]
        elif kind in ("leader", "coordinator"):
            victims = [CREWS[hosts[0] or 1][0]] if kind == "leader" else [0]
        else:
            victims = [rank for each in hosts for rank in CREWS[each]]
        if kind in ("rank", "leader"):
            hosts = [HOST_OF[victims[0]]]
        return Failure(seed, kind, moment, victims, hosts, draw.random() * (2.0 if moment == "start" else 1.0))

    @property
    def lost(self) -> list[int]:
        """The ranks whose processes are ended."""
        return [] if self.kind in ("cable cut", "pair cut") else self.victims

    def islands(self) -> list[list[int]]:
        """Survivors, grouped by mutual reachability; each group must name one culprit."""
        left = [rank for rank in range(SIZE) if rank not in self.lost]
        if self.kind != "cable cut":
            return [left]
        behind = [rank for rank in left if HOST_OF[rank] in self.hosts]
        return [behind, [rank for rank in left if rank not in behind]]

    def harm(self, hosts: Hosts, pids: dict[int, int]) -> None:
        """Inflict the failure."""
        if self.kind == "cable cut":
            hosts.cut(self.hosts[0])
        elif self.kind == "pair cut":
            hosts.part(*self.hosts)
        else:
            if self.kind == "host unplugged":
                hosts.unplug(self.hosts[0])
            numbers = " ".join(str(pids[rank]) for rank in self.victims)
            hosts.run(self.hosts[0], "sh", "-c", f"kill -s KILL {numbers}")

    def mend(self, hosts: Hosts) -> None:
        """Restore the hosts."""
        if self.kind == "cable cut":
            hosts.restore(self.hosts[0])
        elif self.kind == "pair cut":
            hosts.rejoin(*self.hosts)
        elif self.kind == "host unplugged":
            hosts.plug(self.hosts[0])


@dataclass
class Outcome:
    """Result of one failure: complaints, and the seconds until the last survivor was told of it."""

    failure: Failure
    told: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Format the outcome as one line."""
        failure, said = self.failure, sorted({str(each["culprit"]) for each in self.told.values() if each})
        what = f"{failure.seed:6d}  {failure.kind:14s}  {failure.moment:8s}  {failure.victims!s:12s}"
        return f"{what}  {self.seconds:5.1f} s  rank {', '.join(said)}  {'; '.join(self.complaints)}"


def play(hosts: Hosts, failure: Failure) -> Outcome:
    """Start a job, harm it, and judge the errors that its ranks get."""
    job = uuid.uuid4().hex
    processes = {rank: start(hosts, job, failure.moment, rank) for rank in range(SIZE)}
    outcome = Outcome(failure)
    try:
        pids = {rank: int(line(process)) for rank, process in processes.items()}
        if failure.moment != "start":
            for process in processes.values():
                line(process)
        let_pass(failure.delay)
        failure.harm(hosts, pids)
        harmed = time.time()
        for rank, process in processes.items():
            try:
                outcome.told[rank] = last(rest(process, ENDED))
            except subprocess.TimeoutExpired:
                outcome.complaints.append(f"rank {rank} hangs")
                hosts.kill(HOST_OF[rank], pids[rank])
    finally:
        failure.mend(hosts)
        for process in processes.values():
            process.kill()
            process.wait()
    judge(outcome, harmed)
    for host in range(len(CREWS)):
        try:
            until(lambda host=host: not hosts.pythons(host), "nothing is left on a host", 10)
        except AssertionError:
            outcome.complaints.append(f"left on host {host}: {hosts.pythons(host)}")
    return outcome


def start(hosts: Hosts, job: str, moment: str, rank: int) -> subprocess.Popen[str]:
    """Start a rank."""
    host = HOST_OF[rank]
    numbers = {"RANK": rank, "SIZE": SIZE, "LOCAL_SIZE": len(CREWS[host]), "CROSS_RANK": host}
    numbers |= {"LOCAL_RANK": CREWS[host].index(rank)}
    environ = {f"ENGINE_{name}": str(number) for name, number in numbers.items()}
    environ |= {"ENGINE_JOB": job, "ENGINE_HUB": "node0:4713", "ENGINE_SECRET": "a secret of tests", "MOMENT": moment}
    environ |= {"ENGINE_START_TIMEOUT": str(START_TIMEOUT)}
    command = [sys.executable, "-m", "tests.hosts.drawn_program"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return hosts.start(host, command, cwd=ROOT, env={**os.environ, **environ}, **pipes)


def line(process: subprocess.Popen[str]) -> str:
    """Read the next line of a rank's output."""
    assert process.stdout is not None
    return process.stdout.readline()


def last(text: str) -> dict[str, Any] | None:
    """Error that a rank printed at its end, or None."""
    lines = [each for each in text.splitlines() if each.startswith("{")]
    told: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return told


def judge(outcome: Outcome, harmed: float) -> None:
    """Compare the survivors' errors with each other and with the harm done."""
    failure = outcome.failure
    for island in failure.islands():
        told = {rank: outcome.told.get(rank) for rank in island}
        said = {rank: each for rank, each in told.items() if each is not None}
        outcome.complaints += [f"rank {rank} was told nothing" for rank in island if rank not in said]
        outcome.seconds = max([outcome.seconds, *(each["at"] - harmed for each in said.values())])
        if failure.moment == "start" and any(each["culprit"] is None for each in said.values()):
            # They have not met: the error names who did not come, or whose connection ended.
            outcome.complaints += [f"rank {rank}: {each['text']}" for rank, each in said.items() if not names(each)]
            continue
        culprits = {each["culprit"] for each in said.values()}
        if len(culprits) > 1:
            outcome.complaints.append(f"several culprits: { ({rank: each['text'] for rank, each in said.items()}) }")
        behind = failure.kind == "cable cut" and HOST_OF[island[0]] in failure.hosts
        if not behind and not culprits <= set(failure.victims) and failure.hosts != [0]:
            outcome.complaints.append(f"innocent: {next(iter(said.values()))['text']}")
    limit = DETECTED.get(failure.kind, 0.0) + WITHIN
    if failure.moment != "start" and outcome.seconds > limit:
        outcome.complaints.append(f"later than {limit:g} s")


def names(told: dict[str, Any]) -> bool:
    """Return whether an error of the start names a rank or a node."""
    return "rank" in told["text"] or "node" in told["text"]


def summary(outcomes: list[Outcome]) -> str:
    """Table by kind and moment: failures, failures with complaints, and seconds until the last survivor was told."""
    rows: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome.failure.kind, outcome.failure.moment].append(outcome)
    lines = [f"{'what':14s}  {'when':8s}  count  wrong  median     most"]
    for (kind, moment), those in sorted(rows.items()):
        seconds = [each.seconds for each in those]
        wrong = sum(bool(each.complaints) for each in those)
        times = f"{statistics.median(seconds):5.1f} s  {max(seconds):5.1f} s"
        lines.append(f"{kind:14s}  {moment:8s}  {len(those):5d}  {wrong:5d}  {times}")
    wrong = [str(each.failure.seed) for each in outcomes if each.complaints]
    lines.append(f"{len(outcomes)} failures, {len(wrong)} wrong{': seeds ' if wrong else ''}{', '.join(wrong)}")
    return "\n".join(lines)


def main() -> int:
    """Draw failures, and check that each of them is reported correctly."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.drawn_failures", description=main.__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000), help="of the first")
    options = parser.parse_args()
    if reason := lacking():
        sys.stderr.write(f"{reason}\n")
        return 2
    outcomes = []
    with Hosts(len(CREWS)) as hosts:
        for seed in range(options.seed, options.seed + options.count):
            outcomes.append(play(hosts, Failure.drawn(seed)))
            print(outcomes[-1].line(), flush=True)
    print(summary(outcomes))
    return int(any(each.complaints for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
