"""Gradients that flow through collectives, compared with one process that has all ranks' inputs.

That process gives the mathematical gradients. Horovod's, the default, are a known multiple of them for each kind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

import engine.torch as hvd
from engine.errors import EngineError

from ..on_ranks import on_ranks
from . import toy

pytestmark = on_ranks(*toy.SIZES)


def weights(rank: int, *shape: int) -> torch.Tensor:
    """Return the weights of a rank's loss, which every rank can compute."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + rank))


def inputs(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def check(
    shapes: list[tuple[int, ...]],
    collective: Callable[[torch.Tensor], torch.Tensor],
    model: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    horovod: float = 1.0,
) -> None:
    """Compare the collective's gradient with that of `model`, which maps all ranks' inputs to all ranks' outputs.

    `horovod` is the factor by which Horovod's gradient is larger. The forward pass chooses it, not `backward`.
    """
    everyone = [inputs(rank, *shape) for rank, shape in enumerate(shapes)]
    outputs = model([each * 2 for each in everyone])
    torch.stack([(each * weights(rank, *each.shape)).sum() for rank, each in enumerate(outputs)]).sum().backward()
    for mathematical, factor in ((None, horovod), (True, 1.0), (False, horovod)):
        mine = inputs(hvd.rank(), *shapes[hvd.rank()])
        with nullcontext() if mathematical is None else hvd.mathematical_gradients(mathematical):
            output = collective(mine * 2)
        (output * weights(hvd.rank(), *output.shape)).sum().backward()
        assert torch.allclose(output, outputs[hvd.rank()])
        exact = everyone[hvd.rank()].grad
        want = torch.zeros_like(mine) if exact is None else exact * factor
        assert mine.grad is not None
        assert torch.allclose(mine.grad, want), (mathematical, mine.grad, want)


def test_allreduce() -> None:
    size = hvd.size()
    shapes = [(3, 4)] * size
    check(shapes, lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs: [torch.stack(xs).sum(0)] * size)
    check(shapes, hvd.allreduce, lambda xs: [torch.stack(xs).mean(0)] * size)
    check(
        shapes,
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda xs: [torch.stack(xs).sum(0) * 1.5] * size,
    )


def test_grouped_allreduce() -> None:
    size = hvd.size()
    check(
        [(3, 4)] * size,
        lambda x: flat(hvd.grouped_allreduce([x[:1], x[1:].t()], op=hvd.Sum)),
        lambda xs: [flat([sum(xs)[:1], sum(xs)[1:].t()])] * size,  # type: ignore[index]
    )


def test_broadcast() -> None:
    for root in range(hvd.size()):
        check(
            [(5,)] * hvd.size(),
            lambda x, root=root: hvd.broadcast(x, root),
            lambda xs, root=root: [xs[root]] * len(xs),
            1 / hvd.size(),
        )


def test_allgather_of_uneven_rows() -> None:
    share = 1 / hvd.size()
    check([(rank, 3) for rank in range(hvd.size())], hvd.allgather, lambda xs: [torch.cat(xs)] * len(xs), share)
    check([()] * hvd.size(), hvd.allgather, lambda xs: [torch.stack(xs)] * len(xs), share)


def test_alltoall() -> None:
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


def test_reducescatter_of_uneven_rows() -> None:
    size = hvd.size()
    rows = [2 if rank == 0 else 1 for rank in range(size)]
    shapes = [(size + 1, 2)] * size
    check(shapes, lambda x: hvd.reducescatter(x, op=hvd.Sum), lambda xs: list(torch.stack(xs).sum(0).split(rows)), size)
    check(shapes, hvd.reducescatter, lambda xs: list(torch.stack(xs).mean(0).split(rows)), size)
    check(
        shapes,
        lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda xs: list((torch.stack(xs).sum(0) * 1.5).split(rows)),
        size,
    )


def test_what_is_not_linear_has_no_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    for call in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(EngineError, match="op=Max has no gradient"):
            call(x, op=hvd.Max).sum().backward()


def test_without_gradients_there_is_no_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert not hvd.allreduce(x.detach()).requires_grad
    _, received = hvd.alltoall(torch.ones(hvd.size(), requires_grad=True), splits=[1] * hvd.size())
    assert not received.requires_grad


def test_grouped_allgather() -> None:
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
        1 / size,
    )


def test_grouped_reducescatter() -> None:
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
            size,
        )


def test_a_group_with_members_that_have_no_gradient() -> None:
    x = torch.ones(hvd.size(), 2, dtype=torch.float64, requires_grad=True)
    counts, fixed = torch.arange(hvd.size()), torch.ones(hvd.size())
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        x.grad = None
        results = call([counts, x, fixed])
        assert [each.dtype for each in results] == [torch.int64, torch.float64, torch.float32]
        results[1].sum().backward()
        assert x.grad is not None
        assert (x.grad == (1 if call is hvd.grouped_allgather else x.grad[0, 0])).all()
    moved = hvd.grouped_allgather([torch.ones(1, dtype=torch.bool), x])  # bool has neither an average nor a gradient
    moved[1].sum().backward()


def test_horovods_gradients_in_numbers() -> None:
    """The numbers are those of the documentation, for a loss of rank + 1 times the sum of the output."""
    size, rank = hvd.size(), hvd.rank()
    mean = sum(range(1, size + 1)) / size
    cases = (
        (hvd.allgather, mean),
        (lambda x: hvd.broadcast(x, size - 1), mean if rank == size - 1 else 0),
        (lambda x: hvd.alltoall(x, splits=[0] * rank + [1] + [0] * (size - 1 - rank))[0], rank + 1),
        (hvd.allreduce, mean),
    )
    for collective, want in cases:
        x = torch.ones(1, 3, requires_grad=True)
        (collective(x).sum() * (rank + 1)).backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, torch.full_like(x, want)), (x.grad, want)
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        x = torch.ones(size, 2, requires_grad=True)
        (hvd.reducescatter(x, op=op, prescale_factor=0.5).sum() * (rank + 1)).backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, torch.arange(1.0, size + 1)[:, None].expand(size, 2) * factor * 0.5)


def test_the_choice_of_gradients_belongs_to_a_thread_and_a_block() -> None:
    def weight(x: torch.Tensor) -> float:
        x = x.clone().requires_grad_()
        hvd.allgather(x).sum().backward()
        assert x.grad is not None
        return float(x.grad[0])

    x, elsewhere = torch.ones(1), []
    with hvd.mathematical_gradients():
        assert weight(x) == hvd.size()
        with hvd.mathematical_gradients(False):
            assert weight(x) == 1
        thread = threading.Thread(target=lambda: elsewhere.append(weight(x)))
        thread.start()
        thread.join(60)
        with pytest.raises(KeyError), hvd.mathematical_gradients(False):
            raise KeyError
        assert weight(x) == hvd.size()
    assert weight(x) == 1
    assert elsewhere == [1]


def test_gradients_of_gradients() -> None:
    """A gradient penalty needs these; each collective is compared with its equivalent in one process."""
    size = hvd.size()
    cases = (
        (hvd.allreduce, 1.0),
        (hvd.allgather, 1.0 / size),
        (lambda x: hvd.broadcast(x, 0), 1.0 / size if hvd.rank() == 0 else 0.0),
        (lambda x: hvd.alltoall(x, splits=[2] * size)[0], 1.0),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum), float(size)),
        (lambda x: hvd.grouped_allreduce([x, x.detach()])[0], 1.0),
        (lambda x: hvd.grouped_allgather([x, x.detach()])[0], 1.0 / size),
        (lambda x: hvd.grouped_reducescatter([x, x.detach()], op=hvd.Sum)[0], float(size)),
    )
    for collective, share in cases:
        x = torch.full((2 * size, 2), 3.0, dtype=torch.float64, requires_grad=True)
        with hvd.mathematical_gradients():
            (plain,) = torch.autograd.grad((collective(x) ** 3).sum(), x)
        (first,) = torch.autograd.grad((collective(x) ** 3).sum(), x, create_graph=True)
        assert first.requires_grad, "a gradient of a gradient flows"
        assert torch.allclose(first, plain * share if size > 1 else plain)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert (second.abs().sum() > 0) == (share > 0)


def test_complex_tensors_that_are_gathered() -> None:
    size = hvd.size()
    for collective in (hvd.allgather, lambda x: hvd.grouped_allgather([x, torch.ones(1)])[0]):
        x = torch.full((1, 2), complex(hvd.rank(), 1), requires_grad=True)
        output = collective(x)
        assert torch.equal(output.detach()[:, 0], torch.tensor([complex(rank, 1) for rank in range(size)]))
        (output.real.sum() + 2 * output.imag.sum()).backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, torch.full_like(x, complex(1, 2)))
