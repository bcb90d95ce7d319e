"""Gradients that flow through collectives, held against what one process computes from all ranks' inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch_cases import plain_case

import engine.torch as hvd
from engine.errors import EngineError


def weights(rank: int, *shape: int) -> torch.Tensor:
    """What a rank's loss weighs its output with: known to all."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + rank))


def inputs(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def check(
    shapes: list[tuple[int, ...]],
    collective: Callable[[torch.Tensor], torch.Tensor],
    model: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> None:
    """Hold the collective's gradient against that of `model`, which maps all ranks' inputs to all ranks' outputs."""
    mine = inputs(hvd.rank(), *shapes[hvd.rank()])
    output = collective(mine * 2)
    (output * weights(hvd.rank(), *output.shape)).sum().backward()
    everyone = [inputs(rank, *shape) for rank, shape in enumerate(shapes)]
    outputs = model([each * 2 for each in everyone])
    torch.stack([(each * weights(rank, *each.shape)).sum() for rank, each in enumerate(outputs)]).sum().backward()
    assert torch.allclose(output, outputs[hvd.rank()])
    want = everyone[hvd.rank()].grad
    assert mine.grad is not None
    assert torch.allclose(mine.grad, torch.zeros_like(mine) if want is None else want), (mine.grad, want)


@plain_case
def allreduce() -> None:
    size = hvd.size()
    shapes = [(3, 4)] * size
    check(shapes, lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs: [torch.stack(xs).sum(0)] * size)
    check(shapes, hvd.allreduce, lambda xs: [torch.stack(xs).mean(0)] * size)
    check(
        shapes,
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda xs: [torch.stack(xs).sum(0) * 1.5] * size,
    )


@plain_case
def grouped_allreduce() -> None:
    size = hvd.size()
    check(
        [(3, 4)] * size,
        lambda x: flat(hvd.grouped_allreduce([x[:1], x[1:].t()], op=hvd.Sum)),
        lambda xs: [flat([sum(xs)[:1], sum(xs)[1:].t()])] * size,  # type: ignore[index]
    )


@plain_case
def broadcast() -> None:
    for root in range(hvd.size()):
        check(
            [(5,)] * hvd.size(), lambda x, root=root: hvd.broadcast(x, root), lambda xs, root=root: [xs[root]] * len(xs)
        )


@plain_case
def allgather_of_uneven_rows() -> None:
    check([(rank, 3) for rank in range(hvd.size())], hvd.allgather, lambda xs: [torch.cat(xs)] * len(xs))
    check([()] * hvd.size(), hvd.allgather, lambda xs: [torch.stack(xs)] * len(xs))


@plain_case
def alltoall() -> None:
    size = hvd.size()
    check(
        [(size * 2, 3)] * size,
        hvd.alltoall,
        lambda xs: [torch.cat([x[2 * r : 2 * r + 2] for x in xs]) for r in range(size)],
    )
    splits = [[(rank + other) % 3 for other in range(size)] for rank in range(size)]
    check(
        [(sum(each) + 2, 3) for each in splits],
        lambda x: hvd.alltoall(x, splits=torch.tensor(splits[hvd.rank()]))[0],
        lambda xs: [
            torch.cat([x[sum(each[:r]) : sum(each[: r + 1])] for x, each in zip(xs, splits, strict=True)])
            for r in range(size)
        ],
    )


@plain_case
def reducescatter_of_uneven_rows() -> None:
    size = hvd.size()
    rows = [2 if rank == 0 else 1 for rank in range(size)]
    shapes = [(size + 1, 2)] * size
    check(shapes, lambda x: hvd.reducescatter(x, op=hvd.Sum), lambda xs: list(torch.stack(xs).sum(0).split(rows)))
    check(shapes, hvd.reducescatter, lambda xs: list(torch.stack(xs).mean(0).split(rows)))


@plain_case
def what_is_not_linear_has_no_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    for call in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(EngineError, match="op=Max has no gradient"):
            call(x, op=hvd.Max).sum().backward()


@plain_case
def without_gradients_there_is_no_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert not hvd.allreduce(x.detach()).requires_grad
    _, received = hvd.alltoall(torch.ones(hvd.size(), requires_grad=True), splits=[1] * hvd.size())
    assert not received.requires_grad


@plain_case
def grouped_allgather() -> None:
    size = hvd.size()
    shapes = [(2 + rank % 2 + rank, 3) for rank in range(size)]
    check(
        shapes,
        lambda x: flat(hvd.grouped_allgather([x[:2].float().double(), x.t()[0], x.sum()], name="gathered")),
        lambda xs: (
            [
                flat(
                    [
                        torch.cat([x[:2].float().double() for x in xs]),
                        torch.cat([x.t()[0] for x in xs]),
                        torch.stack([x.sum() for x in xs]),
                    ]
                )
            ]
            * size
        ),
    )


@plain_case
def grouped_reducescatter() -> None:
    size = hvd.size()
    rows = size + 1

    def parts(total: torch.Tensor) -> list[torch.Tensor]:
        return [total[:2], *(total[rank + 1 : rank + 2] for rank in range(1, size))]

    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
        check(
            [(rows, 3)] * size,
            lambda x, op=op: flat(hvd.grouped_reducescatter([x, x[:, 1]], op=op, prescale_factor=2.0)),
            lambda xs, factor=factor: [
                flat([total, total[:, 1]]) for total in parts(torch.stack(xs).sum(0) * 2 * factor)
            ],
        )


@plain_case
def a_group_with_members_that_have_no_gradient() -> None:
    x = torch.ones(hvd.size(), 2, dtype=torch.float64, requires_grad=True)
    counts, fixed = torch.arange(hvd.size()), torch.ones(hvd.size())
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        x.grad = None
        results = call([counts, x, fixed])
        assert [each.dtype for each in results] == [torch.int64, torch.float64, torch.float32]
        results[1].sum().backward()
        assert x.grad is not None
        assert (x.grad == (hvd.size() if call is hvd.grouped_allgather else x.grad[0, 0])).all()
