"""Tensors that travel as the knob `compression` says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..ranks import run_ranks
from . import tuned_program

LIMIT = {"ENGINE_STALL_LIMIT": "20"}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "program",
    [
        tuned_program.every_value,
        tuned_program.switched_in_flight,
        tuned_program.other_collectives,
        tuned_program.bytes_and_batches,
        tuned_program.disagreement,
    ],
)
def test_tuned_compression(program: Callable[[], int], size: int) -> None:
    run_ranks(size, program, env=LIMIT)
