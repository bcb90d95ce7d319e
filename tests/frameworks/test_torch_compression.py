"""Compression with torch: gradients that travel as halves, compressors of the program, PowerSGD."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import nn

import engine
import engine.torch as hvd
from engine.errors import EngineError, MismatchError, UnsupportedTensorError

from ..on_ranks import on_ranks
from . import toy
from .halves import HALVES, backward, halved, of_ranks, parameters, value
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES)


def test_gradients_travel_as_halves(wrap: Wrap) -> None:
    wrong = []
    for kind, half in HALVES.items():
        made = parameters()
        optimizer = wrap(
            torch.optim.SGD(made.values(), lr=0.0), made.items(), compression=getattr(hvd.Compression, kind)
        )
        for number in range(3):
            optimizer.zero_grad(set_to_none=bool(number % 2))
            backward(made, engine.rank(), number)
            for name, each in made.items():
                assert each.grad is not None
                want = halved(of_ranks(made, name, number), half if each.dtype != torch.bfloat16 else torch.bfloat16)
                if not torch.equal(each.grad, want):
                    wrong.append((kind, number, name))
            optimizer.step()
        toy.check_same_everywhere({name: each.grad for name, each in made.items() if each.grad is not None})
        optimizer.unwrap()
    assert not wrong, wrong


def test_passes_are_added_up_before_they_are_compressed(wrap: Wrap) -> None:
    weight = nn.Parameter(torch.zeros(50, 40))
    options = {"backward_passes_per_step": 2, "compression": hvd.Compression.fp16, "op": engine.Sum}
    optimizer = wrap(torch.optim.SGD([weight], lr=0.0), [("weight", weight)], **options)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        for number in range(2):
            (weight * value(engine.rank(), 2 * step + number, 50, 40)).sum().backward()
        sums = [value(r, 2 * step, 50, 40) + value(r, 2 * step + 1, 50, 40) for r in range(engine.size())]
        found.append(torch.equal(weight.grad, halved(sums, torch.float16, average=False)))
        optimizer.step()
    assert found == [True, True]


def test_a_rank_without_a_gradient_adds_nothing_and_gets_the_result(wrap: Wrap) -> None:
    def check(compression: Any) -> list[bool]:
        made = {"here": nn.Parameter(torch.zeros(30, 20)), "there": nn.Parameter(torch.zeros(30, 20))}
        optimizer = wrap(torch.optim.SGD(made.values(), lr=0.0), made.items(), compression=compression)
        found = []
        for number in range(2):
            optimizer.zero_grad()
            backward(made, engine.rank(), number, {"here"} if engine.rank() else {"here", "there"})
            one = [each * (rank == 0) for rank, each in enumerate(of_ranks(made, "there", number))]
            wants = {"here": halved(of_ranks(made, "here", number), torch.float16), "there": halved(one, torch.float16)}
            found += [torch.equal(each.grad, wants[name]) for name, each in made.items() if each.grad is not None]
            optimizer.step()
        optimizer.unwrap()
        return found

    assert check(hvd.Compression.fp16) == [True] * 4
    assert check(Half) == [True] * 4


def test_sparse_gradients_made_dense_are_compressed(wrap: Wrap) -> None:
    for compression in (hvd.Compression.fp16, Half, hvd.PowerSGD(rank=4, start_iter=0, min_compression_rate=0)):
        torch.manual_seed(5)
        table = nn.Embedding(10, 4, sparse=True)
        optimizer = wrap(torch.optim.SGD(table.parameters(), lr=0.1), compression=compression, sparse_as_dense=True)
        for step in range(3):
            optimizer.zero_grad()
            table(torch.tensor([engine.rank(), 9, step, 9])).square().sum().backward()
            optimizer.step()
        grad = table.weight.grad
        assert grad is not None and not grad.is_sparse and grad[9].abs().sum() > 0
        toy.check_same_everywhere({"weight": table.weight.detach()})
        optimizer.unwrap()


def test_sparse_gradients_travel_as_they_are(wrap: Wrap) -> None:
    """A narrower dtype leaves them sparse and exact, even if a rank has none; Python's compressors need dense ones."""
    size, rank = engine.size(), engine.rank()
    for step in range(3):
        tables = [nn.Embedding(10, 4, sparse=True) for _ in range(2)]
        for table in tables:
            nn.init.constant_(table.weight, 1.0)
        optimizer = wrap(
            torch.optim.SGD([each.weight for each in tables], lr=0.1), compression=hvd.Compression.fp16, op=engine.Sum
        )
        factor = 1.0 + 2.0**-20  # lost in float16
        loss = tables[0](torch.tensor([rank, 9])).sum() * factor
        if rank == step % size:  # the other ranks have no gradient, and do not know that this one is sparse
            loss = loss + tables[1](torch.tensor([3])).sum() * factor
        loss.backward()
        optimizer.step()
        want = torch.zeros(10, 4)
        want[:size] += factor
        want[9] += size * factor
        assert tables[0].weight.grad is not None and tables[0].weight.grad.is_sparse
        toy.check_close({"all": tables[0].weight.grad.to_dense()}, {"all": want})
        assert tables[1].weight.grad is not None
        assert tables[1].weight.grad.to_dense()[3].tolist() == [float(torch.tensor(factor))] * 4
        optimizer.unwrap()
    for compression in (Half, hvd.PowerSGD(rank=1, start_iter=0, min_compression_rate=0)):
        table = nn.Embedding(10, 4, sparse=True)
        optimizer = wrap(torch.optim.SGD(table.parameters(), lr=0.1), compression=compression)
        text = toy.raises(UnsupportedTensorError, lambda: table(torch.tensor([rank])).sum().backward())  # noqa: B023
        assert "is sparse" in text and "sparse_as_dense=True" in text
        optimizer.zero_grad()
        optimizer.unwrap()


def test_compression_in_a_process_set() -> None:
    """The engine, a compressor or a scheme compresses among the set's ranks only; a rank outside trains alone."""
    size, rank = engine.size(), engine.rank()
    part = engine.add_process_set(range(size - 1)) if size > 1 else hvd.global_process_set
    inside = [value(each, 3, 30, 20) for each in part.ranks]
    for compression in (hvd.Compression.fp16, Half, hvd.PowerSGD(rank=20, start_iter=0, min_compression_rate=0)):
        weight = nn.Parameter(torch.zeros(30, 20))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression, process_set=part
        )
        for _ in range(2):
            optimizer.zero_grad()
            (weight * value(rank, 3, 30, 20)).sum().backward()
        assert weight.grad is not None
        if not part.included():
            assert torch.equal(weight.grad, value(rank, 3, 30, 20))
        elif isinstance(compression, hvd.PowerSGD):
            torch.testing.assert_close(weight.grad, torch.stack(inside).mean(0), rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(weight.grad, halved(inside, torch.float16))
        optimizer.unwrap()
    if part.included():
        mine, want = inside[part.rank() or 0], halved(inside, torch.bfloat16)
        options = {"compression": hvd.Compression.bf16, "process_set": part}
        assert torch.equal(hvd.allreduce(mine, **options), want)
        assert torch.equal(hvd.grouped_allreduce([mine], **options)[0], want)
        rows = want.tensor_split(part.size())[part.rank()]
        assert torch.equal(hvd.reducescatter(mine, **options), rows)
        assert torch.equal(hvd.grouped_reducescatter([mine], **options)[0], rows)
        in_place = mine.clone()
        hvd.grouped_allreduce_([in_place], op=hvd.Sum, process_set=part)
        assert torch.equal(in_place, hvd.allreduce(mine, op=hvd.Sum, process_set=part))
        (copied,) = hvd.synchronize(hvd.grouped_allreduce_async([mine], op=hvd.Sum, process_set=part))
        assert torch.equal(copied, in_place)
    if part is not hvd.global_process_set:
        engine.remove_process_set(part)


def test_adasum_does_not_compress() -> None:
    x = torch.ones(3)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16, Half):
        for call in (
            lambda: hvd.allreduce(x, op=hvd.Adasum, compression=compression),  # noqa: B023
            lambda: hvd.grouped_allreduce([x], op=hvd.Adasum, compression=compression),  # noqa: B023
            lambda: engine.allreduce_async_(x, engine.Adasum, compression=compression),  # noqa: B023
        ):
            assert "Adasum does not compress" in toy.raises(ValueError, call)
    if engine.size() != 3:
        assert torch.equal(hvd.allreduce(x, op=hvd.Adasum, compression=hvd.Compression.none), x)


class Half:
    """A compressor in the style of scripts for Horovod."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.float().half(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Counting(Half):
    """A compressor whose methods need an object."""

    def __init__(self) -> None:
        self.calls = 0

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        self.calls += 1
        return tensor.float().half(), tensor.dtype


def test_compressors_of_ones_own(wrap: Wrap) -> None:
    wrong = []
    for op, passes in ((engine.Average, 1), (engine.Sum, 2)):
        made, counting = parameters(), Counting()
        options = {"compression": counting, "op": op, "backward_passes_per_step": passes}
        optimizer = wrap(torch.optim.SGD(made.values(), lr=0.0), made.items(), **options)
        for number in range(2):
            optimizer.zero_grad()
            for k in range(passes):
                assert counting.calls == number * len(made)
                backward(made, engine.rank(), number if passes == 1 else 0 if k else number)
            for name, each in made.items():
                assert each.grad is not None
                ranks = of_ranks(made, name, number)
                if passes == 2:
                    ranks = [a + b for a, b in zip(ranks, of_ranks(made, name, 0), strict=True)]
                want = halved(ranks, torch.float16, average=op is engine.Average)
                if not torch.equal(each.grad, want):
                    wrong.append((op, number, name))
            optimizer.step()
        optimizer.unwrap()
    assert not wrong, wrong


def test_compressed_gradients_may_share_memory(wrap: Wrap) -> None:
    for compression in (Half, hvd.Compression.bf16):
        a, b, c = (nn.Parameter(torch.ones(12, 9)) for _ in range(3))
        optimizer = wrap(torch.optim.SGD([a, b, c], lr=0.0), compression=compression)
        for _ in range(4):
            optimizer.zero_grad()
            ((a.view(-1) + b.view(-1) + c.view(-1)) * (engine.rank() + 1)).sum().backward()
            for each in (a, b, c):
                assert each.grad is not None and bool((each.grad == (engine.size() + 1) / 2).all())
            optimizer.step()
        optimizer.unwrap()


def test_a_second_backward_is_reduced_again_or_refused(wrap: Wrap) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    for op in (engine.Average, engine.Sum):
        optimizer = wrap(torch.optim.SGD([weight], lr=0.0), compression=Half, op=op)
        weight.grad = None
        (weight * (engine.rank() + 1)).sum().backward()
        if op is engine.Average:
            (weight * (engine.rank() + 1)).sum().backward()
            assert bool((weight.grad == engine.size() + 1).all())
        else:
            toy.raises(EngineError, lambda: (weight * 2).sum().backward())
            optimizer.zero_grad()
        with optimizer.no_sync():
            optimizer.zero_grad()
            weight.sum().backward()
        weight.sum().backward()
        assert bool((weight.grad == (2 if op is engine.Average else 2 * engine.size())).all())
        optimizer.step()
        optimizer.unwrap()


def test_ranks_that_compress_differently_are_told_so(wrap: Wrap) -> None:
    if engine.size() == 1:
        return
    odd = engine.rank() == 0
    for mine, others in (
        (hvd.Compression.fp16, hvd.Compression.bf16),
        (hvd.Compression.none, hvd.Compression.fp16),
        (hvd.Compression.none, hvd.PowerSGD()),
        (hvd.PowerSGD(rank=1), hvd.PowerSGD(rank=2)),
    ):
        optimizer = torch.optim.SGD(toy.mlp().parameters(), lr=0.1)
        text = toy.raises(MismatchError, lambda: wrap(optimizer, compression=mine if odd else others))  # noqa: B023
        assert "the ranks give different options" in text and "compression=" in text
    assert engine.allreduce(torch.ones(2), engine.Sum).tolist() == [engine.size()] * 2


# ---- schemes


class Two(hvd.Scheme):
    """A scheme that averages a gradient in two halves, and refuses biases."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def accepts(self, name: str, parameter: torch.Tensor) -> bool:
        return parameter.dim() > 1

    def reduce(self, name: str, gradient: torch.Tensor) -> Generator[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.seen.append(name)
        flat = gradient.reshape(-1)
        first = yield flat[: len(flat) // 2]
        second = yield flat[len(flat) // 2 :]
        return torch.cat([first, second]).view(gradient.shape)


def test_a_scheme_of_ones_own(wrap: Wrap) -> None:
    model, alone, two = toy.mlp(), toy.mlp(), Two()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=two)
    entries = engine.counters()["tensors"]
    toy.train(model, optimizer, toy.shards(1))
    assert engine.counters()["tensors"] - entries == 3 + 3, "three biases; who is there, and two rounds for all weights"
    toy.train(model, optimizer, (toy.shard(toy.whole_batch(step)) for step in range(1, 4)))
    toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(4))
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
    toy.check_same_everywhere(toy.parameters_of(model))
    assert [name.rpartition(".")[0].rpartition(".")[2] for name in two.seen] == ["0", "2", "4"] * 4


def test_full_rank_is_the_plain_average(wrap: Wrap) -> None:
    for start in (0, 2):
        model, alone = toy.mlp(), toy.mlp()
        scheme = hvd.PowerSGD(rank=16, start_iter=start, min_compression_rate=0)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=scheme)
        toy.train(model, optimizer, toy.shards(5))
        toy.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), toy.wholes(5))
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-9, atol=1e-10)
        toy.check_same_everywhere(toy.parameters_of(model))
        optimizer.unwrap()


def test_low_rank_keeps_equal_bits_and_remembers_what_it_left_out(wrap: Wrap) -> None:
    """Over many reductions of one gradient, the sum received equals the sum sent."""
    rows, columns, rank = 40, 30, 2
    generator = torch.Generator().manual_seed(3)  # Noise, which two columns cannot represent well.
    mine = list(torch.randn(engine.size(), rows, columns, generator=generator, dtype=torch.float64))
    mean = torch.stack(mine).mean(dim=0)
    weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.float64))
    scheme = hvd.PowerSGD(rank=rank, start_iter=0, min_compression_rate=0)
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression=scheme)
    far = []
    for step in range(1, 101):
        optimizer.zero_grad()
        (weight * mine[engine.rank()]).sum().backward()
        assert weight.grad is not None and torch.linalg.matrix_rank(weight.grad) <= rank
        optimizer.step()
        far.append(float((weight.detach() / step + mean).norm() / mean.norm()))
    toy.check_same_everywhere({"weight": weight.detach(), "gradient": weight.grad})
    assert far[0] > 0.3, "a rank of 2 cannot be exact at once"
    assert far[-1] < 0.2, far[::10]


def test_powersgd_trains(wrap: Wrap) -> None:
    """A small training ends near the plain one's loss, with a fraction of the numbers sent."""
    losses: dict[str, list[float]] = {}
    traffic: dict[str, int] = {}
    for name, compression in (("plain", None), ("powersgd", hvd.PowerSGD(rank=2, start_iter=3))):
        model = toy.mlp(torch.float32, width=64)
        optimizer = wrap(
            torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), compression=compression
        )
        before = engine.counters()["bytes"]
        losses[name] = toy.train(model, optimizer, (toy.shard(toy.whole_batch(step % 4)).float() for step in range(80)))
        traffic[name] = engine.counters()["bytes"] - before
        toy.check_same_everywhere(toy.parameters_of(model))
        optimizer.unwrap()
    start, plain, small = losses["plain"][0], losses["plain"][-1], losses["powersgd"][-1]
    assert plain < 0.7 * start
    assert small < plain + 0.15 * (start - plain), (start, plain, small)
    assert traffic["powersgd"] < 0.5 * traffic["plain"], traffic


def test_powersgd_forgets_overflow(wrap: Wrap) -> None:
    weight = nn.Parameter(torch.zeros(8, 8))
    options = {"compression": hvd.PowerSGD(rank=8, start_iter=0, min_compression_rate=0)}
    optimizer = wrap(torch.optim.SGD([weight], lr=0.0), **options)
    finite = []
    for step in range(3):
        optimizer.zero_grad()
        large = float("inf") if step == 1 and engine.rank() == engine.size() - 1 else 1.0
        (weight * torch.eye(8) * large).sum().backward()
        finite.append(bool(torch.isfinite(weight.grad).all()))
        optimizer.step()
    assert finite == [True, False, True], "all ranks see that one has overflowed, and go on after it"
    torch.testing.assert_close(weight.grad, torch.eye(8))


def test_powersgd_of_singular_gradients() -> None:
    """Gradients of rank 0 and 1, and then of a higher rank: no column of the factors stays lost."""
    scheme = hvd.PowerSGD(rank=3, start_iter=0, min_compression_rate=0)
    ones = torch.ones(6, 5, dtype=torch.float64)
    full = value(0, 1, 6, 5, dtype=torch.float64)
    full = full[:, :3] @ full[:3]
    for gradient in (torch.zeros_like(ones), ones, full, ones, full):
        steps = scheme.reduce("weight", gradient)
        left = next(steps)
        right = steps.send(left)
        try:
            steps.send(right)
        except StopIteration as end:
            torch.testing.assert_close(end.value, gradient, rtol=1e-9, atol=1e-9)
        else:
            raise AssertionError("a third round")


def test_what_schemes_refuse(wrap: Wrap) -> None:
    model = toy.mlp()
    make = lambda **options: wrap(torch.optim.SGD(model.parameters(), lr=0.1), **options)  # noqa: E731
    for options in ({"op": engine.Sum}, {"prescale_factor": 2.0}, {"gradient_predivide_factor": 2.0}):
        assert "op=Average" in toy.raises(ValueError, lambda: make(compression=hvd.PowerSGD(), **options))  # noqa: B023
    for wrong in ({"rank": 0}, {"start_iter": -1}, {"min_compression_rate": float("nan")}):
        toy.raises(ValueError, lambda: hvd.PowerSGD(**wrong))  # noqa: B023
    toy.raises(TypeError, lambda: hvd.allreduce(torch.ones(2), compression=hvd.PowerSGD()))
    optimizer = make(compression=Bad())
    assert "shape [1]" in toy.raises(TypeError, lambda: toy.loss_of(model, toy.shard(toy.whole_batch(0))).backward())
    optimizer.unwrap()


class Bad(hvd.Scheme):
    """A scheme that returns another shape."""

    def reduce(self, name: str, gradient: torch.Tensor) -> Generator[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (yield gradient)[:1, :1].reshape(-1) if gradient.dim() > 1 else (yield gradient)


# ---- collectives


def test_collectives_of_torch_take_a_compression() -> None:
    size, rank = engine.size(), engine.rank()
    ranks = [value(each, 7, 6, 5) for each in range(size)]
    for kind, half in HALVES.items():
        compression = getattr(hvd.Compression, kind)
        want = halved(ranks, half)
        rows = want.tensor_split(size)[rank]
        assert torch.equal(hvd.allreduce(ranks[rank], compression=compression), want)
        assert torch.equal(hvd.reducescatter(ranks[rank], compression=compression), rows)
        got = hvd.grouped_allreduce([ranks[rank].t(), ranks[rank].double()], compression=compression)
        assert torch.equal(got[0], want.t()) and torch.equal(got[1], want.double())
    want = halved(ranks, torch.float16)
    assert torch.equal(hvd.allreduce(ranks[rank], compression=Half), want)
    assert torch.equal(hvd.reducescatter(ranks[rank], compression=Half), want.tensor_split(size)[rank])
    assert torch.equal(hvd.grouped_allreduce([ranks[rank]], compression=Half)[0], want)


def test_gradients_of_compressed_collectives_are_compressed() -> None:
    size, rank = engine.size(), engine.rank()
    weights = [value(each, 8, 6, 5) for each in range(size)]
    want = halved(weights, torch.float16)
    for compression in (hvd.Compression.fp16, Half):
        x = torch.ones(6, 5, requires_grad=True)
        (hvd.allreduce(x, compression=compression) * weights[rank]).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, want)
        x.grad = None
        (hvd.grouped_allreduce([x], compression=compression)[0] * weights[rank]).sum().backward()
        assert torch.equal(x.grad, want)
    for mathematical, share in ((False, 1.0), (True, 1 / size)):
        x = torch.ones(6, 5, requires_grad=True)
        with hvd.mathematical_gradients(mathematical):
            total = hvd.reducescatter(x, compression=hvd.Compression.bf16).sum()
        total.backward()
        torch.testing.assert_close(x.grad, torch.full((6, 5), share))
