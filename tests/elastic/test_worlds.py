"""Consecutive worlds in one process: `runtime.enter_world`, and what is carried from one to the next."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.metrics import page
from engine.trace.postmortem import make_report
from engine.trace.reading import files_of
from tests.elastic.worlds import Nursery, Worker, Worlds
from tests.waiting import be_late, until


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as begun:
        yield begun


def test_survivors_and_a_newcomer_meet_in_the_next_world(nursery: Nursery) -> None:
    """Newcomers have counted other worlds, or none."""
    with Worlds(nursery, "counting") as worlds:
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


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_many_worlds_leave_nothing_behind(nursery: Nursery, count: int) -> None:
    """Optimizer and scheduler go from world to world, with a newcomer in each."""
    drawn = random.Random(1)
    held = []
    with Worlds(nursery, "adam") as worlds:
        veteran, *others = worlds.start(3)
        for _ in range(count):
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
    """Let members enter the next world and train there: all have made as many steps, with the same result."""
    worlds.place(members)
    told = [worker.heard("trained") for worker in members]
    for worker in members:
        worker.worlds += 1
    assert len({(each["steps"], each["rate"]) for each in told}) == 1, told
    assert all(each["same"] for each in told)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "program", ["views", "two_optimizers", "powersgd", "frozen", "sparse", "passes", "batch_norm", "adasum"]
)
def test_training_goes_on_with_newcomers(nursery: Nursery, program: str) -> None:
    """Each kind of wrapping moves into the next world, where it meets those of newcomers."""
    with Worlds(nursery, program) as worlds:
        members = worlds.start(2 if program == "adasum" else 3)
        for world in range(5):
            train_in_one_world(worlds, members)
            victim = members[world % len(members)]
            victim.kill()
            members = [worker for worker in members if worker is not victim]
            for worker in members:
                worker.heard("failed")
            members = [*worlds.start(), *members] if world % 2 else [*members, *worlds.start()]


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_world_that_is_called_off_ends_at_once(nursery: Nursery, lacking: int) -> None:
    """A rank that waits for one that never comes is in the next world within a second."""
    with Worlds(nursery, "counting") as worlds:
        members = worlds.start(3)
        worlds.place(members)
        before = [worker.heard("resources") for worker in members]
        members[lacking].kill()
        there = [worker for worker in members if worker is not members[lacking]]
        for worker in there:
            worker.heard("failed")
        worlds.number += 1
        for rank in range(3):
            if rank != lacking:
                worlds.place_one(members, rank)
        for worker in there:
            worker.heard("entering")
        be_late(0.2)  # until all ranks that can come have come
        called = worlds.void(there)
        worlds.place(there)
        for worker in there:
            assert worker.heard("called_off")["time"] < called + 0.5
        for worker in there:
            held = worker.heard("resources")
            assert held["time"] < called + 1.5
            assert held["descriptors"] == before[members.index(worker)]["descriptors"] - 1  # one rank fewer to watch


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", [0.0, 0.002, 0.01, 0.03])
def test_a_rank_that_dies_while_ranks_gather_costs_one_world(nursery: Nursery, victim: int, moment: float) -> None:
    """A leader or another rank dies at any moment between its place and the first collective."""
    with Worlds(nursery, "counting") as worlds:
        members = worlds.start(3)
        worlds.place(members)
        for worker in members:
            worker.heard("reduced")
        members[2].kill()
        members = [members[0], members[1], *worlds.start()]
        for worker in members[:2]:
            worker.heard("failed")
        worlds.place(members)
        be_late(moment)
        members[victim].kill()
        there = [worker for worker in members if worker is not members[victim]]
        called = worlds.void(there)
        worlds.place(there)
        for worker in there:
            said = worker.heard("called_off", "failed", "reduced")
            while said.get("size") != 2:
                said = worker.heard("called_off", "failed", "reduced")
            assert said["time"] < called + 1.5


def test_survivors_are_in_the_next_world_soon(nursery: Nursery) -> None:
    """The time is from a kill to the first allreduce of the next world, on all survivors."""

    def reset() -> float:
        with Worlds(nursery, "counting") as worlds:
            members = worlds.start(4)
            worlds.place(members)
            for worker in members:
                worker.heard("reduced")
            killed = members.pop().kill()
            for worker in members:
                worker.heard("failed")
            worlds.place(members)
            return max(worker.heard("reduced")["time"] for worker in members) - killed

    assert min(reset() for _ in range(3)) < 1.0


def test_nothing_communicates_between_worlds(nursery: Nursery) -> None:
    """Collectives before `elastic.run` are refused by one text, except those that give all ranks a state."""
    with Worlds(nursery, "pending_session") as worlds:
        (worker,) = worlds.start()
        told = worker.heard("waited")
        assert (told["rank"], told["size"], told["initialized"]) == (0, 2, True)
        assert told["equal"]
        for text in told["refused"]:
            assert text.startswith("NotInitializedError: this is an elastic job")
            assert "move this call into that function" in text


def test_process_sets_come_back_where_their_ranks_fit(nursery: Nursery) -> None:
    """A set whose ranks a world lacks says since when it is gone, and is back when they are."""
    with Worlds(nursery, "process_sets") as worlds:
        members = worlds.start(4)
        worlds.place(members)
        for rank, worker in enumerate(members):
            said = worker.heard("sums")
            assert said["low"] == (1.0 if rank < 2 else None)
            assert said["high"] == (5.0 if rank >= 2 else None)
        members[3].kill()
        for worker in members[:3]:
            worker.heard("failed")
        worlds.place(members[:3])
        for rank, worker in enumerate(members[:3]):
            said = worker.heard("sums")
            assert said["low"] == (1.0 if rank < 2 else None)
            assert "is not in world 2, which has 3 ranks" in said["high"]
        members[2].kill()
        for worker in members[:2]:
            worker.heard("failed")
        worlds.place(members[:2])
        for worker in members[:2]:
            assert worker.heard("sums")["low"] == 1.0  # it has all ranks, and is still a separate set
        members[1].kill()
        members[0].heard("failed")
        members = [members[0], *worlds.start(3)]
        worlds.place(members)
        for rank, worker in enumerate(members):
            assert worker.heard("sums")["high"] == (5.0 if rank >= 2 else None)


def test_an_optimizer_that_newcomers_lack_is_left_behind(nursery: Nursery) -> None:
    """An optimizer wrapped in one world does not delay the next; a call of it is told what to do."""
    with Worlds(nursery, "late_wrapping") as worlds:
        members = worlds.start(2)
        worlds.place(members)
        for worker in members:
            assert worker.heard("stepped")["old"] is None
        members[0].kill()
        members[1].heard("failed")
        members = [*worlds.start(), members[1]]
        worlds.place(members)
        assert members[0].heard("stepped")["old"] is None
        assert "some rank of world 2 has not wrapped it" in members[1].heard("stepped")["old"]


def test_the_page_of_counters_goes_on_and_says_when_there_is_no_world(nursery: Nursery) -> None:
    """A survivor's counters never jump, and its page never says that the job has failed."""
    with Worlds(nursery, "counting", ENGINE_METRICS="1") as worlds:
        members = worlds.start(2)
        worlds.place(members)
        path = [worker.heard("resources")["page"] for worker in members][1]
        members[1].heard("reduced")
        members[0].kill()
        members[1].heard("failed")
        between = page.read(path)
        assert between is not None
        assert between.state == "resetting"
        worlds.place(members[1:])
        members[1].heard("reduced")
        after = page.read(path)
        assert after is not None
        assert (after.state, after["worlds"], after["rank"], after["size"]) == ("running", 2, 0, 1)
        assert after["submitted"] > between["submitted"] > 0


def test_metrics_are_served_in_world_after_world(nursery: Nursery) -> None:
    """The process that is local rank 0 serves them at one port: the service stays with it, or moves to another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Worlds(nursery, "counting", ENGINE_METRICS_PORT=str(port)) as worlds:
        old, other = worlds.start(2)
        for number in range(1, 4):
            members = [old, other] if number < 3 else [other, old]
            worlds.place(members)
            for worker in members:
                worker.heard("reduced")
            assert all(f'rank="{rank}"' in served(port) for rank in (0, 1))
            assert listens(members[0].pid, port) and not listens(members[1].pid, port)
            other.kill()
            old.heard("failed")
            (other,) = worlds.start()


def served(port: int) -> str:
    """Return the response of a rank's endpoint."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def listens(pid: int, port: int) -> bool:
    """Return whether a process has the socket that listens at a port."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    found = [f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it may have been closed
            if os.readlink(entry) in found:
                return True
    return False


def test_each_world_has_files_of_its_own(nursery: Nursery, tmp_path: Path) -> None:
    """The next world's rank does not overwrite files of the last one's; tools read the newest."""
    places = {"ENGINE_OUTPUT_DIR": str(tmp_path), "ENGINE_TIMELINE": str(tmp_path)}
    with Worlds(nursery, "counting", **places) as worlds:
        members = worlds.start(3)
        for number in (1, 2):
            worlds.place(members)
            for worker in members:
                worker.heard("reduced")
            members.pop(0).kill()
            for worker in members:
                worker.heard("failed")
            record = tmp_path / f"world.{number}" / "rank.1" / "failure.json"
            until(record.exists, "the failure is written down")
            assert json.loads(record.read_text())["rank"] == 0
            assert (tmp_path / f"world.{number}" / "rank.1.trace.json").exists()
    text, _ = make_report(tmp_path)
    assert "rank 0" in text
    assert {path.parent.name for path in files_of([tmp_path])} == {"world.2"}


def test_compiled_programs_follow_the_number_of_ranks(nursery: Nursery) -> None:
    """Shapes of JAX programs depend on the current world's ranks, also in programs compiled in an earlier one."""
    pytest.importorskip("jax")
    with Worlds(nursery, "compiled") as worlds:
        members = worlds.start(2)
        for size in (2, 1):
            worlds.place(members)
            for worker in members:
                told = worker.heard("stepped", seconds=120.0)
                assert told["rows"] == [rank + 1.0 for rank in range(size) for _ in range(2)]
                assert told["mean"] == [(size + 1) / 2] * 3
            members.pop(0).kill()
            for worker in members:
                worker.heard("failed")


def test_a_forked_child_holds_nothing_of_a_dead_world(nursery: Nursery) -> None:
    """A data-loading worker that is forked in the first world keeps none of its files."""
    with Worlds(nursery, "forking") as worlds:
        members = worlds.start(2)
        worlds.place(members)
        for worker in members:
            assert worker.heard("forked")["held"] == []


def test_knobs_go_on_and_a_search_does_not_begin_for_ever(nursery: Nursery) -> None:
    """Knobs that the program has set hold in the next world, even if rank 0 is a newcomer."""
    with Worlds(nursery, "knobs") as worlds:
        members = worlds.start(2)
        worlds.place(members)
        assert {worker.heard("knobs")["threshold"] for worker in members} == {12345}
        members[0].kill()
        members[1].heard("failed")
        members = [*worlds.start(), members[1]]
        worlds.place(members)
        assert {worker.heard("knobs")["threshold"] for worker in members} == {12345}


def test_worlds_that_are_over_before_the_warm_up_start_no_tuner_and_use_up_no_search(nursery: Nursery) -> None:
    """The job resets every 20 steps; the search begins in whichever world lasts."""
    with Worlds(nursery, "tuned", ENGINE_AUTOTUNE="1", ENGINE_AUTOTUNE_WARMUP="1000") as worlds:
        veteran, other = worlds.start(2)
        for _ in range(5):
            worlds.place([veteran, other])
            for _ in (0, 20):
                told = veteran.heard("tuning")
                assert told["searching"] and told["spent"] == 0 and told["children"] == []
            other.kill()
            veteran.heard("failed")
            (other,) = worlds.start()


@pytest.mark.slow
def test_trials_are_those_of_the_job_and_not_of_each_world(nursery: Nursery) -> None:
    """Results hold from the next world's first entry, and no tuner is left behind."""
    most = 8
    settings = {"AUTOTUNE": "1", "AUTOTUNE_STEPS": "3", "AUTOTUNE_TRIALS": str(most), "AUTOTUNE_CACHE": "off"}
    with Worlds(nursery, "tuned", **{f"ENGINE_{name}": value for name, value in settings.items()}) as worlds:
        first, second, third = worlds.start(3)

        def search(tuner: Worker, until_spent: int) -> dict[str, Any]:
            """Return the report after so many trials, or when the search is over."""
            told = tuner.heard("tuning")
            while told["searching"] and told["spent"] < until_spent:
                told = tuner.heard("tuning", seconds=100.0)  # its process has a low priority
            assert told["spent"] <= most and len(told["children"]) <= 1
            return told

        worlds.place([first, second])
        before = search(first, 3)
        assert before["spent"] == 3 and len(before["children"]) == 1
        second.kill()
        first.heard("failed")
        worlds.place([first, third])
        told = first.heard("tuning")
        assert told["spent"] == 3 and told["children"] == []
        assert {name: told["begun"][name] for name in before["best"]} == before["best"]
        spent = search(first, 6)["spent"]
        first.kill()  # only its turned knobs survive, not its trials
        third.heard("failed")
        (fourth,) = worlds.start()
        worlds.place([third, fourth])
        assert 3 <= third.heard("tuning")["spent"] <= spent


def test_a_world_ends_without_a_failure_when_hosts_change(nursery: Nursery) -> None:
    """All leave a healthy world at one step, each at its own time; newcomers and the others form the next."""
    with Worlds(nursery, "leaving") as worlds:
        members = worlds.start(2)
        for size in range(2, 6):
            worlds.place(members)
            for rank, worker in enumerate(members):
                told = worker.heard("returned")["value"]
                assert told == {"total": float(size), "size": str(size), "rank": str(rank)}
            members = [*worlds.start(), *reversed(members)]
