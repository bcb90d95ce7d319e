"""Disagreements of ranks are reported on every rank with what each sent, and the engine works afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import MismatchError
from engine.text import readable

from ..on_ranks import on_ranks
from .arrays import refused, works

pytestmark = on_ranks(2, 3, 4)


def f32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def is_last() -> bool:
    return engine.rank() == engine.size() - 1


# Tensor of the last rank, of the others, and the text that the error shows of each.
MISMATCHES: dict[str, tuple[Any, Any, str, str]] = {
    "shape": (
        lambda name: engine.allreduce_async(f32(4, 3), engine.Sum, name),
        lambda name: engine.allreduce_async(f32(3, 4), engine.Sum, name),
        "float32[4, 3]",
        "float32[3, 4]",
    ),
    "dimensions": (
        lambda name: engine.allreduce_async(f32(), engine.Sum, name),
        lambda name: engine.allreduce_async(f32(1), engine.Sum, name),
        "float32[]",
        "float32[1]",
    ),
    "dtype": (
        lambda name: engine.allreduce_async(np.zeros(5, np.float16), engine.Sum, name),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name),
        "float16[5]",
        "float32[5]",
    ),
    "op": (
        lambda name: engine.allreduce_async(f32(5), engine.Average, name),
        lambda name: engine.allreduce_async(f32(5), engine.Product, name),
        "average",
        "product",
    ),
    "prescale": (
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, 0.5),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, 0.25),
        "prescale 0.5",
        "prescale 0.25",
    ),
    "postscale": (
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, 1.0, 0.5),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name),
        "postscale 0.5",
        "sum float32[5]",
    ),
    "a scale that prints alike": (
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, 0.1),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, 0.1 + 1e-12),
        "prescale 0.1",
        "prescale 0.100000000001",
    ),
    "compression": (
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name, compression=engine.Compression.fp16),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name),
        "float32[5] compressed to float16",
        "sum float32[5]",
    ),
    "compression of a group": (
        lambda name: engine.grouped_allreduce_async([f32(5)], engine.Sum, name, compression=engine.Compression.fp16),
        lambda name: engine.grouped_allreduce_async([f32(5)], engine.Sum, name, compression=engine.Compression.bf16),
        "compressed to float16",
        "compressed to bfloat16",
    ),
    "root": (
        lambda name: engine.broadcast_async(f32(5), 1, name),
        lambda name: engine.broadcast_async(f32(5), 0, name),
        "root 1",
        "root 0",
    ),
    "kind": (
        lambda name: engine.broadcast_async(f32(5), 0, name),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name),
        "broadcast",
        "allreduce",
    ),
    "allgather's rest": (
        lambda name: engine.allgather_async(f32(2, 3), name),
        lambda name: engine.allgather_async(f32(2, 4), name),
        "float32[*, 3]",
        "float32[*, 4]",
    ),
    "allgather's dtype": (
        lambda name: engine.allgather_async(np.zeros((2, 3)), name),
        lambda name: engine.allgather_async(f32(0, 3), name),
        "float64[*, 3]",
        "float32[*, 3]",
    ),
    "barrier": (
        lambda name: engine.Handle(engine.session.runtime.current_engine().barrier(name), None, None),
        lambda name: engine.allreduce_async(f32(5), engine.Sum, name),
        "barrier",
        "allreduce",
    ),
    "many dimensions": (
        lambda name: engine.allreduce_async(f32(*(1, 2) * 8), engine.Sum, name),
        lambda name: engine.allreduce_async(f32(*(2, 1) * 8), engine.Sum, name),
        "1, 2, 1, 2",
        "2, 1, 2, 1",
    ),
}


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("title", MISMATCHES)
def test_a_mismatch(title: str, known: bool, size: int) -> None:
    """The name can be used afterwards."""
    odd, common, odd_text, common_text = MISMATCHES[title]
    others = readable.format_ranks(range(size - 1))
    name = f"mismatch of {title}"
    if known:
        engine.synchronize(common(name))
    before = engine.allreduce_async(np.full(3, 1.0), engine.Sum, "in flight beside it")
    handle = (odd if is_last() else common)(name)
    text = ""
    try:
        engine.synchronize(handle)
    except MismatchError as error:
        text = str(error)
    texts = engine.allgather_object(text)
    assert engine.synchronize(before)[0] == size
    engine.synchronize(common(name))
    works(size)
    assert f"ranks disagree on '{name}'" in text, text
    assert f"rank {size - 1} sent " in text and odd_text in text, text
    assert f"{others} sent " in text and common_text in text, text
    assert text.index(others) < text.index(f"rank {size - 1} sent")
    assert set(texts) == {text}
    assert engine.poll(handle)
    refused(lambda handle=handle: engine.synchronize(handle), "disagree", MismatchError)


def test_all_ranks_differ(rank: int, size: int) -> None:
    error = refused(lambda: engine.allreduce(f32(rank + 1), engine.Sum, "each"), "disagree", MismatchError)
    assert all(f"rank {other} sent allreduce sum float32[{other + 1}]" in error for other in range(size))


def test_unnamed_blocking(size: int) -> None:
    for _ in range(3):
        error = refused(lambda: engine.allreduce(f32(1 + is_last())), "allreduce.noname.", MismatchError)
        assert "float32[2]" in error
        works(size)


def test_many_at_once_among_good_ones() -> None:
    handles = [
        engine.allreduce_async(f32(5 + (k % 3 == 0 and is_last())), engine.Sum, f"many {k} {'x' * 500}")
        for k in range(600)
    ]
    for k, handle in enumerate(handles):
        if k % 3 == 0:
            refused(lambda handle=handle: engine.synchronize(handle), "disagree", MismatchError)
        else:
            engine.synchronize(handle)


def test_in_place_the_tensor_is_as_it_was() -> None:
    mine = np.full(5 + is_last(), 7.0)
    refused(lambda: engine.allreduce_(mine, engine.Sum, "untouched"), "disagree", MismatchError)
    assert (mine == 7).all()


def test_nobody_fetches_the_error(size: int) -> None:
    for k in range(50):
        engine.allreduce_async(f32(1 + is_last()), engine.Sum, f"nobody {k}")
    works(size)
