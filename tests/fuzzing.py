"""Drawing of attacks by number, and the command line of fuzzers."""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping

Target = Callable[[random.Random], str]
"""Attack that a random generator draws; it returns the fault that it found, or an empty string."""
Drawn = tuple[Counter[str], list[str]]
"""How often each target was attacked, and the faults found."""


def draw(count: int, seed: int, targets: Mapping[str, Target]) -> Drawn:
    """Attack targets, each drawn by its own number; an exception is a fault, too."""
    drawn, problems = Counter[str](), []
    for number in range(count):
        dice = random.Random(f"{seed} {number}")
        name = dice.choice(list(targets))
        drawn[name] += 1
        begun = time.monotonic()
        try:
            problem = targets[name](dice)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            problems.append(f"{seed} {number}: {name}: {problem}, after {time.monotonic() - begun:.1f} s")
    return drawn, problems


def main(run: Callable[[int, int], Drawn], description: str, what: str, count: int = 100_000) -> int:
    """Run the command line of a fuzzer that attacks `what`, by default `count` times; return its exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=count, help=f"{what} to draw")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    begun = time.monotonic()
    drawn, problems = run(given.count, given.seed)
    print(*problems[:20], sep="\n")
    print(f"{drawn.total()} {what}, {time.monotonic() - begun:.0f} s; by kind: {dict(sorted(drawn.items()))}")
    return int(bool(problems))
