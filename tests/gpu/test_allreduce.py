"""Allreduce of tensors on GPUs, which are stand-ins, among real processes.

The stand-ins run enqueued work in any order that CUDA allows, and report unordered accesses. Problems have numbers:
3 events before NCCL has enqueued, 5 and 6 marks, 7 contexts, 9 tables, 10 tensors that are dropped early, 12 the slab,
14 streams, 15 capture, 26 sizes.
"""

from __future__ import annotations

import re

import pytest

from ..standins import POLICIES
from ..waiting import until
from .jobs import Start, find_hub

PROGRAMS = "allreduce_programs"
SIZES = [(1, "eager"), (3, "drawn"), *((2, policy) for policy in POLICIES)]  # ranks, and the stand-ins' policy


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "policy"), SIZES)
def test_numbers(size: int, policy: str, start_ranks: Start) -> None:
    """All dtypes and reductions give the numbers of host memory."""
    start_ranks(size, "numbers", policy=policy).succeeds()


@pytest.mark.sample(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", ["factors", "fused", "many", "forgotten", "streams", "hooks", "moved"])
def test_program(program: str, policy: str, start_ranks: Start) -> None:
    """Problems 3, 5, 6, 10, 14 and 26; each program describes its own."""
    start_ranks(2, program, policy=policy).succeeds()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "policy"), SIZES[1:])
def test_pieces(size: int, policy: str, start_ranks: Start) -> None:
    """Problems 9, 12 and 26."""
    start_ranks(size, "pieces", policy=policy).succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["numbers", "fused", "pieces"])
def test_ranks_on_several_hosts(program: str, start_ranks: Start) -> None:
    """The schedule that other hosts get is checked before it runs."""
    start_ranks(3, program, more=find_hub()).succeeds()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_joins(size: int, start_ranks: Start) -> None:
    start_ranks(size, "joins", linger=5).succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "policy"), SIZES)
def test_broadcasts(size: int, policy: str, start_ranks: Start) -> None:
    start_ranks(size, "broadcasts", policy=policy).succeeds()


def test_refusals(start_ranks: Start) -> None:
    """Problems 14, 15 and 23."""
    start_ranks(2, "refusals").succeeds()


def test_another_threads_capture_goes_on(start_ranks: Start) -> None:
    """Problem 15."""
    start_ranks(2, "captures").succeeds()


def test_gpu_on_one_rank_alone_is_told(start_ranks: Start) -> None:
    for text in start_ranks(2, "elsewhere").succeeds():
        assert "refused: RankStalledError" in text
        assert "rank 0 waits for 'engine.gpu', which rank 1 has not submitted" in text


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["kill", "stop", "leave"])
def test_rank_that_is_lost(how: str, start_ranks: Start) -> None:
    """Problem 19: the others name it, their devices become idle, and they go on in a world without it."""
    job = start_ranks(3, "lost", how)
    if how == "stop":
        until(lambda: all(rank.poll() is not None for rank in job.ranks[:2]), "the others have ended", 60)
        job.ranks[2].kill()
    statuses, texts = job.end()
    assert statuses[:2] == [0, 0], "\n".join(texts)


@pytest.mark.sample(1)
@pytest.mark.parametrize("call", ["cuLaunchKernel", "ncclAllReduce", "cuMemcpyHtoDAsync", "cuStreamWaitEvent"])
def test_call_that_fails_is_told_on_all_ranks(call: str, start_ranks: Start) -> None:
    """Problem 17."""
    for text in start_ranks(2, "fails", call).succeeds():
        assert "refused: RankRaisedError" in text
        assert call in text


@pytest.mark.slow
def test_call_that_hangs_is_left_alone(start_ranks: Start) -> None:
    """Problem 21: the ranks' waits end, and so do the processes."""
    for text in start_ranks(2, "hangs").succeeds():
        assert "rank 1 stalled: ncclAllReduce has not returned for 2 s" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("crowd", "its GPU has not begun 'second' for {} s: what the program computes before it goes on, or hangs"),
        ("compute", "its GPU has not begun 'second' for {} s: what the program computes before it goes on, or hangs"),
        (
            "kernels",
            "its GPU has not ended 'second' for {} s: NCCL waits there for another rank's GPU, or for the network",
        ),
    ],
)
def test_work_that_does_not_end_is_told(what: str, said: str, start_ranks: Start) -> None:
    """The rank is named whose GPU does not get there, if there is one; its work is enqueued, and no call hangs."""
    for text in start_ranks(2, "endless", what).succeeds():
        pattern = re.escape(said).replace(r"\{\}", r"[\d.]+")
        if what == "crowd":  # their order depends on the times at which ranks submitted them
            pattern = pattern.replace("'second'", r"'(second|another \d+)'")
        assert re.search(
            f"refused: RankStalledError: {'rank [01]' if what == 'kernels' else 'rank 1'} stalled: {pattern}", text
        )
