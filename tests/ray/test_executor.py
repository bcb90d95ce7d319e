"""`engine.ray.RayExecutor` on three nodes: calls, places, failures, and leftovers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")

import ray
from ray.exceptions import RayTaskError, UnserializableException
from ray.util import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.errors import RankRaisedError, RendezvousError
from engine.launch import JobError, LaunchError
from engine.ray import RayExecutor, executor, failures

from ..waiting import until
from . import programs

pytestmark = pytest.mark.usefixtures("cluster")

SOON = 60.0  # seconds within which a failure is reported, on a busy machine


@pytest.fixture
def start() -> Iterator[Callable[..., RayExecutor]]:
    """Start an executor that is shut down at the end of the test."""
    made: list[RayExecutor] = []

    def start(executable: Any = None, seconds: float = 30, **options: Any) -> RayExecutor:
        settings = RayExecutor.create_settings(timeout_s=seconds, placement_group_timeout_s=60)
        made.append(RayExecutor(settings, **options))
        made[-1].start(executable)
        return made[-1]

    yield start
    for each in made:
        each.shutdown()
    nothing_is_left()


def nothing_is_left() -> None:
    """Check that all CPUs and GPUs of the cluster are free, and no placement group exists."""
    whole = {"CPU": 4.0, "GPU": 2.0}
    until(lambda: whole.items() <= ray.available_resources().items(), "all resources are free", pause=0.05)
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    assert groups == []


def gone(pid: int) -> bool:
    """Return whether a process does not exist, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_ranks_on_three_nodes_of_one_machine_share_memory_and_answer_by_rank(
    start: Callable[..., RayExecutor],
) -> None:
    pickled = []

    class Half:
        def __reduce__(self) -> Any:
            pickled.append(self)
            return float, (0.5,)

    ranks = start(num_workers=4)
    first = ranks.run(programs.add, (Half(),), {"scale": 2.0})
    assert len(pickled) == 1  # not once for each rank
    assert [each["place"] for each in first] == [(rank, 4, rank, 4) for rank in range(4)]
    assert all(each["total"] == [16.0] * 3 and each["main"] for each in first), first
    again = ray.get(ranks.run_remote(programs.add))  # the same world, in the same processes
    assert [each["pid"] for each in again] == [each["pid"] for each in first]
    assert ranks.execute(lambda thing: thing) == [None] * 4
    with pytest.raises(LaunchError, match=r"started already; call shutdown\(\) first"):
        ranks.start()
    ranks.shutdown()
    until(lambda: all(gone(each["pid"]) for each in first), "the ranks have ended", SOON)
    nothing_is_left()
    with pytest.raises(LaunchError, match=r"call start\(\) first"):
        ranks.run(programs.add)


def test_objects_live_on_ranks_and_variables_reach_them() -> None:
    ranks = RayExecutor(num_hosts=2)
    try:
        ranks.start(programs.Counter, (10,), {"step": 5}, {"ENGINE_CYCLE_TIME_MS": "3", "WORD": "x"})
        assert ranks.execute(lambda counter: counter.count()) == [(0, 15), (1, 15)]
        assert ranks.execute_single(lambda counter: counter.count()) == (0, 20)
        assert ranks.execute(lambda counter: counter.count()) == [(0, 25), (1, 20)]
        names = ("ENGINE_CYCLE_TIME_MS", "WORD", "WORLD_SIZE", "ENGINE_START_TIMEOUT", "ENGINE_HUB")
        assert ranks.run(programs.variables, names) == [["3", "x", "2", "30.0", None]] * 2
        assert len({standing.node for standing in ranks._standings}) == 2
        secrets = ranks.run(programs.variables, ("ENGINE_SECRET",))
        assert secrets[0] == secrets[1] and len(str(secrets[0][0])) == 64
    finally:
        ranks.shutdown()


def test_an_exception_in_rank_1_is_what_the_user_sees_and_a_new_start_makes_a_new_world(
    start: Callable[..., RayExecutor],
) -> None:
    ranks = start(num_workers=2)
    with pytest.raises(ValueError, match="bad batch") as caught:
        ranks.run(programs.raise_in, (1,))
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert text.count("ValueError: bad batch") == 1, text
    assert "rank 1 of 2 failed first, on node" in text and "rank 0 failed because of it" in text
    assert "raise_in" in text  # the traceback
    with pytest.raises(RankRaisedError, match="rank 1 failed: ValueError: bad batch") as again:
        ranks.run(programs.add)
    assert "shutdown() and start()" in str(again.value)
    with pytest.raises(RankRaisedError, match="rank 1 failed: ValueError: bad batch"):
        ray.get(ranks.run_remote(programs.add))
    ranks.shutdown()
    ranks.start()
    assert [each["total"] for each in ranks.run(programs.add)] == [[1.0] * 3] * 2


@pytest.mark.parametrize("when", ["in a collective", "before init", "between two calls"])
def test_a_killed_rank_ends_the_run_within_seconds_and_is_named(start: Callable[..., RayExecutor], when: str) -> None:
    ranks = start(num_workers=2)
    call: tuple[Any, ...] = (programs.die_in, (1, when == "before init"))
    if when == "between two calls":
        call = (programs.add,)
        ranks.run(*call)
        os.kill(ranks._standings[1].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(JobError) as caught:
        ranks.run(*call)
    assert time.monotonic() - began < SOON
    assert caught.value.rank == 1
    killed = ranks._standings[1]
    said = f"rank 1 of 2 failed first, on node {killed.address} ({killed.node[:8]}), pid {killed.pid}"
    assert str(caught.value).startswith(said), caught.value
    assert "its worker process has died" in str(caught.value)


@pytest.mark.parametrize(("way", "kind"), [("to", RayTaskError), ("from", UnserializableException)])
def test_an_exception_that_cannot_be_pickled_is_told_with_its_traceback(
    start: Callable[..., RayExecutor], way: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=r"Strange: of a kind") as caught:
        start(num_workers=2).run(programs.raise_something_strange, (1, way))
    assert "raise_something_strange" in str(caught.value)
    assert caught.value.__notes__[0].startswith("rank 1 of 2 failed first, on node")


def test_the_error_of_the_rank_that_the_others_name_is_waited_for() -> None:
    """Ray delivers that error a second later."""
    task = ray.remote(num_cpus=0)(programs.raise_late)
    refs = [task.remote(RankRaisedError("rank 1 failed: x", 1), 0), task.remote(ValueError("x"), 1)]
    with pytest.raises(ValueError, match="x") as caught:
        failures.collect_results(refs, ["node a", "node b"])  # type: ignore[list-item]
    assert caught.value.__notes__ == ["rank 1 of 2 failed first, on node b; rank 0 failed because of it"]


def test_a_rank_that_computes_holds_up_neither_the_error_nor_the_shutdown(
    start: Callable[..., RayExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "LEAVING", 0.5)
    ranks = start(num_workers=2)
    with pytest.raises(ValueError, match="bad batch") as caught:
        ranks.run(programs.raise_while_others_compute)
    assert "because of it" not in "".join(caught.value.__notes__)
    pids = [standing.pid for standing in ranks._standings]
    began = time.monotonic()
    ranks.shutdown()
    until(lambda: all(map(gone, pids)), "both have ended", SOON)
    assert time.monotonic() - began < SOON


def test_a_rank_that_does_not_come_is_named_after_the_time_of_the_settings(start: Callable[..., RayExecutor]) -> None:
    ranks = start(seconds=1, num_workers=2)
    with pytest.raises(RendezvousError, match="rank 1 did not come within 1 s"):
        ranks.run(programs.stay_away_from, (1,))


def test_a_start_that_fails_says_why_and_leaves_nothing(start: Callable[..., RayExecutor]) -> None:
    with pytest.raises(
        JobError, match=r"rank [01] of 2 failed first, on node .*(; rank [01] failed, too)?\. Its process ended"
    ):
        start(programs.Fatal, num_workers=2)
    nothing_is_left()
    settings = RayExecutor.create_settings(placement_group_timeout_s=0.5)
    with pytest.raises(TimeoutError, match="for 9 ranks"):  # the error and arguments of Horovod's executor
        RayExecutor(settings, num_workers=9, num_hosts=None, num_workers_per_host=None).start()
    with pytest.raises(LaunchError) as caught:
        RayExecutor(settings, num_hosts=2, num_workers_per_host=2).start()
    for part in (
        "no room within 0.5 s (placement_group_timeout_s) for 4 ranks on 2 nodes, each with 2 CPU free",
        "The cluster has 3 nodes: 1 with 2 CPU, 2 with 1 CPU; free in all: 4 CPU",
    ):
        assert part in str(caught.value)
    nothing_is_left()


def test_ranks_of_a_host_see_the_gpus_of_all_in_the_order_of_ranks(start: Callable[..., RayExecutor]) -> None:
    ranks = start(num_workers=2, use_gpu=True)
    assert ranks.run(programs.variables, ("CUDA_VISIBLE_DEVICES",)) in ([["0,1"]] * 2, [["1,0"]] * 2)
    own = [standing.gpus for standing in ranks._standings]
    seen = str(ranks.run(programs.variables, ("CUDA_VISIBLE_DEVICES",))[0][0]).split(",")
    assert own == [(seen[0],), (seen[1],)]


def test_a_caller_in_a_placement_group_has_its_ranks_there_and_keeps_it() -> None:
    def call() -> tuple[list[Any], str]:
        ranks = RayExecutor(num_workers=2)
        ranks.start()
        try:
            return ranks.run(programs.add), ray.util.get_current_placement_group().id.hex()
        finally:
            ranks.shutdown()

    group = placement_group([{"CPU": 1}, {"CPU": 1}])
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    try:
        found, where = ray.get(ray.remote(num_cpus=0)(call).options(scheduling_strategy=inside).remote(), timeout=60)
        assert [each["total"] for each in found] == [[1.0] * 3] * 2
        assert where == group.id.hex()
        alive = [each for each in placement_group_table().values() if each["state"] != "REMOVED"]
        assert [each["placement_group_id"] for each in alive] == [where]
    finally:
        ray.util.remove_placement_group(group)
    nothing_is_left()
