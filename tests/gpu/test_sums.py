"""Sums on GPUs, which are stand-ins: their bits, and which tensors travel together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .jobs import Job
from .mutants import changed
from .test_plane import EVERY_CALL

Start = Callable[..., Job]


@pytest.fixture
def ranks(libraries: Path, registered: Path, tmp_path: Path) -> Start:
    """Function that starts a program of sums_programs.py on ranks."""

    def begin(size: int, program: str, *rest: str, **settings: object) -> Job:
        told = (program, str(registered), *rest)
        return Job(libraries, tmp_path, size, *told, module="sums_programs", **{"one_thread": 1, **settings})

    return begin


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ordered_sums_have_the_bits_of_host_memory(size: int, ranks: Start) -> None:
    """All dtypes and reductions have them, whatever travels together."""
    ranks(size, "ordered").succeeds(120)


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_travel_in_the_same_batches(size: int, ranks: Start) -> None:
    ranks(size, "frozen").succeeds()


def test_differing_setting_is_told(ranks: Start) -> None:
    for text in ranks(3, "differs").succeeds():
        assert "rank 1 has the setting device_sums=ordered, rank 0 has device_sums=nccl" in text
        assert "ENGINE_DEVICE_SUMS" in text and "rank 2 has" not in text


# ---- mutants ---------------------------------------------------------------------------------------------------------

KILLERS: dict[str, tuple[str, ...]] = {
    "setting_not_looked_at": ("ordered",),
}


@pytest.mark.skipif(not EVERY_CALL, reason="takes minutes: make gpu-faults")
@pytest.mark.parametrize("mutant", KILLERS)
def test_mutant_is_killed(mutant: str, ranks: Start, tmp_path: Path) -> None:
    statuses, texts = ranks(3, *KILLERS[mutant], more=changed(mutant, tmp_path / "mutant"), linger=1).end(60)
    assert any(statuses), texts
