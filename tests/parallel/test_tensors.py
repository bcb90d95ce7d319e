"""Any size, shape, layout and library of tensors; and no setting changes a bit of a result."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..ranks import run_ranks
from . import tensor_program
from .marks import needs_torch

SIZES = [1, 2, 3, 4]
LIMIT = {"ENGINE_STALL_LIMIT": "20"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("program", [tensor_program.sizes, tensor_program.large, tensor_program.numpy_layouts])
def test_tensors(program: Callable[[], int], size: int) -> None:
    run_ranks(size, program, env=LIMIT)


@needs_torch
@pytest.mark.parametrize("size", SIZES)
def test_torch_and_dlpack(size: int) -> None:
    run_ranks(size, tensor_program.dlpack_and_torch, env=LIMIT)


@pytest.mark.parametrize("size", [2, 3])
def test_no_setting_changes_a_bit(size: int) -> None:
    values = run_ranks(size, tensor_program.equal_bits, env=LIMIT).values
    assert values == [values[0]] * size
    assert len(values[0]) > 12 and len(set(values[0].values())) == 1, values[0]
