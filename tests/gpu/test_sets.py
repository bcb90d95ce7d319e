"""Process sets of tensors on GPUs, which are stand-ins, among real processes.

Problem 1: NCCL kernels of several sets wait for each other if ranks have them in different orders. The stand-in's
device has room for one of them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ..standins import build
from .jobs import Start, find_hub
from .mutants import changed
from .test_plane import EVERY_CALL

PROGRAMS = "sets_programs"
WITHOUT_REVOKE = 22403  # a version of NCCL that can only abort communicators
HOSTS = ("one host", "several hosts")


@pytest.fixture(params=HOSTS)
def spread(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the variables of ranks that are on one host, or each on a host of its own."""
    if request.param == HOSTS[0]:
        return {}
    return find_hub()


@pytest.mark.sample(1)
def test_numbers(start_ranks: Start, spread: dict[str, str]) -> None:
    """The numbers are those of host memory in the same set."""
    start_ranks(3, "numbers", more=spread).succeeds()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("size", "program"),
    [
        (3, "scatters"),
        (3, "hooks"),
        (3, "ahead"),
        (4, "threads"),
        (4, "late"),
        (3, "removed"),
        (3, "stays"),
    ],
)
def test_program(size: int, program: str, start_ranks: Start) -> None:
    start_ranks(size, program).succeeds()


@pytest.mark.slow
def test_nobody_waits_for_what_the_cuda_thread_has_seen(start_ranks: Start, libraries: Path, tmp_path: Path) -> None:
    start_ranks(3, "seen", more=changed("none", tmp_path / "told", told=libraries)).succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["lazy", "drawn"])
def test_sets_with_common_ranks(policy: str, start_ranks: Start, spread: dict[str, str]) -> None:
    """Problem 1."""
    start_ranks(4, "crossing", "12", more=spread, policy=policy).succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["removed", "hooks", "stays"])
def test_sets_on_several_hosts(program: str, start_ranks: Start) -> None:
    start_ranks(3, program, more=find_hub()).succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", [22807, WITHOUT_REVOKE])
def test_rank_that_is_lost_in_a_set(version: int, start_ranks: Start, tmp_path: Path) -> None:
    """All others name it, even those without a set with it, and go on in a world without it."""
    statuses, texts = start_ranks(3, "lost", "kill", found=build(tmp_path / "nccl", version)).end()
    assert statuses[:2] == [0, 0], "\n".join(texts)


def test_rank_that_stops_in_a_set(start_ranks: Start) -> None:
    job = start_ranks(3, "lost", "stop")
    try:
        for rank in job.ranks[:2]:
            text = "".join(rank.communicate(timeout=60))
            assert rank.returncode == 0, text
    finally:
        for rank in job.ranks:
            rank.kill()
            rank.wait()


@pytest.mark.sample(1)
@pytest.mark.parametrize("call", ["ncclCommInitRankConfig", "ncclBroadcast"])
def test_failure_while_a_set_is_connected_ends_the_world(call: str, start_ranks: Start) -> None:
    """The CUDA thread also serves the world and other sets, which are told only its first failure."""
    for text in start_ranks(3, "fails", call).succeeds():
        assert "refused: RankRaisedError" in text or "refused: DeviceError" in text
        assert f"rank 1: {call}" in text or f"rank 1 failed: {call}" in text


@pytest.mark.slow
def test_rank_that_gives_turns_and_leaves(start_ranks: Start) -> None:
    texts = start_ranks(3, "leaves").succeeds()
    assert "rank 0 leaves, though ranks 1, 2 may still want turns on GPUs" in texts[0]
    assert "refused" not in texts[0]
    for text in texts[1:]:
        assert "refused: RankLeftError: rank 0" in text, text
        assert "wait for their turn" in text


@pytest.mark.slow
def test_rank_that_gives_turns_and_stops(start_ranks: Start) -> None:
    job = start_ranks(3, "stuck")
    try:
        for rank in job.ranks[1:]:
            text = "".join(rank.communicate(timeout=60))
            assert "refused: RankStalledError: rank 0" in text, text
    finally:
        for rank in job.ranks:
            rank.kill()
            rank.wait()


def test_tensor_on_another_gpu(start_ranks: Start) -> None:
    start_ranks(3, "elsewhere", devices=["0,1", "2,3", "4,5"]).succeeds()


@pytest.mark.slow
def test_nccl_that_is_too_old(start_ranks: Start, tmp_path: Path) -> None:
    start_ranks(2, "old", found=build(tmp_path / "old", 22203)).succeeds()


# ---- mutants ---------------------------------------------------------------------------------------------------------

KILLERS: dict[str, tuple[str, ...]] = {
    "sets_take_no_turns": ("crossing", "40"),
    "turns_do_not_wait": ("crossing", "40"),
    "looks_forget_the_set": ("numbers",),
    "sets_are_not_parted": ("removed",),
    "sets_are_ended_one_by_one": ("lost", "kill"),
    "turns_take_of_the_limit": ("late",),
    "sets_are_not_forgotten": ("removed",),
    "passed_is_told_relaxed": ("seen",),
    "passed_is_read_relaxed": ("seen",),
}


@pytest.mark.skipif(not EVERY_CALL, reason="takes minutes: make gpu-faults")
@pytest.mark.parametrize("mutant", KILLERS)
def test_mutant_is_killed(mutant: str, start_ranks: Start, libraries: Path, tmp_path: Path) -> None:
    program = KILLERS[mutant]
    settings = {"found": build(tmp_path / "old", WITHOUT_REVOKE)} if program[0] == "lost" else {}
    size = 4 if program[0] in ("crossing", "late") else 3
    told = libraries if program[0] == "seen" else None
    job = start_ranks(size, *program, more=changed(mutant, tmp_path / "mutant", told=told), **settings)
    try:
        statuses, texts = job.end(40)
    except subprocess.TimeoutExpired:
        return
    assert any(statuses[:2]), texts  # the last rank is lost on purpose
