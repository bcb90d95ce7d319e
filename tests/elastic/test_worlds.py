"""Worlds that follow each other in one process: `runtime.enter`, and what goes from one into the next."""

from __future__ import annotations

import random

import pytest

from tests.elastic.worlds import Worker, Worlds


def test_survivors_and_a_newcomer_meet_in_the_next_world() -> None:
    """Problems 1 and 2: newcomers have counted other worlds, or none."""
    with Worlds("counting") as worlds:
        members = worlds.start(3)
        worlds.place(members)
        for worker in members:
            assert worker.heard("reduced")["value"] == 3.0
        members[0].kill()
        for worker in members[1:]:
            assert worker.heard("failed")["culprit"] == 0
        members = [*worlds.start(), *members[1:]]
        worlds.place(members)
        for rank, worker in enumerate(members):
            said = worker.heard("reduced")
            assert (said["value"], said["rank"]) == (3.0, rank)


def test_fifty_worlds_leave_nothing_behind() -> None:
    """Problems 2, 3 and 17: optimizer and scheduler go from world to world, with a newcomer in each."""
    drawn = random.Random(1)
    held = []
    with Worlds("adam") as worlds:
        veteran, *others = worlds.start(3)
        for _ in range(50):
            members = [veteran, *others]
            drawn.shuffle(members)
            train_in_one_world(worlds, members)
            if veteran.worlds > 1:
                held.append(veteran.heard("resources"))
            victim = drawn.choice(others)
            victim.kill()
            for worker in members:
                if worker is not victim:
                    assert worker.heard("failed")["culprit"] == members.index(victim)
            others = [*(worker for worker in others if worker is not victim), *worlds.start()]
    assert {(each["Engine"], each["GradientGroup"], each["TorchReducer"]) for each in held} == {(1, 1, 1)}
    early, late = held[5], held[-1]
    assert (late["descriptors"], late["threads"]) == (early["descriptors"], early["threads"])
    assert late["maps"] <= early["maps"] + 5, f"{early['maps']} maps have become {late['maps']}"


def train_in_one_world(worlds: Worlds, members: list[Worker]) -> None:
    """Have members enter the next world and train there: all have made equally many steps, with the same result."""
    worlds.place(members)
    told = [worker.heard("trained") for worker in members]
    for worker in members:
        worker.worlds += 1
    assert len({(each["steps"], each["rate"]) for each in told}) == 1, told
    assert all(each["same"] for each in told)


@pytest.mark.parametrize(
    "program", ["views", "two_optimizers", "powersgd", "frozen", "sparse", "passes", "batch_norm", "adasum"]
)
def test_training_goes_on_with_newcomers(program: str) -> None:
    """Problem 3: each kind of wrapping moves into the next world, where it meets those that newcomers have made."""
    with Worlds(program) as worlds:
        members = worlds.start(2 if program == "adasum" else 3)
        for world in range(5):
            train_in_one_world(worlds, members)
            victim = members[world % len(members)]
            victim.kill()
            members = [worker for worker in members if worker is not victim]
            for worker in members:
                worker.heard("failed")
            members = [*worlds.start(), *members] if world % 2 else [*members, *worlds.start()]
