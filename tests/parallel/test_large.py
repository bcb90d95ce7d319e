"""Tensors of more than 2 GiB; `make large` runs them, on 10 GiB of memory."""

from __future__ import annotations

import os

import pytest

from ..ranks import run_ranks
from . import large_program


@pytest.mark.timeout(900)
@pytest.mark.skipif("LARGE_TENSORS" not in os.environ, reason="needs 10 GiB of memory: make large")
def test_tensors_of_more_than_2_gib() -> None:
    run_ranks(2, large_program.large, timeout=800, env={"ENGINE_STALL_LIMIT": "60"})
