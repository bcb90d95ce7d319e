"""More ranks than processors: waits for small operations yield for a while; waits for a large one sleep at once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engine
from engine.net.rendezvous import Gathered
from engine.session import startup

from ..ranks import run_ranks
from ..waiting import measured
from . import crowd_program
from .thread_world import ThreadWorld

SIZE = 3


def crowded(turn: int) -> Any:
    """Run the program on three ranks on one processor, another one in each turn."""
    processors = sorted(os.sched_getaffinity(0))
    one = str(processors[turn % len(processors)])
    return run_ranks(SIZE, crowd_program.crowd, prefix=("taskset", "-c", one)).values


@pytest.fixture(scope="module")
def seen() -> Any:
    """Counts of three ranks on one processor."""
    return crowded(0)


def often(seen: Any, check: Callable[[Any], None]) -> None:
    """Check the counts, and repeat the measurement if others use the processor for longer than a yield may last."""
    turns = itertools.count()
    measured(lambda: check(crowded(turn) if (turn := next(turns)) else seen), 5)


def test_small_operations_yield(seen: Any) -> None:
    assert all(rank["small"]["yields"] > 0 for rank in seen), seen

    def check(seen: Any) -> None:
        assert all(rank["small"]["sleeps"] < 200 for rank in seen), seen  # 400 with a sleep in each handshake

    often(seen, check)


def test_large_operations_do_not(seen: Any) -> None:
    assert [rank["large"]["yields"] for rank in seen] == [0] * SIZE
    assert [rank["exchange"] for rank in seen] == [0] * SIZE  # its entry does not tell its size


def test_yields_are_bounded(seen: Any) -> None:
    """The last rank comes only when the others sleep, which an unbounded wait would never allow."""
    assert all(rank["late"]["sleeps"] >= 1 for rank in seen[:-1]), seen


def test_no_wake_up_is_lost(seen: Any) -> None:
    def check(seen: Any) -> None:
        assert {rank[what]["late_wakes"] for rank in seen for what in ("small", "large", "late")} == {0}

    often(seen, check)


def test_ranks_that_share_processors_share_a_session(seen: Any) -> None:
    """Autogroups pass a yielded processor on within a session. Each rank still leads a process group."""
    assert len({rank["session"] for rank in seen}) == 1
    assert [rank["group"] for rank in seen] == [rank["pid"] for rank in seen]


@pytest.mark.parametrize(
    ("processors", "spins", "yields"),
    [
        ([[0], [1]], True, False),
        ([[0, 1], [0, 1]], True, False),
        ([[0], [0]], False, True),
        ([[0, 1]] * 3, False, True),
    ],
)
def test_who_spins_and_who_yields(processors: list[list[int]], spins: bool, yields: bool, monkeypatch: Any) -> None:
    count = len(processors)
    gathered = Gathered(-1, -1, [-1] * count, list(range(count)), processors)
    monkeypatch.setattr(startup, "cpu_quota", lambda: None)
    assert (startup.spin_us(gathered) > 0, startup.yield_us(gathered) > 0) == (spins, yields)
    # A tight quota leaves each rank a processor of its own: yielding helps no rank, and spinning costs quota.
    monkeypatch.setattr(startup, "cpu_quota", lambda: 0.5)
    assert (startup.spin_us(gathered) > 0, startup.yield_us(gathered) > 0) == (False, yields)


def calls(rank: int, count: int) -> dict[str, int]:
    """Run blocking calls of one element; return the change of the counters."""
    native = engine.session.runtime.current_engine()
    value = np.empty(1, np.float32)
    engine.allreduce_(value, engine.Sum, "small")
    before = native.counters()
    for k in range(count):
        value[0] = rank + k
        engine.allreduce_(value, engine.Sum, "small")
        assert value[0] == sum(range(native.size)) + native.size * k
    after = native.counters()
    return {name: after[name] - before[name] for name in before}


def test_without_yields_nobody_yields() -> None:
    with ThreadWorld(2) as world:
        assert [cost["yields"] for cost in world.run(calls, 50)] == [0, 0]
    with ThreadWorld(2, yield_us=1000.0) as world:
        assert sum(cost["yields"] for cost in world.run(calls, 50)) > 0


def test_a_caller_that_is_alone_wakes_nobody() -> None:
    """The engine thread is sometimes awake by itself and gets a call; in some series of fifty calls it is not."""
    costs: list[int] = []
    with ThreadWorld(1) as world:
        while len(costs) < 40 and 0 not in costs:
            cost = world.run(calls, 50)[0]
            costs.append(cost["wakes"] + cost["sleeps"])
    assert 0 in costs, costs
