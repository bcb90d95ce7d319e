"""A rank dies on its way into a world, at calls spread over everything between its place and joining."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.worlds import Nursery, Worker, Worlds
from tests.waiting import measured

SIZE = 3
POINTS = 20
WITHIN = 1.0  # seconds from the cancellation of a world to the first result of the next


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as begun:
        yield begun


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", range(SIZE))
@pytest.mark.parametrize("points", [4, pytest.param(POINTS, marks=pytest.mark.slow)])
def test_a_rank_that_dies_anywhere_on_its_way_costs_one_world(
    nursery: Nursery, tmp_path: Path, victim: int, points: int
) -> None:
    with Worlds(nursery, "dying", DYING=str(tmp_path)) as worlds:
        members = worlds.start(SIZE)
        worlds.place(members)
        calls = [worker.heard("calls")["count"] for worker in members][victim]
        for worker in members:
            worker.heard("reduced")
        members[-1].kill()
        members = [*members[:-1], *worlds.start()]
        died = 0
        for point in range(points):
            die_at = max(1, calls * point // points)

            def round_of(die_at: int = die_at) -> None:
                nonlocal members, died
                members, killed, seconds = one_round(worlds, members, victim, tmp_path, die_at)
                died += killed
                assert seconds < WITHIN, f"{seconds:.2f} s after a death at call {die_at} of {calls}"

            measured(round_of)
        assert died >= points * 3 // 4, f"only {died} of {points} died on their way"


def one_round(
    worlds: Worlds, members: list[Worker], victim: int, place: Path, call: int
) -> tuple[list[Worker], bool, float]:
    """Let members enter a world in which one dies at a call, and the others the next one.

    Returns the members of the next world, whether the victim died on its way, and the seconds until they were in it.
    """
    dies = members[victim]
    (place / str(dies.number)).write_text(str(call))
    worlds.place(members)
    try:
        dies.heard("reduced")
        on_its_way = False
        dies.kill()
    except AssertionError:
        on_its_way = True
    there = [worker for worker in members if worker is not dies]
    called = worlds.void(there)
    number = worlds.place(there)
    seconds = max(result_of(worker, number) for worker in there) - called
    there[-1].kill()
    there.pop()
    return [*there, *worlds.start(2)], on_its_way, seconds


def result_of(worker: Worker, number: int) -> float:
    """Return the time at which a worker has the first result of a world."""
    while (said := worker.heard("called_off", "failed", "reduced")).get("world") != number or said["kind"] != "reduced":
        pass
    return float(said["time"])
