"""Sparse tensors and sparse gradients over all ranks, compared with dense ones and with one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import engine
import engine.torch as hvd
from engine.errors import DuplicateNameError, EngineError, MismatchError, UnsupportedTensorError
from engine.torch import sparse as module

from ..on_ranks import on_ranks
from . import toy
from .wrapping import Wrap

pytestmark = on_ranks(*toy.SIZES, toy.BY_METHOD)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int64)


def entries(rank: int, dtype: torch.dtype, shape: tuple[int, ...], sparse: int, nnz: int) -> torch.Tensor:
    """Return a rank's sparse tensor, which every rank can compute; indices occur several times."""
    rng = np.random.default_rng([rank, sparse, nnz, *shape])
    indices = np.stack([rng.integers(0, length, nnz) for length in shape[:sparse]])
    values = torch.from_numpy(rng.integers(-9, 9, (nnz, *shape[sparse:])) * 0.37).to(dtype)
    return torch.sparse_coo_tensor(torch.from_numpy(indices), values, shape)


def dense(tensor: torch.Tensor) -> Any:
    """Return the dense NumPy array, added up in the order of the entries."""
    total = np.zeros(tensor.shape)
    np.add.at(total, tuple(tensor._indices().numpy()), tensor._values().double().numpy())
    return total


def bits(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [("indices", tensor.indices().contiguous()), ("values", tensor.values().contiguous())]


def test_sums_of_what_is_stored() -> None:
    """Sums equal NumPy's up to rounding, and those of the dense allreduce and of all ranks bit by bit."""
    found = []
    for number, (shape, sparse) in enumerate((((7,), 1), ((9, 4), 1), ((9, 4), 2), ((3, 4, 2, 5), 2), ((6, 0), 1))):
        for dtype in DTYPES:
            for op in (hvd.Sum, hvd.Average):
                ranks = [entries(rank, dtype, shape, sparse, 4 * number + rank) for rank in range(hvd.size())]
                mine = ranks[hvd.rank()]
                got = hvd.sparse_allreduce(mine, f"sum {number} {dtype} {op}", op)
                assert mine._nnz() == 4 * number + hvd.rank(), "the input was changed"
                # In half precision, duplicates on a rank are added up in float32.
                wide = mine.to(torch.float32) if dtype.itemsize == 2 else mine
                found.append((dtype, op, sparse, ranks, got, hvd.allreduce(wide.to_dense().to(dtype), op=op)))
    toy.check_same_everywhere(
        {f"{number} {what}": each for number, row in enumerate(found) for what, each in bits(row[4])}
    )
    for dtype, op, sparse, ranks, got, want in found:
        assert got.is_coalesced() and got.dtype is dtype and got.shape == want.shape and got.sparse_dim() == sparse
        places = np.concatenate([each._indices().numpy() for each in ranks], axis=1)
        assert (got.indices().numpy() == np.unique(places, axis=1)).all()
        assert torch.equal(got.to_dense(), want), (dtype, got.to_dense(), want)
        if dtype.is_floating_point:
            parts = np.stack([dense(each) for each in ranks])
            total = parts.sum(0) / (hvd.size() if op is hvd.Average else 1)
            error = np.abs(got.to_dense().double().numpy() - total).max(initial=0)
            assert error <= 8 * torch.finfo(dtype).eps * np.abs(parts).sum(0).max(initial=1), (dtype, error)


def test_the_order_of_addition_is_that_of_the_ranks() -> None:
    """The sum of the values depends on the order, to the last bit."""
    values = [np.random.default_rng(rank).standard_normal((50, 3)).astype(np.float32) for rank in range(hvd.size())]
    places = [np.random.default_rng(100 + rank).permutation(80)[:50] for rank in range(hvd.size())]
    mine = torch.sparse_coo_tensor(places[hvd.rank()][None], torch.from_numpy(values[hvd.rank()]), (80, 3))
    want = np.zeros((80, 3), np.float32)
    for place, value in zip(places, values, strict=True):
        want[place] += value
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert hvd.sparse_allreduce(mine, op=hvd.Sum).to_dense().numpy().tobytes() == want.tobytes()
    torch.set_num_threads(1)


def test_nothing_stored() -> None:
    for name, count in {"some": hvd.rank(), "none": 0}.items():
        mine = torch.sparse_coo_tensor(torch.full((2, count), 1), torch.ones(count, 3), (4, 5, 3))
        got = hvd.sparse_allreduce(mine, name, hvd.Sum)
        total = hvd.size() * (hvd.size() - 1) / 2 if count or name == "some" else 0
        assert got.sparse_dim() == 2 and got._nnz() == (total > 0)
        assert got.to_dense().sum() == 3 * total
    flags = torch.sparse_coo_tensor([[hvd.rank(), 5]], [True, False], (6,))
    want = [rank < hvd.size() for rank in range(6)]
    assert hvd.sparse_allreduce(flags, op=hvd.Sum).to_dense().tolist() == want


def test_handles_of_sparse_sums() -> None:
    """Sparse sums are asynchronous, and waited for among others, in a different order on each rank."""
    handles = {}
    for k in range(60):
        mine = torch.sparse_coo_tensor([[hvd.rank(), k % 7]], torch.full((2, 2), float(k)), (10, 2))
        handles[k] = hvd.sparse_allreduce_async(mine, f"async {k}", hvd.Sum)
        if k % 10 == 0:
            handles[100 + k] = hvd.grouped_allgather_async([torch.ones(k), torch.ones(1, dtype=torch.int8)])
    done = {k: hvd.synchronize(handles[k]) for k in sorted(handles, key=lambda k: (k * 7 + hvd.rank() * 5) % 61)}
    for k in range(60):
        assert hvd.poll(handles[k]) and hvd.synchronize(handles[k]) is done[k]
        want = torch.zeros(10, 2)
        want[: hvd.size()] += k
        want[k % 7] += k * hvd.size()
        assert torch.equal(done[k].to_dense(), want)
    assert [len(done[100 + k][0]) for k in range(0, 60, 10)] == [k * hvd.size() for k in range(0, 60, 10)]


def test_disagreements_about_sparse_tensors() -> None:
    odd = hvd.rank() == hvd.size() - 1 and hvd.size() > 1

    def sparse(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, dims: int = 1) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.zeros(dims, 1), torch.ones(1, *shape[dims:], dtype=dtype), shape)

    calls = {
        "shape": lambda: hvd.sparse_allreduce(sparse((10, 5 if odd else 4)), "shape"),
        "rows": lambda: hvd.sparse_allreduce(sparse((11 if odd else 10, 4)), "rows"),
        "dtype": lambda: hvd.sparse_allreduce(sparse((10, 4), torch.float64 if odd else torch.float32), "dtype"),
        "dims": lambda: hvd.sparse_allreduce(sparse((10, 4), dims=2 if odd else 1), "dims"),
        "op": lambda: hvd.sparse_allreduce(sparse((10, 4)), "op", hvd.Sum if odd else hvd.Average),
        "dense": lambda: (
            hvd.allreduce(torch.ones(10, 4), name="dense") if odd else hvd.sparse_allreduce(sparse((10, 4)), "dense")
        ),
    }
    for name, call in calls.items():
        if hvd.size() > 1:
            text = toy.raises(MismatchError, call)
            assert "sent sparse allreduce" in text and "10, 4], sparse in 1 of its dimensions" in text, text
            assert len(set(hvd.allgather_object(text))) == 1
        assert hvd.sparse_allreduce(sparse((10, 4)), name, hvd.Sum).to_dense()[0, 0] == hvd.size()
    good = sparse((10, 4))
    deep = torch.sparse_coo_tensor(torch.zeros(1, 1), torch.ones(1, *[1] * 10), [3, *[1] * 10])
    for call, what in (
        (lambda: hvd.sparse_allreduce(torch.ones(3)), "dense tensors have allreduce"),
        (lambda: hvd.sparse_allreduce(torch.eye(3).to_sparse_csr()), "layout torch.sparse_csr"),
        (lambda: hvd.sparse_allreduce(good, op=hvd.Max), "only Sum and Average, not Max"),
        (lambda: hvd.sparse_allreduce(good.to(torch.complex64)), "complex64"),
        (lambda: hvd.sparse_allreduce(good.bool()), "bool, which has no Average"),
        (lambda: hvd.sparse_allreduce(deep), "at most 10 dimensions"),
        (lambda: hvd.allreduce(good), "sparse_allreduce"),
    ):
        assert what in toy.raises(UnsupportedTensorError, call), what
    toy.raises(TypeError, lambda: hvd.sparse_allreduce([1.0]))
    handle = hvd.sparse_allreduce_async(good, f"twice {hvd.rank()}")
    if hvd.size() > 1:
        toy.raises(DuplicateNameError, lambda: hvd.sparse_allreduce_async(good, f"twice {hvd.rank()}"))
    hvd.barrier()  # otherwise another rank may have completed the first one by then
    others = [hvd.sparse_allreduce_async(good, f"twice {k}") for k in range(hvd.size()) if k != hvd.rank()]
    assert all(hvd.synchronize(each).to_dense()[0, 0] == 1 for each in [handle, *others])


def unchecked(indices: Any, rows: int = 6, coalesced: bool = False) -> torch.Tensor:
    """Return ones at any positions of a tensor of shape [rows, 4, 2], or [rows, 2] with one row of indices."""
    places = torch.tensor(indices)
    shape = (rows, 4, 2)[: len(places)] + (2,) * (len(places) == 1)
    values = torch.ones(places.shape[1], *shape[len(places) :], dtype=torch.float64)
    return torch.sparse_coo_tensor(places, values, shape, is_coalesced=coalesced, check_invariants=False)


FAULTS: dict[str, tuple[Any, bool, str]] = {
    "too large": ([[0, 6, 2]], False, "with index 6 in dimension 0, which it does not have"),
    "far too large": ([[0, 2**62, 2]], False, f"with index {2**62} in dimension 0, which it does not have"),
    "negative": ([[0, -1, 2]], True, "with index -1 in dimension 0, which it does not have"),
    "the last dimension": ([[0, 1], [1, 4], [1, 1]], False, "with index 4 in dimension 1, which it does not have"),
    "twice": ([[0, 2, 2, 5]], True, "said to be coalesced, but entry 2 does not come after the one before it"),
    "not in order": ([[1, 1, 0], [0, 1, 2], [0, 0, 0]], True, "but entry 2 does not come after the one before it"),
}


def test_malformed_sparse_tensors() -> None:
    """Every rank is told at once which rank sent it and what is wrong; the name can be used again."""
    for number, (label, (indices, coalesced, what)) in enumerate(FAULTS.items()):
        good = unchecked([[0]] * len(indices))
        bad = unchecked(indices, coalesced=coalesced)
        for culprits in ({number % hvd.size()}, set(range(hvd.size()))):
            for turn in range(2):  # The name is new, then known.
                mine = bad if hvd.rank() in culprits else good
                text = toy.raises(
                    MismatchError, lambda mine=mine, label=label: hvd.sparse_allreduce(mine, label, hvd.Sum)
                )
                assert what in text and "sent sparse allreduce sum float64[6, " in text, text
                for rank in range(hvd.size()):
                    assert (f"rank {rank} sent" in text) == (rank in culprits), (turn, text)
                assert len(set(hvd.allgather_object(text))) == 1
                handle = hvd.sparse_allreduce_async(mine, f"{label}, later", hvd.Sum)
                assert what in toy.raises(MismatchError, lambda handle=handle: hvd.synchronize(handle))
                assert hvd.sparse_allreduce(good, label, hvd.Sum).to_dense().max() == hvd.size()
    empty = unchecked([[]], rows=0)
    assert hvd.sparse_allreduce(empty.to(torch.float32), "no rows")._nnz() == 0
    assert "index 0 in" in toy.raises(MismatchError, lambda: hvd.sparse_allreduce(unchecked([[0]], rows=0), "no rows"))


def test_what_arrives_is_looked_at_once_more() -> None:
    """A rank sends indices outside of the shape, despite its own check: all ranks refuse them."""
    good = unchecked([[0, 3]])
    for number, bad in enumerate((-1, 6, 2**62)):
        name = f"past the look {number}"
        if hvd.rank() == hvd.size() - 1:
            late = good.clone()
            handle = start_unseen(late, bad, name)
        else:
            handle = hvd.sparse_allreduce_async(good, name, hvd.Sum)
        assert "shape [6, 2] before it was sent" in toy.raises(
            EngineError, lambda handle=handle: hvd.synchronize(handle)
        )
    parts = [torch.zeros(3, 1, dtype=torch.int64), torch.ones(2, 2)]
    gather = engine.session.runtime.current_engine().allgather_group
    lists = [each.numpy() for each in parts]
    text = toy.raises(ValueError, lambda: gather(lists, "x", True, ([6, 2], 0, 1.0, 1.0, None)))
    assert "as many indices as values, not 3 and 2" in text
    hvd.barrier()


def start_unseen(tensor: torch.Tensor, bad: int, name: str) -> Any:
    """Submit a tensor whose indices change after this rank has checked them."""
    look = module.fault_of

    def looked(tensor: torch.Tensor) -> Any:
        found = look(tensor)
        tensor._indices()[0, 1] = bad
        return found

    module.fault_of = looked
    try:
        return hvd.sparse_allreduce_async(tensor.coalesce(), name, hvd.Sum)
    finally:
        module.fault_of = look


# ---- gradients


def tables(count: int = 2, rows: int = 30) -> nn.ModuleList:
    torch.manual_seed(2)
    return nn.ModuleList(nn.Embedding(rows, 5, sparse=True).double() for _ in range(count))


def looked_up(rank: int, step: int) -> torch.Tensor:
    """Return 12 positions in a table of 30 rows, some of them several times."""
    return torch.randint(0, 30, (12,), generator=torch.Generator().manual_seed(31 * step + rank))


def loss_of(table: nn.Module, places: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = (table(places) - places[:, None].sin()).square().sum(1).mean()
    return total


def optimizers(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        torch.optim.SparseAdam(parameters, lr=0.05),
        torch.optim.Adagrad(parameters, lr=0.1),
    ]


@pytest.mark.parametrize("as_dense", [False, True])
def test_training_with_sparse_gradients(as_dense: bool, wrap: Wrap) -> None:
    """Equals one process on all ranks' batches; gradients stay sparse, for SparseAdam even with `sparse_as_dense`."""
    for number in (1,) if as_dense else range(3):
        (model,), (alone,) = tables(1), tables(1)
        optimizer = wrap(
            optimizers(list(model.parameters()))[number], model.named_parameters(), sparse_as_dense=as_dense
        )
        single = optimizers(list(alone.parameters()))[number]
        for step in range(5):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, looked_up(hvd.rank(), step)).backward()
            gradient = model.weight.grad
            assert gradient is not None and gradient.is_sparse and gradient.is_coalesced()
            optimizer.step()
            single.zero_grad()
            loss_of(alone, torch.cat([looked_up(rank, step) for rank in range(hvd.size())])).backward()
            single.step()
        toy.check_close(toy.parameters_of(model), toy.parameters_of(alone), rtol=1e-9)
        toy.check_same_everywhere(toy.parameters_of(model))


def test_a_table_that_the_same_rank_alone_uses_in_each_step(wrap: Wrap) -> None:
    """The others get a sparse gradient of equal size each time, which must not go where a dense one would."""
    model, alone = tables(), tables()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
    single = torch.optim.SGD(alone.parameters(), lr=0.5)
    rows = looked_up(0, 0)
    for _ in range(4):
        optimizer.zero_grad()
        used = model if hvd.rank() == hvd.size() - 1 else model[:1]
        torch.stack([loss_of(table, rows) for table in used]).sum().backward()
        optimizer.step()
        single.zero_grad()
        (loss_of(alone[0], rows) + loss_of(alone[1], rows) / hvd.size()).backward()
        single.step()
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
    toy.check_same_everywhere(toy.parameters_of(model))


def test_a_table_that_some_ranks_do_not_use(wrap: Wrap) -> None:
    """Such ranks contribute nothing, from the first step on, and get the others' gradient."""
    model, alone = tables(), tables()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
    single = torch.optim.SGD(alone.parameters(), lr=0.5)
    # Ranks that use the second table, by step: at first the last one, then none, one, and all.
    plans: list[set[int]] = [{hvd.size() - 1}, set(), {0}, set(range(hvd.size())), set(), {hvd.size() - 1}]
    kinds = []
    for step, users in enumerate(plans):
        optimizer.zero_grad()
        used = model if hvd.rank() in users else model[:1]
        torch.stack([loss_of(table, looked_up(hvd.rank(), step)) for table in used]).sum().backward()
        gradient = model[1].weight.grad
        kinds.append(gradient is not None and gradient.is_sparse)
        assert gradient is None or gradient.is_sparse
        optimizer.step()
        single.zero_grad()
        for rank in range(hvd.size()):
            for table in alone if rank in users else alone[:1]:
                (loss_of(table, looked_up(rank, step)) / hvd.size()).backward()
        single.step()
    assert kinds == [bool(users) for users in plans], kinds
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))
    toy.check_same_everywhere(toy.parameters_of(model))


def test_sparse_gradients_of_several_passes(wrap: Wrap) -> None:
    """Gradients are first added up on their rank, with an incomplete window, and by two backwards before a step."""
    for options in ({"backward_passes_per_step": 3}, {"backward_passes_per_step": 3, "op": hvd.Sum}, {}):
        (model,), (alone,) = tables(1), tables(1)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), **options)
        for step, passes in enumerate((3, 2)):
            optimizer.zero_grad()
            alone.zero_grad()
            before = toy.reduced()
            for number in range(passes):
                loss_of(model, looked_up(hvd.rank(), 3 * step + number)).backward()
                for rank in range(hvd.size()):
                    loss_of(alone, looked_up(rank, 3 * step + number)).backward()
            optimizer.step()
            assert toy.reduced() - before == (1 if options else passes)
            divisor = 1 if options.get("op") is hvd.Sum else hvd.size()
            got, want = model.weight.grad, alone.weight.grad
            assert got is not None and want is not None and got.is_sparse
            assert torch.allclose(got.to_dense(), want.to_dense() / divisor)


def test_a_sparse_gradient_twice_with_sum(wrap: Wrap) -> None:
    (model,) = tables(1)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), op=hvd.Sum)
    loss_of(model, looked_up(hvd.rank(), 0)).backward()
    assert "reduced already" in toy.raises(EngineError, lambda: loss_of(model, looked_up(hvd.rank(), 1)).backward())
    optimizer.zero_grad()
    loss_of(model, looked_up(hvd.rank(), 1)).backward()
    optimizer.step()
    toy.check_same_everywhere({"gradient": model.weight.grad.to_dense()})


def test_sparse_gradients_are_scaled(wrap: Wrap) -> None:
    for options, factor in (
        ({"gradient_predivide_factor": 4.0}, 1 / hvd.size()),
        ({"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}, 1.5),
    ):
        (model,), (alone,) = tables(1), tables(1)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), **options)
        loss_of(model, looked_up(hvd.rank(), 0)).backward()
        optimizer.step()
        for rank in range(hvd.size()):
            loss_of(alone, looked_up(rank, 0)).backward()
        assert torch.allclose(model.weight.grad.to_dense(), alone.weight.grad.to_dense() * factor)


def test_dense_here_and_sparse_there(wrap: Wrap) -> None:
    """Every rank is told the parameter's name, and the next step works."""
    (model,) = tables(1)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        model.sparse = step != 1 or hvd.rank() == 0
        loss = loss_of(model, looked_up(hvd.rank(), step))
        if step == 1 and hvd.size() > 1:
            text = toy.raises(MismatchError, loss.backward)
            assert "the gradient of 'gradient" in text and "weight'" in text, text
            assert "sent sparse allreduce average float64[30, 5]" in text, text
            assert "sent allreduce average float64[30, 5]" in text, text
        else:
            loss.backward()
            optimizer.step()
    toy.check_same_everywhere(toy.parameters_of(model))


def test_operations_that_sparse_gradients_do_not_have(wrap: Wrap) -> None:
    """The refusal names the parameter; dense gradients beside it work, and so does sparse_as_dense."""
    table, other = tables(1)[0], nn.Linear(5, 2).double()
    model = nn.ModuleDict({"table": table, "other": other})
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Max)
    for _ in range(2):
        optimizer.zero_grad()
        text = toy.raises(UnsupportedTensorError, loss_of(table, looked_up(hvd.rank(), 0)).backward)
        assert "table.weight" in text and "only Sum and Average, not Max" in text, text
    optimizer.zero_grad()
    other(torch.ones(3, 5, dtype=torch.float64) * hvd.rank()).sum().backward()
    toy.check_same_everywhere({"dense": other.weight.grad})


class Picked(torch.autograd.Function):
    """Rows of a table; the gradient has other, unchecked indices."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, places: torch.Tensor, wrong: list[int]) -> torch.Tensor:
        ctx.shape, ctx.wrong = weight.shape, wrong
        return weight[places]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        places = torch.tensor([ctx.wrong])
        return torch.sparse_coo_tensor(places, gradients[0], ctx.shape, check_invariants=False), None, None


def test_malformed_sparse_gradients(wrap: Wrap) -> None:
    """Every rank is told the parameter's name, none waits, and the next step works; also with gradients made dense."""
    for options in ({}, {"sparse_as_dense": True}, {"backward_passes_per_step": 2}):
        (model,) = tables(1)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)
        before = toy.parameters_of(model)
        for step in range(3):
            wrong = [0, 30] if step == 1 and hvd.rank() == hvd.size() - 1 else [0, 1]
            optimizer.zero_grad()

            def one_step(model: Any = model, wrong: list[int] = wrong, optimizer: Any = optimizer) -> None:
                Picked.apply(model.weight, torch.tensor([0, 1]), wrong).sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()

            if step == 1:
                text = toy.raises(MismatchError, one_step)
                assert "the gradient of 'gradient" in text and "weight'" in text, text
                assert f"rank {hvd.size() - 1} sent sparse" in text and "index 30 in dimension 0" in text, text
                assert "rank 0" not in text or hvd.size() == 1
            else:
                one_step()
        for name, each in toy.parameters_of(model).items():
            assert (each[:2] < before[name][:2]).all() and torch.equal(each[2:], before[name][2:])
        toy.check_same_everywhere(toy.parameters_of(model))
        optimizer.unwrap()


def test_a_table_that_is_unfrozen(wrap: Wrap) -> None:
    (model,), (alone,) = tables(1), tables(1)
    model.weight.requires_grad = False
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
    model.weight.requires_grad = True
    loss_of(model, looked_up(hvd.rank(), 0)).backward()  # Before there is a hook: `step` reduces it.
    optimizer.step()
    single = torch.optim.SGD(alone.parameters(), lr=0.5)
    loss_of(alone, torch.cat([looked_up(rank, 0) for rank in range(hvd.size())])).backward()
    single.step()
    toy.check_close(toy.parameters_of(model), toy.parameters_of(alone))


def test_only_distinct_rows_are_sent(wrap: Wrap) -> None:
    """50,000 look-ups of 1,000 rows in a table of 100,000 count as a thousand rows on each rank."""
    table = nn.Embedding(100_000, 64, sparse=True)
    optimizer = wrap(torch.optim.SGD(table.parameters(), lr=0.1), [("table", table.weight)])
    rows = torch.randperm(100_000, generator=torch.Generator().manual_seed(hvd.rank()))[:1000]
    before = engine.counters()["bytes"]
    table(rows[torch.randint(0, 1000, (50_000,))]).sum().backward()
    distinct = 1000 * (64 * 4 + 8)
    engine.barrier()  # an entry is counted after its operations are done
    sent = engine.counters()["bytes"] - before
    optimizer.step()
    gradient = table.weight.grad
    assert gradient is not None and 1000 <= gradient._nnz() <= 1000 * hvd.size()
    assert 0.99 * hvd.size() * distinct < sent < 1.01 * hvd.size() * distinct, (sent, distinct)


def test_a_handle_is_also_what_horovod_returns() -> None:
    mine = torch.sparse_coo_tensor(torch.tensor([[hvd.rank()]]), torch.ones(1), (hvd.size(),))
    handles = [hvd.sparse_allreduce_async(mine, name=f"called.{k}", op=hvd.Sum) for k in range(2)]
    assert callable(handles[0])
    for got in (handles[0](), hvd.synchronize(handles[1]), handles[1]()):
        assert got.to_dense().tolist() == [1] * hvd.size()
