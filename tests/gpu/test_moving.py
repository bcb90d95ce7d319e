"""Allgather, alltoall and reducescatter of tensors on GPUs, which are the stand-ins, among real processes.

Everything is judged by the same operation on tensors in the host's memory. Problems have numbers, as in test_allreduce.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ..standins import POLICIES
from .jobs import Job
from .test_allreduce import SIZES

Start = Callable[..., Job]


@pytest.fixture
def ranks(libraries: Path, registered: Path, tmp_path: Path) -> Start:
    """Starts a program of moving_programs.py on ranks."""

    def begin(size: int, program: str, *rest: str, **settings: object) -> Job:
        told = (program, str(registered), *rest)
        return Job(libraries, tmp_path, size, *told, module="moving_programs", **{"one_thread": 1, **settings})

    return begin


@pytest.mark.parametrize(("size", "policy"), SIZES)
def test_numbers(size: int, policy: str, ranks: Start) -> None:
    """Problems 3 and 26: they are those of host memory."""
    ranks(size, "numbers", policy=policy).succeeds()


@pytest.mark.parametrize("policy", POLICIES)
def test_many_at_once(policy: str, ranks: Start) -> None:
    """Problems 5, 6 and 10: drawn operations, waited for in any order, or not at all."""
    ranks(2, "mixed", policy=policy).succeeds()


@pytest.mark.parametrize("program", ["sparse", "slabs", "forgotten", "alone", "refusals"])
def test_program(program: str, ranks: Start) -> None:
    """Problems 9, 10, 12 and 26: the programs say what each is."""
    ranks(2, program).succeeds()


@pytest.mark.parametrize("size", [2, 3])
def test_joins(size: int, ranks: Start) -> None:
    """Nothing comes from a rank that has joined, and what goes there is dropped."""
    ranks(size, "joins", linger=5).succeeds()


def test_ranks_on_several_hosts(ranks: Start) -> None:
    """The schedule that the others are sent is checked before it is run, and numbers are told between hosts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        hub = f"127.0.0.1:{free.getsockname()[1]}"
    ranks(3, "numbers", more={"ENGINE_HUB": hub, "ENGINE_SECRET": "s"}).succeeds()


@pytest.mark.parametrize("how", ["kill", "leave"])
def test_rank_that_is_lost(how: str, ranks: Start) -> None:
    """Problem 19: the others name it, and go on in a world without it."""
    statuses, texts = ranks(3, "lost", how).end()
    assert statuses[:2] == [0, 0], "\n".join(texts)


def test_framework_without_memory_is_told_on_all_ranks(ranks: Start) -> None:
    for text in ranks(2, "noroom").succeeds():
        assert "refused: RankRaisedError: rank 1 failed: no room on its GPU for a result: MemoryError: the GPU is full" in text


@pytest.mark.parametrize("call", ["ncclAllGather", "ncclBroadcast", "ncclSend", "ncclReduceScatter"])
def test_call_that_fails_is_told_on_all_ranks(call: str, ranks: Start) -> None:
    """Problem 17."""
    for text in ranks(2, "fails", call).succeeds():
        assert "refused: RankRaisedError" in text
        assert call in text
