"""Decisions of `engine.ray` that need no cluster: ranks that share a host, their places, the first failure."""

from __future__ import annotations

import gc
import os
import subprocess
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")

from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from engine.errors import MismatchError, RankDiedError, RankRaisedError, RendezvousError
from engine.host import network
from engine.launch import JobError, LaunchError
from engine.launch.hosts.channel import READ_BYTES
from engine.launch.process.plan import Job
from engine.ray import ElasticRayExecutor, RayExecutor, actor, failures, node_agent
from engine.ray.actor import Standing
from engine.ray.failures import find_culprit
from engine.ray.placement import Request
from engine.ray.rank_assignment import assign_ranks, in_order, join_visible_gpus, layout_of
from engine.ray.settings import set_aside
from engine.ray.slots import ClusterSlots

from ..waiting import until

HERE = "127.0.0.1"


def standing(machine: str, node: str, *gpus: str, network: int = 1, user: int = 0) -> Standing:
    """A process whose address and process ID equal those of all others."""
    return Standing((machine, network, user), node, "10.0.0.1", 7, gpus)


def test_a_host_is_who_can_share_memory_and_no_name_or_address() -> None:
    one = [standing("a", "n1"), standing("a", "n2"), standing("a", "n3")]
    assert layout_of(one).crews == [[0, 1, 2]]
    pods = [standing("a", "n", network=1), standing("a", "n", network=2), standing("a", "n", user=5)]
    assert layout_of(pods).crews == [[0], [1], [2]]


def test_ranks_count_through_hosts_and_nodes_as_they_first_occur() -> None:
    found = [standing("b", "n2"), standing("a", "n1"), standing("b", "n3"), standing("a", "n1"), standing("b", "n2")]
    assert in_order(found) == [0, 4, 2, 1, 3]


def test_two_hosts_are_told_of_the_hub_and_each_rank_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret is passed as an argument, and the port is that of rank 0's process."""
    calls: list[tuple[Any, ...]] = []

    def answers(refs: list[Any], seconds: float, doing: str) -> list[Any]:
        return [("10.0.0.1", 99, "10.0.0.1:4711")] if "meet" in doing else [None] * len(refs)

    monkeypatch.setattr("engine.ray.rank_assignment.collect_answers", answers)
    found = [standing("a", "n", "0"), standing("a", "n", "1"), standing("b", "m", "0")]
    assign_ranks(lambda *call: calls.append(call), found, 1, {"ENGINE_START_TIMEOUT": "9"}, {"WORD": "x"})
    (door, *told) = calls
    assert door[0] == 0 and door[2] is True
    crews = [(crew.host, crew.ranks, crew.sizes) for _, _, _, crew, _, _ in told]
    assert crews == [(0, (0, 1), (2, 1)), (0, (0, 1), (2, 1)), (1, (2,), (2, 1))]
    jobs = [job for _, _, job, _, _, _ in told]
    assert {(job.hub, job.size, job.port) for job in jobs} == {("10.0.0.1:4711", 3, 99)}
    assert len({job.secret for job in jobs}) == 1 and jobs[0].secret not in repr(jobs[0])
    assert [list(job.devices) for job in jobs] == [["0,1"] * 2, ["0,1"] * 2, ["0"]]


def test_each_rank_of_a_host_finds_the_first_of_its_gpus_at_its_local_rank() -> None:
    assert join_visible_gpus([["0", "1"], ["2", "3"]]) == "0,2,1,3"
    assert join_visible_gpus([["4"], ["1", "2"], ["0"]]) == "4,1,0,2"
    assert join_visible_gpus([[], []]) == "" and join_visible_gpus([]) == ""


def test_slots_are_asked_for_as_many_at_once_as_might_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds without an upper bound. Of the slots that wait in vain, one at a time is withdrawn."""
    free: dict[str, float] = {}
    monkeypatch.setattr("ray.available_resources", lambda: free)
    asked = ClusterSlots({"CPU": 2, "GPU": 1}, least=1, most=64, bounded=False)

    def wanted(**left: float) -> int:
        free.clear()
        free.update(left)
        return asked._count_wanted({})[""]

    assert wanted() == 1
    assert wanted(CPU=64, GPU=7) == 7
    asked._slots = [SimpleNamespace(node="n")] * 7  # type: ignore[list-item]
    assert wanted(CPU=50, GPU=0) == 8  # an autoscaler sees the additional one
    assert wanted(CPU=500, GPU=100) == 64
    asked._slots += [SimpleNamespace(node="")] * 4  # type: ignore[list-item]
    assert wanted(CPU=50, GPU=0) == 10


@pytest.mark.parametrize(
    ("node", "runtime_env", "left"),
    [({}, {}, None), ({"OMP_NUM_THREADS": "1"}, {}, "1"), ({}, {"env_vars": {"OMP_NUM_THREADS": "1"}}, "1")],
    ids=["ray", "node", "runtime-env"],
)
def test_threads_that_ray_has_set_for_an_actor_without_cpus_are_not_those_of_workers(
    monkeypatch: pytest.MonkeyPatch, node: dict[str, str], runtime_env: dict[str, Any], left: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(runtime_env=runtime_env))
    raylet = subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], **node})
    try:
        until(Path(f"/proc/{raylet.pid}/environ").read_bytes, "the kernel has made its environment")
        monkeypatch.setattr(os, "getppid", lambda: raylet.pid)
        assert node_agent._build_environment().get("OMP_NUM_THREADS") == left
    finally:
        raylet.kill()
        raylet.wait()


def raised(error: Exception) -> RayTaskError:
    """Exception that Ray raises for a rank's exception."""
    return RayTaskError("run", "Traceback ...", error).as_instanceof_cause()


@pytest.mark.parametrize(
    ("failed", "first"),
    [
        ({0: raised(RankRaisedError("rank 1 failed: x", 1)), 1: raised(ValueError("x"))}, 1),
        ({0: raised(RankDiedError("rank 2 died", 2)), 1: raised(RankDiedError("rank 2 died", 2))}, 2),
        ({0: raised(RendezvousError("rank 2 died before all ranks had come")), 2: raised(ValueError("x"))}, 2),
        ({0: raised(MismatchError("ranks disagree")), 1: raised(MismatchError("ranks disagree"))}, 0),
        ({0: raised(RankRaisedError("rank 1 failed: x", 1)), 1: raised(RankRaisedError("rank 1 failed: x", 1))}, 1),
    ],
    ids=["raised", "not-heard-of", "gathering", "all-alike", "later-call"],
)
def test_who_failed_first_is_who_has_an_error_of_its_own(failed: dict[int, BaseException], first: int) -> None:
    assert find_culprit(failed) == first


def test_a_bundle_for_each_rank_or_for_each_host() -> None:
    each = Request(4, {"CPU": 2, "GPU": 1})
    assert each.bundles == [{"CPU": 2, "GPU": 1}] * 4 and str(each) == "4 ranks, each with 2 CPU and 1 GPU"
    assert Request(4, {"CPU": 2}, hosts=2).bundles == [{"CPU": 4}] * 2


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "ten", "1_0", True, [], 1e300, 1 << 200])
def test_what_is_no_number_of_the_settings_is_refused(value: Any) -> None:
    for name in ("timeout_s", "placement_group_timeout_s"):
        with pytest.raises(ValueError, match=f"^{name} is .*; expected a number of seconds"):
            RayExecutor.create_settings(**{name: value})
    for name in ("timeout_s", "elastic_timeout", "min_num_proc", "max_num_proc", "reset_limit"):
        with pytest.raises(ValueError, match=f"^{name} is "):
            ElasticRayExecutor.create_settings(**{name: value})
    for pair in ((value, 5), (5, value), (5,), (5, 6, 7), value):
        with pytest.raises(ValueError, match=r"^cooldown_range is "):
            ElasticRayExecutor.create_settings(cooldown_range=pair)
        with pytest.raises(ValueError, match=r"^cooldown_range is "):
            RayExecutor(min_workers=1, cooldown_range=pair)
    for whose in ("worker", "slot"):
        with pytest.raises(ValueError, match=f"cpus_per_{whose} is .*expected a whole number from 1"):
            set_aside(value, False, None, whose)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"min_workers": 1, "num_workers": 4}, ValueError, "leave num_workers and num_hosts out"),
        ({"min_workers": 3, "max_workers": 2}, ValueError, "min_num_proc is 3 and max_num_proc 2"),
        ({"num_workers": 2, "reset_limit": 3}, ValueError, "given reset_limit without min_workers"),
        ({"num_workers": 2, "elastic_timeout": 60}, ValueError, "given elastic_timeout without min_workers"),
        ({"num_hosts": 2, "override_discovery": False}, ValueError, "given override_discovery without min_workers"),
        ({}, ValueError, "either num_workers, or num_hosts"),
        ({"num_workers": 2, "num_hosts": 2}, ValueError, "either num_workers, or num_hosts"),
        ({"num_workers": 0}, ValueError, "num_workers is 0; expected a whole number from 1 to 256"),
        ({"num_workers": 2, "gpus_per_worker": 1}, ValueError, "set use_gpu=True"),
        ({"num_workers": 2, "use_gpu": True, "gpus_per_worker": 0.5}, ValueError, "gpus_per_worker is 0.5; expected"),
        (
            {"num_workers": 2, "cpus_per_worker": 0},
            ValueError,
            "cpus_per_worker is 0; expected a whole number from 1 to 1048576",
        ),
        ({"min_workers": 2, "cpus_per_worker": 1.5}, ValueError, "cpus_per_slot is 1.5; expected a whole number"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, float], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        RayExecutor(RayExecutor.create_settings(), **options)  # type: ignore[arg-type]


def test_settings_of_horovod_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    made = RayExecutor.create_settings(timeout_s=5, ssh_str="KEY", placement_group_timeout_s=7, nics={"eth1", "eth0"})
    assert (made.timeout_s, made.placement_group_timeout_s, list(made.nics)) == (5, 7, ["eth0", "eth1"])
    assert "KEY" not in repr(made)


def test_an_error_of_rays_own_classes_that_a_rank_raised_is_given_as_it_is() -> None:
    error = GetTimeoutError("the user's own wait")
    assert failures._make_first_error({0: error}, [standing("a", "n")]) is error
    assert error.__notes__ == ["rank 0 of 1 failed first, on node 10.0.0.1 (n), pid 7"]
    lost = failures._make_first_error({0: ActorDiedError()}, [standing("a", "n")])
    assert isinstance(lost, JobError) and "Its process ended" in str(lost)


def test_a_worker_that_dies_while_places_are_told_is_what_ray_train_starts_again_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = pytest.importorskip("engine.ray.train", reason="needs what ray[train] brings", exc_type=ImportError)
    died = ActorDiedError()

    def answers(cause: Exception | None) -> Any:
        def fail(*_: Any) -> None:
            raise LaunchError("process 1 of 2 failed to tell where it runs") from cause

        return fail

    group = SimpleNamespace(execute_single_async=None, execute_async=lambda function: [])
    for cause, kind in ((died, ActorDiedError), (None, LaunchError), (ValueError("x"), LaunchError)):
        monkeypatch.setattr(train, "collect_answers", answers(cause))
        with pytest.raises(kind):
            train.EngineBackend().on_start(group, train.EngineConfig())


def test_the_socket_that_the_engine_takes_over_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the object would close its descriptor, whose number may belong to another file by then."""
    monkeypatch.setattr(actor, "_door", network.listen("127.0.0.1", 0, 4))
    with patch.dict(os.environ):
        actor.take_place(Job(1, "test", "secret", 1, Path(), {}), None, 0, {})
        descriptor = int(os.environ["ENGINE_HUB_FD"])
    gc.collect()
    assert actor._door is None
    os.fstat(descriptor)  # it is still open
    os.close(descriptor)


def test_what_a_rank_says_in_an_error_controls_no_terminal() -> None:
    place = standing("a", "n\x1b[2J")
    error = GetTimeoutError("the user's own wait")
    failures._make_first_error({0: error}, [place])
    followed = failures._make_first_error({0: RankRaisedError("rank 1 failed: \x1b]0;x\x07", 1)}, [place, place])
    for text in (*error.__notes__, str(followed), str(LaunchError("process 0 failed: \x1b[2J"))):
        assert all(each.isprintable() for line in text.split("\n") for each in line), text


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        ((b"said", b"", 3), "ended (exit code 3)"),
        (None, "was given up"),
        ((b"", b""), "was given up"),
        (("text", b"", None), "was given up"),
        ((b"", b"", "0"), "was given up"),
        ((b"x" * (READ_BYTES + 1), b"", None), "was given up"),
        (RayError(""), "is gone: RayError"),
        (RayError("its node\nwas lost"), "is gone: RayError: its node"),
    ],
)
def test_an_actor_that_answers_what_none_does_is_the_end_of_its_agent(
    answer: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(_: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(node_agent, "ray", SimpleNamespace(is_initialized=lambda: True, get=get))
    agent = node_agent.RayAgent(0, "n@10.0.0.1", "n")
    agent._actor = SimpleNamespace(read=SimpleNamespace(remote=lambda: None))
    pipes = [os.pipe() for _ in range(3)]
    agent._relay_from_agent(*(writing for _, writing in pipes))
    written = []
    for reading, _ in pipes:
        with open(reading, "rb") as pipe:
            written.append(pipe.read())  # returns at once if the other end is closed
    assert written == [b"said" if "ended" in how else b"", b"", b""]
    assert agent.how_it_ended().startswith(how)


def test_rank_0_listens_on_the_address_that_is_chosen_or_on_that_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for node, nics, bound in (
        ("127.0.0.1", "", "127.0.0.1"),
        ("203.0.113.9", "", "::"),
        ("127.0.0.1", "lo", "127.0.0.1"),
    ):
        monkeypatch.setattr("ray.util.get_node_ip_address", lambda node=node: node)
        address, _, hub = actor.open_door(True, nics)
        with closing(actor._door) as door:
            monkeypatch.setattr(actor, "_door", None)
            host, port, *_ = door.getsockname()
        assert host.replace("0.0.0.0", "::") == bound
        assert hub == f"{address}:{port}"
