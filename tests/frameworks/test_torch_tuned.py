"""Gradients whose compression is a tuned knob."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import engine
import engine.torch as hvd
from engine.errors import MismatchError
from engine.session import runtime

from ..on_ranks import on_ranks
from . import toy
from .halves import HALVES, Tensors, backward, halved, of_ranks, parameters, value
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES)

TURNS = ("none", "bf16", "fp16", "none")
TUNED = hvd.Compression.tuned


def turn(knob: str) -> None:
    """Set the knob, which applies to all later operations."""
    if engine.rank() == 0:
        engine.set_knobs(compression=knob)
    engine.barrier()


def reduced(knob: str, ranks: Tensors, average: bool = True) -> torch.Tensor:
    """Compute an allreduce under a knob with torch."""
    if knob != "none":
        return halved(ranks, HALVES[knob], average)
    total = ranks[0].clone()
    for each in ranks[1:]:
        total += each
    return total / len(ranks) if average else total


def test_gradients_travel_as_the_knob_says(wrap: Wrap) -> None:
    made, wrong = parameters(), []
    optimizer = wrap(torch.optim.SGD(made.values(), lr=0.0), made.items(), compression=TUNED)
    for number, knob in enumerate(TURNS * 2):
        turn(knob)
        optimizer.zero_grad(set_to_none=number % 3 == 1)
        backward(made, engine.rank(), number)
        for name, each in made.items():
            assert each.grad is not None
            ranks = of_ranks(made, name, number)
            want = reduced(knob, ranks) if each.dtype != torch.bfloat16 else halved(ranks, torch.bfloat16)
            if not torch.equal(each.grad, want):
                wrong.append((number, knob, name))
        toy.check_same_everywhere({name: each.grad for name, each in made.items() if each.grad is not None})
        optimizer.step()
    optimizer.unwrap()
    turn("none")
    assert not wrong, wrong


def test_a_rank_without_a_gradient_gets_what_the_others_have(wrap: Wrap) -> None:
    made = {"here": nn.Parameter(torch.zeros(30, 20)), "there": nn.Parameter(torch.zeros(30, 20))}
    optimizer = wrap(torch.optim.SGD(made.values(), lr=0.0), made.items(), compression=TUNED, op=engine.Sum)
    found = []
    for number, knob in enumerate(TURNS):
        turn(knob)
        optimizer.zero_grad()
        backward(made, engine.rank(), number, {"here"} if engine.rank() else {"here", "there"})
        one = [each * (rank == 0) for rank, each in enumerate(of_ranks(made, "there", number))]
        for name, ranks in (("here", of_ranks(made, "here", number)), ("there", one)):
            grad = made[name].grad
            found.append(grad is not None and torch.equal(grad, reduced(knob, ranks, average=False)))
        optimizer.step()
    optimizer.unwrap()
    turn("none")
    assert found == [True] * 8


def test_sparse_gradients_are_not_tuned(wrap: Wrap) -> None:
    turn("fp16")
    table, factor = nn.Embedding(10, 4, sparse=True), 1.0 + 2.0**-20  # lost in float16
    optimizer = wrap(torch.optim.SGD(table.parameters(), lr=0.1), compression=TUNED, op=engine.Sum)
    (table(torch.tensor([3, engine.rank() + 5])).sum() * factor).backward()
    grad = table.weight.grad
    rows = runtime.current_engine().history()
    optimizer.step()
    optimizer.unwrap()
    turn("none")
    assert grad is not None and grad.is_sparse
    assert grad.to_dense()[5 : 5 + engine.size()].eq(float(torch.tensor(factor))).all()
    assert {row["compression"] for row in rows if row["kind"] == "allgather" and row["type"] == "batch"} == {"none"}


def test_views_are_reduced_in_place_when_they_travel_as_they_are() -> None:
    """The permission to compress costs nothing extra for shared gradients; compressed ones travel through the slots."""
    weight = nn.Parameter(torch.zeros(100, 100))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.0), [("weight", weight)], TUNED, gradient_as_bucket_view=True
    )
    found = []
    for number, knob in enumerate(TURNS):
        turn(knob)
        optimizer.zero_grad(set_to_none=False)
        (weight * value(engine.rank(), number, 100, 100)).sum().backward()
        optimizer.step()
        row = next(row for row in reversed(runtime.current_engine().history()) if row["name"].endswith("weight"))
        found.append((row["algorithm"] == "shared", row["compression"], row["bytes"]))
    optimizer.unwrap()
    turn("none")
    assert found == [(knob == "none", knob, 40_000 if knob == "none" else 20_000) for knob in TURNS]


def test_training_is_the_same_as_with_what_the_knob_stands_for(wrap: Wrap) -> None:
    """All ranks have the same parameters even if the knob is turned between steps."""

    def trained(compression: Any, knobs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        model = toy.mlp()
        optimizer = wrap(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), compression=compression
        )
        for step, knob in enumerate(knobs):
            turn(knob)
            toy.train(model, optimizer, [toy.shard(toy.whole_batch(step)), toy.shard(toy.whole_batch(step + 9))])
        optimizer.unwrap()
        return {name: each.detach().clone() for name, each in model.named_parameters()}

    same = []
    for knob in ("none", "bf16", "fp16"):
        tuned = trained(TUNED, (knob, knob))
        meant = trained(getattr(hvd.Compression, knob), (knob, knob))
        toy.check_same_everywhere(tuned)
        same.append(all(torch.equal(tuned[name], meant[name]) for name in meant))
    mixed = trained(TUNED, TURNS)
    turn("none")
    toy.check_same_everywhere(mixed)
    assert same == [True] * 3


def test_collectives_and_their_gradients() -> None:
    size, rank = engine.size(), engine.rank()
    weights = [value(each, 8, 6, 5) for each in range(size)]
    found = []
    for knob in TURNS:
        turn(knob)
        want = reduced(knob, weights)
        found.append(torch.equal(hvd.allreduce(weights[rank], compression=TUNED), want))
        found.append(torch.equal(hvd.grouped_allreduce([weights[rank]], compression=TUNED)[0], want))
        rows = want.tensor_split(size)[rank]
        found.append(torch.equal(hvd.reducescatter(weights[rank], compression=TUNED), rows))
        x = torch.ones(6, 5, requires_grad=True)
        (hvd.allreduce(x, compression=TUNED) * weights[rank]).sum().backward()
        found.append(x.grad is not None and torch.equal(x.grad, want))
    turn("none")
    assert found == [True] * 16


def test_what_tuning_does_not_go_with() -> None:
    x = torch.ones(3)
    text = toy.raises(ValueError, lambda: hvd.allreduce(x, op=hvd.Adasum, compression=TUNED))
    assert "Adasum does not compress" in text
    weight = nn.Parameter(torch.ones(3))
    mine = TUNED if engine.rank() == 0 else hvd.Compression.bf16
    if engine.size() > 1:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        text = toy.raises(MismatchError, lambda: hvd.DistributedOptimizer(optimizer, [("weight", weight)], mine))
        assert "compression=TunedCompressor" in text and "compression=BF16Compressor" in text
