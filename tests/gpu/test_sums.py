"""Sums on GPUs, which are stand-ins: their bits, and which tensors travel together."""

from __future__ import annotations

import pytest

from .jobs import Start

PROGRAMS = "sums_programs"


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ordered_sums_have_the_bits_of_host_memory(size: int, start_ranks: Start) -> None:
    """All dtypes and reductions have them, whatever travels together."""
    start_ranks(size, "ordered").succeeds(120)


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_travel_in_the_same_batches(size: int, start_ranks: Start) -> None:
    start_ranks(size, "frozen").succeeds()


def test_differing_setting_is_told(start_ranks: Start) -> None:
    for text in start_ranks(3, "differs").succeeds():
        assert "rank 1 has the setting device_sums=ordered, rank 0 has device_sums=nccl" in text
        assert "ENGINE_DEVICE_SUMS" in text and "rank 2 has" not in text
