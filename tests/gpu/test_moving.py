"""Allgather, alltoall and reducescatter of tensors on GPUs, which are stand-ins, among real processes.

Everything is compared with the same operation on tensors in host memory. Problems have the numbers of
test_allreduce.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..standins import POLICIES
from .jobs import Start, find_hub
from .mutants import changed
from .test_allreduce import SIZES

PROGRAMS = "moving_programs"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "policy"), SIZES)
def test_numbers(size: int, policy: str, start_ranks: Start) -> None:
    """Problems 3 and 26: the numbers are those of host memory."""
    start_ranks(size, "numbers", policy=policy).succeeds()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_many_at_once(policy: str, start_ranks: Start) -> None:
    """Problems 5, 6 and 10: random operations, waited for in any order, or not at all."""
    start_ranks(2, "mixed", policy=policy).succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("programs", ["sparse+alone+captures+refusals", "forgotten"])
def test_programs(programs: str, start_ranks: Start) -> None:
    """Problem 10 among others; each program describes its own."""
    start_ranks(2, programs).succeeds()


@pytest.mark.slow
def test_pieces(start_ranks: Start, tmp_path: Path) -> None:
    """Problems 9, 12 and 26: data larger than the slab, and than one call or one group of calls can take."""
    start_ranks(3, "slabs", more=changed("calls_of_4_kib_in_threes", tmp_path / "small")).succeeds()


@pytest.mark.slow
def test_joins(start_ranks: Start) -> None:
    """A joined rank sends nothing, and what is sent to it is dropped."""
    start_ranks(3, "joins", linger=5).succeeds()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["numbers", "joins"])
def test_ranks_on_several_hosts(program: str, start_ranks: Start) -> None:
    """The schedule that other hosts get is checked before it runs, and hosts exchange row numbers."""
    start_ranks(3, program, more=find_hub()).succeeds()


@pytest.mark.slow
def test_rank_that_is_lost(start_ranks: Start) -> None:
    """Problem 19: the others name it, and go on in a world without it."""
    statuses, texts = start_ranks(3, "lost").end()
    assert statuses[:2] == [0, 0], "\n".join(texts)


def test_framework_without_memory_is_told_on_all_ranks(start_ranks: Start) -> None:
    for text in start_ranks(2, "noroom").succeeds():
        assert (
            "refused: RankRaisedError: rank 1 failed: no room on its GPU for a result: MemoryError: the GPU is full"
            in text
        )


def test_failure_while_the_framework_makes_room_is_told(start_ranks: Start) -> None:
    """Problem 17."""
    start_ranks(2, "slowroom").succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("call", ["ncclAllGather", "ncclReduceScatter"])
def test_call_that_fails_is_told_on_all_ranks(call: str, start_ranks: Start) -> None:
    """Problem 17."""
    for text in start_ranks(2, "fails", call).succeeds():
        assert "refused: RankRaisedError" in text
        assert call in text
