"""Prepared allreduces of tensors of torch: values, memory that moves, shapes that change, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

import engine
from engine.errors import ArgumentError, CollectiveError, MismatchError, UnsupportedTensorError

from ..on_ranks import on_ranks
from ..parallel.arrays import works
from . import toy

pytestmark = on_ranks(*toy.SIZES)


@pytest.mark.parametrize("count", [0, 1, 300_000])
def test_each_call_reduces_the_present_values(count: int, rank: int, size: int) -> None:
    tensor = torch.zeros(count)
    add_up = engine.prepare_allreduce(tensor, engine.Sum)
    for turn in range(5):
        tensor[:] = rank + turn
        assert add_up() is tensor
        assert (tensor == size * (size - 1) / 2 + size * turn).all()


def test_bfloat16(rank: int, size: int) -> None:
    half = torch.full((7,), float(rank), dtype=torch.bfloat16)
    engine.prepare_allreduce(half, engine.Sum)()
    assert half.tolist() == [size * (size - 1) / 2] * 7


def test_a_parameter_that_requires_a_gradient(size: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    engine.prepare_allreduce(parameter, engine.Sum)()
    assert parameter.tolist() == [size] * 4


def test_memory_may_move(size: int) -> None:
    tensor = torch.ones(9)
    add_up = engine.prepare_allreduce(tensor, engine.Sum)
    add_up()
    old = tensor.data
    tensor.data = torch.full((9,), 2.0)
    add_up()
    assert tensor.tolist() == [2 * size] * 9
    assert old.tolist() == [size] * 9


COPIED: dict[str, Callable[[], torch.Tensor]] = {
    "strided": lambda: torch.ones(4, 4).t()[1:3],
    "negated": lambda: torch.ones(1, dtype=torch.complex64).conj().imag,  # one number is contiguous
}


@pytest.mark.parametrize("kind", COPIED)
def test_what_would_be_copied_is_refused(kind: str, size: int) -> None:
    with pytest.raises(UnsupportedTensorError):
        engine.prepare_allreduce(COPIED[kind](), engine.Sum)
    works(size)


def test_another_shape_is_refused_and_told(rank: int, size: int) -> None:
    """The rank whose tensor has changed names it; the others hear of it in place of the operation."""
    tensor = torch.ones(6)
    add_up = engine.prepare_allreduce(tensor, engine.Sum, "changes")
    add_up()
    if rank == size - 1:
        tensor.resize_(5)
    with pytest.raises(ArgumentError if rank == size - 1 else CollectiveError, match="another shape"):
        add_up()
    if rank == size - 1:
        tensor.resize_(6)
    tensor[:] = 1.0
    add_up()
    assert tensor.tolist() == [size] * 6


@on_ranks(2, 3)
def test_another_shape_after_a_failed_call(rank: int, size: int) -> None:
    tensor = torch.ones(4, dtype=torch.float32 if rank else torch.float64)
    add_up = engine.prepare_allreduce(tensor, engine.Sum, "fails, then changes")
    with pytest.raises(MismatchError):
        add_up()
    tensor.resize_(5)
    with pytest.raises((ArgumentError, CollectiveError), match="another shape"):
        add_up()
    works(size)


def make_cycle() -> weakref.ref[torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.ones(2))
    add_up = engine.prepare_allreduce(parameter, engine.Sum, "in a cycle")
    parameter.register_hook(lambda gradient: add_up() and None)
    parameter.add_up = add_up  # type: ignore[attr-defined]
    add_up()
    return weakref.ref(parameter)


def test_a_cycle_through_the_tensor_is_collected() -> None:
    gone = make_cycle()
    gc.collect()
    assert gone() is None
