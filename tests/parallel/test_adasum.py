"""Adasum: the formula of the paper, over any power of two of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..ranks import run_ranks
from . import adasum_program
from .marks import needs_torch

LIMIT = {"ENGINE_STALL_LIMIT": "20"}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_against_the_formula(size: int) -> None:
    run_ranks(size, adasum_program.against_the_formula, ("float16", "float32", "float64"), env=LIMIT)


@needs_torch
def test_bfloat16_against_the_formula() -> None:
    run_ranks(2, adasum_program.against_the_formula, ("bfloat16",), env=LIMIT)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("program", [adasum_program.known_results, adasum_program.no_knob_changes_a_bit])
def test_adasum(program: Callable[[], int], size: int) -> None:
    run_ranks(size, program, env=LIMIT)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_have_joined(size: int) -> None:
    run_ranks(size, adasum_program.ranks_that_have_joined, env=LIMIT)


def test_eight_ranks() -> None:
    run_ranks(8, adasum_program.many_ranks, env=LIMIT)


def test_three_ranks_are_refused() -> None:
    run_ranks(3, adasum_program.wrong_number_of_ranks, env=LIMIT)
