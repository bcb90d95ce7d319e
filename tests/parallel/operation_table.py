"""Effect of each operation on each dtype: the words of docs/operations.md and the tests' NumPy reference.

A dtype is named as users name it. bfloat16 is stored as uint16, since NumPy has no such dtype. Run this file to write
the page anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Reduce = Callable[[str, Sequence[Array]], Array]  # from dtype and the ranks' values to the accumulator
PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
OPS = ("Sum", "Average", "Min", "Max", "Product")
HALVES, FLOATS = ("float16", "bfloat16"), ("float32", "float64")
INTEGERS, BOOL = ("int8", "uint8", "int16", "uint16", "int32", "int64"), ("bool",)
MOVED = ("uint32", "uint64", "complex64", "complex128")  # NumPy's; torch has more
DTYPES = (*HALVES, *FLOATS, *INTEGERS, *BOOL)


def stored(dtype: str) -> np.dtype[np.generic]:
    """NumPy dtype that holds the bits of `dtype`."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def bfloat16_of(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def widen(dtype: str, x: Array) -> Array:
    """Convert to the dtype in which sums are kept."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32) if dtype == "float16" else x


def narrow(dtype: str, x: Array) -> Array:
    """Round to the dtype, once."""
    return bfloat16_of(x) if dtype == "bfloat16" else x.astype(stored(dtype))


def saturate(x: NDArray[np.float64], kind: np.dtype[np.generic]) -> Array:
    """Truncate toward zero, and clamp to the dtype's range."""
    limits = np.iinfo(kind)
    low, high = float(limits.min), float(limits.max)  # int64: high is 2**63, just out of range
    result = np.clip(np.trunc(x), low, np.nextafter(high, 0) if kind == np.int64 else high).astype(kind)
    return np.where(x >= high, limits.max, result).astype(kind)


def scale(dtype: str, x: Array, factor: float) -> Array:
    """Multiply inputs by a factor."""
    if factor == 1.0:
        return x
    if dtype in INTEGERS:
        return saturate(x.astype(np.float64) * factor, x.dtype)
    wide = widen(dtype, x)
    return narrow(dtype, wide * wide.dtype.type(factor))


def _fold(step: Callable[[Array, Array], Array]) -> Reduce:
    def reduce(dtype: str, values: Sequence[Array]) -> Array:
        total = widen(dtype, values[0]).copy()
        for value in values[1:]:
            total = step(total, widen(dtype, value))
        return total

    return reduce


def _average(dtype: str, values: Sequence[Array]) -> Array:
    total = sums(dtype, values)
    return total / total.dtype.type(len(values))


def _integer_average(dtype: str, values: Sequence[Array]) -> Array:
    total = sums(dtype, [value.astype(np.int64) for value in values])
    down = total // len(values)
    quotient = down + ((down < 0) & (down * len(values) != total))
    return quotient.astype(stored(dtype))


sums = _fold(lambda a, b: a + b)
products = _fold(lambda a, b: a * b)
# Of equal values, -0 and +0 included, the later rank's wins; a NaN stays.
least = _fold(lambda a, b: np.where((a < b) | (a != a), a, b))
greatest = _fold(lambda a, b: np.where((a > b) | (a != a), a, b))
either = _fold(lambda a, b: a | b)
both = _fold(lambda a, b: a & b)


@dataclass(frozen=True)
class Cell:
    """One operation on one group of dtypes."""

    text: str
    reduce: Reduce | None  # None if refused


TABLE: dict[tuple[str, ...], dict[str, Cell]] = {
    HALVES: {
        "Sum": Cell("added in float32, rounded once", sums),
        "Average": Cell("added and divided in float32, rounded once", _average),
        "Min": Cell("the least; NaN if any is NaN", least),
        "Max": Cell("the greatest; NaN if any is NaN", greatest),
        "Product": Cell("multiplied in float32, rounded once", products),
    },
    FLOATS: {
        "Sum": Cell("added in the dtype", sums),
        "Average": Cell("added, then divided by the world size, in the dtype", _average),
        "Min": Cell("the least; NaN if any is NaN", least),
        "Max": Cell("the greatest; NaN if any is NaN", greatest),
        "Product": Cell("multiplied in the dtype", products),
    },
    INTEGERS: {
        "Sum": Cell("wraps", sums),
        "Average": Cell("the exact sum (of int64: it wraps), divided, truncated toward zero", _integer_average),
        "Min": Cell("the least", least),
        "Max": Cell("the greatest", greatest),
        "Product": Cell("wraps", products),
    },
    BOOL: {
        "Sum": Cell("true on any rank", either),
        "Average": Cell("refused: `UnsupportedTensorError`", None),
        "Min": Cell("true on all ranks", both),
        "Max": Cell("true on any rank", either),
        "Product": Cell("true on all ranks", both),
    },
}
# Adasum has tests of its own (test_adasum.py): its result is no sum of equal bits, but a formula to be met.
ADASUM = {
    HALVES: "combined in float64, rounded by way of float32",
    FLOATS: "combined in float64, rounded once",
    INTEGERS: "refused: `UnsupportedTensorError`",
    BOOL: "refused: `UnsupportedTensorError`",
}
CELLS = {(dtype, op): cell for group, row in TABLE.items() for dtype in group for op, cell in row.items()}


def expected(dtype: str, op: str, values: Sequence[Array], prescale: float = 1.0, postscale: float = 1.0) -> Array:
    """Result of an allreduce of one array of each rank, in rank order."""
    reduce = CELLS[dtype, op].reduce
    assert reduce is not None, f"{op} of {dtype} is refused"
    with np.errstate(all="ignore"):
        total = reduce(dtype, [scale(dtype, value, prescale) for value in values])
        if postscale != 1.0:
            if dtype in INTEGERS:
                total = saturate(total.astype(np.float64) * postscale, total.dtype)
            else:
                total = total * total.dtype.type(postscale)
        return narrow(dtype, total)


def same(dtype: str, a: Array, b: Array) -> NDArray[np.bool_]:
    """Compare element by element: equal bits, or both NaN. Dtypes that are only moved need equal bits."""
    if dtype in MOVED:
        first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
        return (first == second).reshape(-1, stored(dtype).itemsize).all(axis=1)
    bits = f"u{stored(dtype).itemsize}"
    equal = np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)
    if dtype in (*HALVES, *FLOATS):
        wide_a, wide_b = widen(dtype, a), widen(dtype, b)
        return equal | ((wide_a != wide_a) & (wide_b != wide_b))
    return equal


NOTES = """
Values are combined in the order of the ranks, 0 first, for every element. So a result has the same bits on every
rank, whatever the fusion threshold, the chunk size, the kernels or the kind of store. Of tensors on GPUs that is a setting: "On GPUs" below.

`Average` divides by the number of ranks in the process set. A rank that contributes nothing to an operation counts as
the operation's identity (0, infinity, 1), and is counted in the divisor.

Overflow of a float is an infinity. Denormal numbers are kept. Of equal values (`-0` and `+0` too) `Min` and `Max`
take the later rank's. Only the sign and payload of a NaN are left open.

`prescale_factor` multiplies every rank's values before they are combined, and rounds to the dtype: in float32 for
float16, bfloat16 and float32 (the factor is rounded to float32 too), in float64 for float64. `postscale_factor`
multiplies the result, after the division of `Average`, before the one rounding.

Factors on integers multiply in float64, truncate toward zero and saturate; above 2^53 an int64 loses its last bits. A
factor on bool is refused, and so is one that is not finite.

With `compression=Compression.fp16` or `bf16`, float32 and float64 are rounded to that dtype by every rank, reduced as
the table says for it, and widened: [compression.md](compression.md).

Any nonzero byte of a bool tensor is true; results are 0 or 1.

All other dtypes (complex, other integers, float8, big-endian arrays) are refused with `UnsupportedTensorError`, on the
rank that submits them, and the engine goes on; some of them can be moved, see below.

`Adasum` combines ranks in pairs, then pairs of pairs, by how far their tensors agree: what two of them share counts
once, what is orthogonal is added ([arXiv 2006.02924](https://arxiv.org/abs/2006.02924)).

```
adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b
```

- It takes 1, 2, 4, 8 .. ranks; among other numbers of ranks it is a `ValueError` on each, and nothing is sent.
- Each tensor has coefficients of its own, in a group, too. A tensor that is zero on a rank (or missing) leaves the
  others' as it is. A NaN on one rank makes the whole tensor NaN; an infinity spoils it with NaN and infinities.
- Every tensor of the tree is a weighted sum of the ranks' tensors. So the engine adds up the inner products of each two
  ranks' tensors in float64, gets the weights from these, and makes one weighted sum, which it rounds at the end. It
  takes no memory beside the tensors but 8 bytes for each two ranks and each tensor.
- The engine takes the sum of some ranks' tensors for zero where these cancel to within 2^-24 of their norms, the
  resolution of float32: which way the rest points is chance, and the formula would follow it.
- The same bits on every rank, alone, fused or in a group, whatever the chunk size or the kernels.
- `prescale_factor` and `postscale_factor` multiply the weights, and round nothing by themselves.
- Compared with `Sum` every element travels twice. It does not compress.

`reducescatter` gives each rank its rows of what `allreduce` gives, bit by bit ([on GPUs](gpu.md) sums of floats may differ in the last
ones); it has no `Adasum`. The rows are
divided in rank order; where they do not divide evenly, the first ranks have one more.

`broadcast`, `allgather`, `alltoall` and `grouped_allgather` copy bytes, whatever these mean: of the same dtypes, and of
uint32, uint64, complex64 and complex128, and of complex32 and the float8 types of torch. In a mismatch the elements of
a group that have one of these dtypes are told as one number. A torch without uint16, uint32 and uint64 (before 2.3)
has none to give.

## Gradients

In `engine.torch` gradients flow through the blocking collectives that return a new tensor. There are two conventions.
Horovod's holds by default, so that a script written for it trains with the same steps. The mathematical one gives the
gradient of the sum of all ranks' losses, as one process that computes all of them would have it; `N` is the number of
ranks in the process set, and "incoming" is what a rank's own loss asks of its output.

| collective | Horovod's gradient (default) | mathematical gradient |
|---|---|---|
| `allreduce` | the same allreduce of the incoming gradients | the same |
| `allgather` | this rank's rows of the average over ranks of the incoming gradients | this rank's rows of their sum: `N` times as much |
| `broadcast` | on the root the average over ranks of the incoming gradients; zero elsewhere | on the root their sum: `N` times as much; zero elsewhere |
| `alltoall` | the incoming gradient, sent back with the splits that were received | the same |
| `reducescatter`, `Sum` | an allgather of the incoming gradients, times `N` and the factors | without `N` |
| `reducescatter`, `Average` | an allgather of the incoming gradients, times the factors | divided by `N`, too |

Grouped forms have the gradients of their single ones. `Min`, `Max` and `Product` have none: `backward` raises. Gradients
of gradients flow as well, by the same table. The functions of `engine` itself, such as `engine.allgather`, have no
gradient.

```python
engine.torch.init(mathematical_gradients=True)            # for the whole job

with engine.torch.mathematical_gradients():               # or for what is called in here, in this thread
    everyone = engine.torch.allgather(embeddings)
```

The forward pass decides, wherever `backward` is called. A loss of all ranks' embeddings that each rank computes from an
`allgather` is the case to look at: `DistributedOptimizer` divides by `N` when it averages the ranks' gradients. With
mathematical gradients the step is that of one process on the mean of the ranks' losses. With Horovod's, what comes
through the allgather counts `N` times less than that.

## Process sets

Some of the ranks can communicate among themselves. Every rank of the world names the same sets in the same order,
also those that it is not in; then only the members call.

```python
import engine

engine.init(process_sets=[[0, 1]])                    # at once, or
odd = engine.add_process_set(range(1, engine.size(), 2))   # at any time
if odd.included():
    engine.barrier(process_set=odd)
engine.remove_process_set(odd)
```

Sets share nothing. One that waits for a rank keeps no other waiting, whichever ranks they have in common, and a name
can be in use in all of them at once. Roots and error messages have the ranks of the world; `odd.rank()` and
`odd.size()` count in the set, and so does `Average`. A rank that dies ends the world, sets included. When two ranks
wait for each other in two sets, whoever is overdue first is blamed.

A set costs each of its members a sleeping thread and some memory. Gradients in shared memory
(`gradient_as_bucket_view`) and `set_knobs` belong to all ranks, not to a set.

## Join

`engine.join()` is for ranks that have less to do than others, such as fewer batches. A rank that has joined submits
nothing, and takes part in all the others do: it contributes the identity of a reduction and no rows, and what it
would receive is dropped. The divisor of `Average` stays the number of ranks, so that the weight of a sample does not
depend on who has run out of them. `join` returns on all ranks when the last has joined, and says which that was: it
has made every step, so others take its parameters.

```python
for batch in batches:           # more on some ranks than on others
    train(batch)
last = engine.join()
engine.torch.broadcast_parameters(model.state_dict(), root_rank=last)
```

To `Adasum` it is a rank without anything to add: the result is that of the others. What the others do with a rank
that has joined as the root is refused on all of them. Whatever the rank itself submits while it has joined is refused
there. A rank that waits in `join` waits as long as the others go on; when nothing happens for `stall_limit`, those that
have not joined are named.

While some ranks have joined, a grouped reduce-scatter and `Adasum` of a group first tell them what the tensors are: 24
bytes each, in a broadcast. Nothing else changes, and while no rank has joined nothing does.

## Groups

`grouped_allreduce`, `grouped_allgather` and `grouped_reducescatter` take several tensors, of any dtypes, in one
request. Each result has the bits that the tensor's own `allreduce`, `allgather` or `reducescatter` gives; the cost of
a request is paid once.

All or nothing: a group runs when every rank has submitted all of it. Where ranks disagree on the number of tensors,
their order, a dtype or a shape (of an allgather: but for the rows), the whole group is a `MismatchError` on every
rank, no tensor has been written to, and the engine goes on. The error says what each rank sent: how many tensors, how
many elements of each dtype, and a digest of the shapes in order.

What is reduced in place must not overlap: a group whose tensors do is a `ValueError`. Two operations in place on one tensor
at the same time spoil it, and nothing can tell.

A gathered group costs a header of 16 bytes for each tensor and rank, fills each tensor up to 64 bytes on its way, and
is copied once more at the end, into results that are separate memory.

## Sparse tensors

`engine.torch.sparse_allreduce` and its asynchronous form take `torch.sparse_coo` tensors, hybrid ones too, and send
what is stored, in one request. Each rank first adds up the entries that it has several times, so a row that a batch
looks up a thousand times travels once: of an embedding of 100,000 rows, of which each rank has looked up 1,000, each
rank sends these 1,000 rows and their numbers. Every rank then adds up the entries of all ranks, in rank order.

| | |
|---|---|
| operations | `Sum`, and `Average`, which divides every entry by the world size; others are refused |
| result | coalesced: an entry for each index that any rank has, with the bits of the dense `allreduce` (but for the sign of a zero), the same on all ranks |
| float16, bfloat16 | a rank's own entries are added up in float32 and rounded, then those of the ranks in float32, rounded once |
| integers | a rank's own entries wrap; those of the ranks as in the table above |
| bool | `Sum` is true on any rank; `Average` is refused |
| nothing stored | fine, on any rank and on all |
| ranks that disagree on dtype, shape, sparse dimensions or operation, or submit a dense tensor | a `MismatchError` on every rank |
| indices that are not in the shape, or out of order in a tensor that says it is coalesced: torch does not check | a `MismatchError` on every rank, which says who submitted them and the first of them, before torch or another rank uses them |
| memory | every rank holds what all ranks have sent, and the sum |

## On GPUs

What `allreduce` makes of PyTorch's CUDA tensors depends on the setting `device_sums`, which is equal on all ranks. With `ordered` it is in
every row what the table above says, with the same bits as for tensors in the host's memory, whatever is fused. With `nccl`, the default,
NCCL makes the sums that it has, in an order and with roundings of its own; all ranks still get the same bits.

| dtype | operation | `device_sums=nccl` | `device_sums=ordered` |
|---|---|---|---|
| float32, float64 | `Sum` | added in the dtype, in NCCL's order | added in the dtype, in the order of the ranks |
| float32, float64 | `Average` | the same, then divided by the world size and rounded once more | the same, then divided in the dtype |
| float16 | `Sum` | added in float16, in NCCL's order, rounded at each addition | added in float32, in the order of the ranks, rounded once |
| float16 | `Average` | each rank's value divided and rounded, so that the sum does not overflow; then as `Sum` | added and divided in float32, rounded once |
| bfloat16 | `Sum` | added in bfloat16, in NCCL's order, rounded at each addition | added in float32, in the order of the ranks, rounded once |
| bfloat16 | `Average` | the same, then divided and rounded once more | added and divided in float32, rounded once |
| int8, uint8, int32, int64 | `Sum` | wraps: the bits of `ordered`, since no order matters | wraps |
| int16, uint16, bool | `Sum` | as `ordered`: NCCL has no such dtypes | as in the host's memory |
| all integers | `Average` | as `ordered`: NCCL's sum would wrap before it is divided | the exact sum (of int64: it wraps), divided, truncated toward zero |
| all | `Min`, `Max` | as `ordered`: NCCL's drop a NaN | NaN if any is NaN; of equal values the later rank's |
| all | `Product` | as `ordered` | multiplied in the order of the ranks; float16 and bfloat16 in float32, rounded once |
| all | `Adasum` | refused | refused |

A `nan` or an infinity in a sum comes out as one in both. A sum with `compression` goes by the row of the dtype that travels. What NCCL's
order is depends on the number of ranks, its version, the network, and on what else travels in the same entry: [gpu.md](gpu.md) says when two
runs have equal bits all the same. `ordered` sends as many bytes as NCCL's rings do, in an exchange, a reduction and a gathering, one after the other, so it takes longer.
"""  # noqa: E501


def page() -> str:
    """Text of docs/operations.md."""
    columns = ["dtype", *(f"`{op}`" for op in (*OPS, "Adasum"))]
    cells = [[", ".join(group), *(row[op].text for op in OPS), ADASUM[group]] for group, row in TABLE.items()]
    header = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    rows = [f"| {' | '.join(each)} |" for each in cells]
    what = (
        "What `allreduce` and `reducescatter` compute. The tests expect what this table says: both are made of one. "
        "The functions of `engine`\nreturn values without a graph for every kind of tensor; those of `engine.torch` "
        "are differentiable."
    )
    title = f"# Operations\n\n{what}"
    return "\n\n".join([title, "\n".join(header + rows), NOTES.lstrip()])


if __name__ == "__main__":
    PAGE.write_text(page())
