"""The hunt for lost wake-ups and deadlocks: thousands of random steps, none of which may end by the 100 ms tick."""

from __future__ import annotations

import pytest

from ..ranks import run_ranks
from ..waiting import measured
from . import random_steps
from .random_steps import Log, plan

STEPS = 2000
CYCLES = (0.0, 1.0, 20.0)  # milliseconds; they change during the run
TICK = 0.09  # seconds: a wait looks again after 0.1
EXPLAINED = 0.4  # share of a delay; more time than that without a processor explains the delay


def late_operations(logs: list[Log], seed: int) -> list[str]:
    """Return operations that completed a tick after all ranks had submitted them, without a visible reason."""
    found = []
    for step in range(len(logs[0].steps)):
        # Threads without a processor: there are more ranks than processors, and other programs run.
        starved = sum(log.delays[step + 1] - log.delays[step] for log in logs) / 1e9
        for place, operation in enumerate(plan(seed, step)):
            brought = max(log.steps[step][place].brought for log in logs)
            for rank, log in enumerate(logs):
                at = log.steps[step][place]
                late = at.done - max(brought, at.wanted)
                if late >= TICK and starved < EXPLAINED * late:
                    manners = [each.manners[step] for each in logs]
                    found.append(
                        f"step {step}, rank {rank}: {operation} took {late:.3f} s; {manners}, starved {starved:.3f} s"
                    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("spin", [0, 25])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_wake_up_is_lost(size: int, spin: int) -> None:
    seed, settings = size * 100 + spin, {"ENGINE_SPIN_US": str(spin)}

    def measure() -> None:
        logs = run_ranks(size, random_steps.random_steps, seed, STEPS, CYCLES, env=settings).values
        assert all(len(log.steps) == STEPS for log in logs)
        assert late_operations(logs, seed) == []
        assert [log.late_wakes for log in logs] == [0] * size

    # A rank may be stopped between a change and its wake-up, even with the whole machine: that loses nothing, and is
    # unlikely twice.
    measured(measure, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "spin"), [pytest.param(2, 0, marks=pytest.mark.slow), (2, 25), (3, 0)])
def test_no_wake_up_is_lost_when_the_role_changes_hands(size: int, spin: int) -> None:
    finished = run_ranks(size, random_steps.tight_steps, size, 8000, 10.0, env={"ENGINE_SPIN_US": str(spin)})
    assert finished.values == [[]] * size
