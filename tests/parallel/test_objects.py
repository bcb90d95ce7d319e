"""Objects from every root and of every rank; parameters that differ are named."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import EngineError, MismatchError

from ..on_ranks import on_ranks, per_size, spare
from .arrays import refused

pytestmark = on_ranks(1, 2, 3, spare(4))

THINGS: list[Any] = [None, 0, "größe", {"a": [1, (2, 3)]}, b"", b"x" * 3_000_000, np.arange(7), {1, 2}, 1e300]
MODEL = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.zeros(3), "steps": 4, "kind": "adam"}


class Unwilling:
    """Object that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("no")


@pytest.mark.parametrize("number", range(len(THINGS)))
@per_size("root", range)
def test_broadcast(root: int, number: int, rank: int) -> None:
    thing = THINGS[number]
    mine = thing if rank == root else Unwilling()
    got = engine.broadcast_object(mine, root, name=None if number % 2 else f"object {number}")
    assert pickle.dumps(got) == pickle.dumps(thing)
    assert (got is mine) == (rank == root)


@per_size("root", range)
def test_a_rank_that_cannot_pickle(root: int, rank: int) -> None:
    text = f"rank {root} cannot pickle"
    refused(lambda: engine.broadcast_object(Unwilling(), root), text, EngineError)
    mine = Unwilling() if rank == root else rank
    refused(lambda: engine.allgather_object(mine), text, EngineError)


def test_a_root_that_is_no_rank(rank: int, size: int) -> None:
    refused(lambda: engine.broadcast_object(1, size), f"root rank {size}", ValueError)


def test_gathered(rank: int, size: int) -> None:
    for name in (None, "gathered"):
        got = engine.allgather_object({"rank": rank, "data": "x" * rank * 100_000}, name)
        assert [each["rank"] for each in got] == list(range(size))
        assert [len(each["data"]) for each in got] == [other * 100_000 for other in range(size)]


def test_equal_parameters(rank: int) -> None:
    engine.check_consistency(MODEL)
    engine.check_consistency(list(MODEL.items()), "named")
    engine.check_consistency([MODEL["w"], MODEL["b"]])
    engine.check_consistency({})
    engine.check_consistency({"transposed": np.asfortranarray(MODEL["w"])} if rank else {"transposed": MODEL["w"]})


CHANGES: dict[str, tuple[Any, str]] = {
    "value": ({"w": MODEL["w"] + np.eye(3, 4, dtype=np.float32) * 1e-6}, "'w': {odd} other values than {base}"),
    "zero's sign": ({"b": -MODEL["b"]}, "'b': {odd} other values than {base}"),
    "shape": ({"w": MODEL["w"].T}, "'w': {odd} float32[4, 3], {base} has float32[3, 4]"),
    "dtype": ({"b": np.zeros(3, np.float32)}, "'b': {odd} float32[3], {base} has float64[3]"),
    "number": ({"steps": 5}, "'steps': {odd} int 5, {base} has int 4"),
    "text": ({"kind": "sgd"}, "'kind': {odd} str 'sgd', {base} has str 'adam'"),
    "more": ({"extra": np.zeros(1)}, "'extra': {odd} float64[1], {base} has no such entry"),
}


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("title", CHANGES)
def test_parameters_of_one_rank_that_differ(title: str, rank: int, size: int) -> None:
    change, expected = CHANGES[title]
    mine = {**MODEL, **change} if rank == size - 1 else MODEL
    text = refused(lambda: engine.check_consistency(mine), "differ", MismatchError)
    assert expected.format(odd=f"rank {size - 1} has", base="rank 0") in text, text
    untouched = [key for key in MODEL if key not in change]
    assert not any(f"'{key}'" in text for key in untouched), text


@on_ranks(2, 3, 4)
def test_parameters_that_one_rank_lacks(rank: int, size: int) -> None:
    odd = size - 1
    mine = {key: value for key, value in MODEL.items() if key != "b" or rank != odd}
    refused(lambda: engine.check_consistency(mine), f"'b': rank {odd} has no such entry", MismatchError)


@on_ranks(2, 3, 4)
def test_many_parameters_that_differ(rank: int) -> None:
    mine = {f"p{k}": np.full(2, rank if k % 2 else 0) for k in range(100)}
    text = refused(lambda: engine.check_consistency(mine), "'p1'", MismatchError)
    assert "and 30 more" in text or "more" in text
    assert "'p0'" not in text and len(text.splitlines()) < 30


@on_ranks(3, 4)
def test_the_majority_is_right(rank: int) -> None:
    mine = {"w": np.full(2, 1 if rank == 0 else 2)}
    refused(lambda: engine.check_consistency(mine), "'w': rank 0 has other values than rank 1", MismatchError)


def test_what_is_no_parameter() -> None:
    refused(lambda: engine.check_consistency({"a": object()}), "'a'")
    refused(lambda: engine.check_consistency(3), "", TypeError)
