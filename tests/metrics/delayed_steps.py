"""A training whose steps are delayed on purpose, in five ways, and what the ranks say about them.

`run_delays` runs it on two ranks, each on a processor of its own: on two hosts that are namespaces of this machine, or
both on this one, where no delay can be the network's. `judge_delays` compares what the ranks found with what was done.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.data import time_input

from ..netns import Hosts
from ..ranks import run_ranks
from ..waiting import be_late

ROOT = Path(__file__).parents[2]
KINDS = ("input", "compute", "gc", "cpu", "network")
MISSED = "none"  # verdict where no rank found a late step
RANKS = 2
FIRST = 40  # number of the first step that may be delayed
GAP = (4, 7)  # steps from one delay to the next
SECONDS = (0.02, 0.06)  # length of a delay
COMPUTE = 0.006  # seconds of processor time in every step
FETCH = 0.001  # seconds in which every batch comes
ELEMENTS = 1 << 18  # of the gradient, in float32
LISTS = 60_000  # lists that the collector looks at
LOG_EVERY = 40  # steps after which the late ones are read: the engine remembers 256
PRIORITY = -15  # nice value of the ranks, so that other programs on this machine delay them little
HUB_PORT = 4713
CABLE = "dev eth0 root tbf rate {rate} burst {burst} latency 2s"
FAST = CABLE.format(rate="20gbit", burst="8mb")
_THIEF = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
print("up", flush=True)
for line in sys.stdin:
    end = time.monotonic() + float(line)
    while time.monotonic() < end:
        pass
"""


@dataclass(frozen=True)
class Delay:
    """A delay of one step on one rank."""

    step: int  # number of the step, from 1
    rank: int
    kind: str  # one of KINDS
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """Comparison of the delays with what ranks found."""

    confusion: Counter[tuple[str, str]]  # number of delays by kind and verdict
    wrong_rank: int  # number of verdicts of the right kind about the wrong rank
    named: int  # number of delays of a rank's own in which the other rank named it
    others: Counter[str]  # verdicts on steps that were not delayed on purpose
    steps: int

    @property
    def right(self) -> int:
        """Number of delays with the right cause on the right rank."""
        return sum(count for (kind, found), count in self.confusion.items() if kind == found) - self.wrong_rank

    @property
    def total(self) -> int:
        """Number of delays."""
        return self.confusion.total()


def can_steal() -> bool:
    """Return whether this process may take a processor from the ranks, and two ranks have one each."""
    if len(os.sched_getaffinity(0)) < RANKS or shutil.which("chrt") is None:
        return False
    return subprocess.run(["chrt", "-f", "10", "true"], capture_output=True).returncode == 0


def plan_delays(count: int, kinds: Sequence[str], seed: int) -> list[Delay]:
    """Draw delays, as many of each kind as of the others, at most one more."""
    draw = random.Random(seed)
    drawn = [kinds[k % len(kinds)] for k in range(count)]
    draw.shuffle(drawn)
    step, plan = FIRST, []
    for kind in drawn:
        plan.append(Delay(step, draw.randrange(RANKS), kind, draw.uniform(*SECONDS)))
        step += draw.randint(*GAP)
    return plan


# ---- a rank ----------------------------------------------------------------------------------------------------------


def spin(seconds: float) -> None:
    """Use up processor time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def collect(seconds: float) -> None:
    """Collect garbage until it has taken so much processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        gc.collect()


class Delayer:
    """Delays of a rank from outside: a thief of its processor, and a program that slows its cable."""

    def __init__(self, processor: int, everywhere: set[int], kinds: set[str]) -> None:
        self._slow = False
        self._thief = self._cable = None
        if "cpu" in kinds:
            command = [sys.executable, "-c", _THIEF, str(processor)]
            self._thief = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._thief.stdout is not None
            assert self._thief.stdout.readline() == "up\n"
        if "network" in kinds:
            subprocess.run(["tc", "qdisc", "replace", *FAST.split()], check=True)
            command = ["chrt", "-f", "10", "tc", "-batch", "-"]
            self._cable = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
            os.sched_setaffinity(self._cable.pid, everywhere)  # it has to act while the rank computes

    def begin_step(self, delay: Delay | None) -> None:
        """Make the cable slow for a step that needs it, and fast again after that."""
        if delay is not None and delay.kind == "network":
            self._slow = True
            rate = int(8 * 4 * ELEMENTS / delay.seconds)
            self._tell(self._cable, "qdisc change " + CABLE.format(rate=f"{rate}bit", burst="16kb"))
        elif self._slow:
            self._slow = False
            self._tell(self._cable, f"qdisc change {FAST}")

    def steal(self, seconds: float) -> None:
        """Take the processor for so long, from now on."""
        self._tell(self._thief, str(seconds))

    def end(self) -> None:
        """End both programs."""
        for each in (self._thief, self._cable):
            if each is not None:
                each.communicate(timeout=30)

    @staticmethod
    def _tell(program: subprocess.Popen[str] | None, line: str) -> None:
        assert program is not None and program.stdin is not None
        program.stdin.write(line + "\n")
        program.stdin.flush()


def train(plan: list[dict[str, Any]], prioritize: bool) -> dict[str, Any]:
    """Train on one rank with the delays of the plan; return what the engine found."""
    delays = [Delay(**each) for each in plan]
    last = delays[-1].step + GAP[1]
    engine.init(metrics=True)
    native, rank = engine.session.runtime.current_engine(), engine.rank()
    processors = sorted(os.sched_getaffinity(0))
    processor = processors[rank % len(processors)]
    if len(processors) >= RANKS:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {processor})
    mine = {delay.step: delay for delay in delays if delay.rank == rank}
    delayer = Delayer(processor, set(processors), {delay.kind for delay in delays})
    if prioritize:
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), PRIORITY)
    heap = [[k] for k in range(LISTS)]  # what the collector has to look at
    gradient = np.ones(ELEMENTS, np.float32)
    found: dict[int, dict[str, Any]] = {}

    def load() -> Iterator[int]:
        for step in range(1, last + 1):
            delay = mine.get(step)
            be_late(FETCH + (delay.seconds if delay is not None and delay.kind == "input" else 0.0))
            yield step

    native.mark_step()
    for step in time_input(load()):
        delay = mine.get(step)
        delayer.begin_step(delay)
        if delay is not None and delay.kind == "cpu":
            delayer.steal(delay.seconds)
        spin(COMPUTE)
        if delay is not None and delay.kind == "compute":
            spin(delay.seconds)
        if delay is not None and delay.kind == "gc":
            collect(delay.seconds)
        engine.allreduce(gradient, name="gradient")
        native.mark_step()
        if step % LOG_EVERY == 0 or step == last:
            # The first mark began step 1, and is counted itself.
            found |= {late["step"] - 1: late for late in native.late_steps()}
    delayer.end()
    engine.barrier()
    engine.shutdown()
    del heap
    return {"rank": rank, "late": list(found.values()), "steps": last}


# ---- the job ---------------------------------------------------------------------------------------------------------


def run_delays(plan: Sequence[Delay], hosts: Hosts | None) -> list[dict[str, Any]]:
    """Run the training on two hosts, or both ranks on this one; return what each rank found, by rank."""
    given = [asdict(delay) for delay in plan]
    prioritize = can_steal()
    if hosts is None:
        return run_ranks(RANKS, train, given, prioritize).values
    common = {"ENGINE_HUB": f"node0:{HUB_PORT}", "ENGINE_SECRET": "a secret of tests", "ENGINE_JOB": uuid.uuid4().hex}
    common |= {"DELAYS": json.dumps(given), "ENGINE_SIZE": str(RANKS), "ENGINE_LOCAL_SIZE": "1"}
    ranks = [
        hosts.start(
            host,
            [sys.executable, "-m", "tests.metrics.delayed_steps"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            env={**os.environ, **common, "ENGINE_RANK": str(host), "ENGINE_LOCAL_RANK": "0"},
        )
        for host in range(RANKS)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def judge_delays(plan: Sequence[Delay], found: Sequence[dict[str, Any]]) -> Outcome:
    """Compare what ranks found with the delays.

    The verdict on a delay is that of the rank with the latest step, this one or the next, that does not say that it
    waited for the other.
    """
    late = {(each["rank"], step["step"] - 1): step for each in found for step in each["late"]}
    confusion: Counter[tuple[str, str]] = Counter()
    wrong_rank = named = 0
    seen: set[tuple[int, int]] = set()
    for delay in plan:
        near = [(rank, step) for rank in range(RANKS) for step in (delay.step, delay.step + 1)]
        seen.update(near)
        verdicts = [(late[key]["late"], late[key]["cause"], key[0]) for key in near if key in late]
        own = max((each for each in verdicts if each[1] != "rank"), default=(0, MISSED, -1))
        confusion[delay.kind, own[1]] += 1
        wrong_rank += own[1] == delay.kind != "network" and own[2] != delay.rank
        other = late.get((1 - delay.rank, delay.step), {})
        named += delay.kind != "network" and other.get("cause") == "rank" and other["rank"] == delay.rank
    others = Counter(step["cause"] for key, step in late.items() if key not in seen and step["cause"] != "rank")
    return Outcome(confusion, wrong_rank, named, others, found[0]["steps"])


def format_confusion(outcome: Outcome, kinds: Sequence[str]) -> list[str]:
    """Format the table of confusion as Markdown."""
    verdicts = [*KINDS, MISSED]
    lines = [f"| delayed by | {' | '.join(verdicts)} |", f"|---|{'---:|' * len(verdicts)}"]
    counts = {kind: " | ".join(str(outcome.confusion[kind, found]) for found in verdicts) for kind in kinds}
    return [*lines, *(f"| {kind} | {each} |" for kind, each in counts.items())]


if __name__ == "__main__":
    print(json.dumps(train(json.loads(os.environ["DELAYS"]), can_steal())), flush=True)
