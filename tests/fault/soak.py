"""Jobs for any length of time: training with ranks that are late or stopped, and with ranks that end at random.

    python -m tests.fault.soak --minutes 30 --seed 7

Every job is checked: results, the named rank and the delay, processes, descriptors, /dev/shm and memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass

from ..ranks import start_ranks
from ..waiting import let_pass, until
from . import soak_program
from .faults import WITHIN, abstract_sockets, named, others, ready

ERRORS = {
    "killed": "RankDiedError",
    "vanishes": "RankDiedError",
    "raises": "RankRaisedError",
    "exits": "RankLeftError",
}
MOST_KIB = 8 << 10  # growth that is an allocator's noise


@dataclass
class Tally:
    """Counts of what has been done so far."""

    jobs: int = 0
    steps: int = 0
    stops: int = 0
    ends: int = 0

    def __str__(self) -> str:
        return f"{self.jobs} jobs, {self.steps} steps, {self.stops} stops, {self.ends} ranks gone"


def late(seed: int, size: int, seconds: float, tally: Tally) -> None:
    """Run one job whose ranks are late, and are stopped and resumed from outside."""
    dice = random.Random(seed)
    with start_ranks(size, soak_program.late, seed, seconds, timeout=seconds * 5 + 60) as job:
        ready(job)
        while not any((job.directory / f"trained.{rank}").exists() for rank in range(size)):
            let_pass(dice.random() * 0.3)
            if job.process.poll() is not None:
                break
            rank = dice.randrange(size)
            with contextlib.suppress(ProcessLookupError):  # It has just finished.
                os.kill(job.pid(rank), signal.SIGSTOP)
                let_pass(dice.choice((0.0, 0.01, 0.15, 0.4)))
                os.kill(job.pid(rank), signal.SIGCONT)
            tally.stops += 1
        finished = job.finish()
    digests = {value["digest"] for value in finished.values}
    assert len(digests) == 1, f"ranks hold different parameters: {finished.values}"
    for rank, value in enumerate(finished.values):
        assert value["grown_kib"] < MOST_KIB, f"rank {rank} grew by {value['grown_kib']} KiB: {value}"
        assert value["grown_descriptors"] <= 0, f"rank {rank} has more descriptors: {value}"
    tally.steps += finished.values[0]["steps"]
    tally.jobs += 1


def doomed(seed: int, size: int, end: str, tally: Tally) -> None:
    """Run one job in which a random rank ends at a random step."""
    dice = random.Random(seed)
    victim, last = dice.randrange(size), dice.choice((0, 1, dice.randrange(2, 100)))
    with start_ranks(size, soak_program.doomed, seed, victim, end, last) as job:
        job.wait_for("gone")
        until(lambda: (job.directory / "gone").read_text(), "the rank said when it went")
        gone = float((job.directory / "gone").read_text())
        finished = job.finish(check=False)
    named(finished, others(finished, victim), victim, ERRORS[end], gone, WITHIN + 1.0)
    tally.steps += last
    tally.ends += 1
    tally.jobs += 1


def soak(seconds: float, seed: int, show: bool = True, late_seconds: float = 20.0) -> Tally:
    """Run jobs until the time is over; raise at the first failure."""
    tally = Tally()
    over = time.monotonic() + seconds
    sockets, descriptors = abstract_sockets(), len(os.listdir("/proc/self/fd"))
    number = 0
    while number == 0 or time.monotonic() < over:
        ends = list(ERRORS)
        random.Random(seed * 31 + number).shuffle(ends)
        job_seed, size = seed * 1000 + number, 2 + number % 3
        late(job_seed, size, min(late_seconds, seconds / 3), tally)
        for place, end in enumerate(ends):
            doomed(job_seed * 10 + place, 2 + (number + place) % 3, end, tally)
            if time.monotonic() > over and number:
                break
        number += 1
        if show:
            left = max(0.0, over - time.monotonic())
            print(f"seed {seed}: {tally}; {left / 60:.1f} min to go", flush=True)
    until(lambda: abstract_sockets() <= sockets, "the sockets of rendezvous are gone")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of all that is random"
    )
    options = parser.parse_args()
    print(f"soak with --seed {options.seed}", flush=True)
    tally = soak(options.minutes * 60, options.seed)
    print(f"all as it should be: {tally}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
