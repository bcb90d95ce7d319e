"""Errors that are not fatal say what, where and who, on the ranks they concern, and the engine works after them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..ranks import run_ranks
from . import error_program

LIMIT = {"ENGINE_STALL_LIMIT": "20"}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("program", [error_program.wrong_calls, error_program.lifetime, error_program.objects])
def test_errors_and_objects(program: Callable[[], int], size: int) -> None:
    run_ranks(size, program, env=LIMIT)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_mismatches(size: int) -> None:
    run_ranks(size, error_program.mismatches, env=LIMIT)
