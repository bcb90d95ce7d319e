"""float32 and float64 that travel as float16 and bfloat16, and compressors of one's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..ranks import run_ranks
from . import compression_program

LIMIT = {"ENGINE_STALL_LIMIT": "20"}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "program",
    [
        compression_program.reduce_compressed,
        compression_program.other_collectives,
        compression_program.special_values,
    ],
)
def test_compression(program: Callable[[], int], size: int) -> None:
    run_ranks(size, program, env=LIMIT)
