"""Random programs of operations: their parts, their execution on a rank, and their results by NumPy.

A program is a list of phases. In a phase every rank submits the same operations, each rank in an order of its own, the
last of them perhaps by a blocking call; it waits for a result then, or some phases later, or never. A new kind of
operation is a row of `KINDS`. Runs on every rank, so hypothesis, which draws, comes as the argument `st`.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import engine

from ..adasum_reference import adasum
from ..waiting import be_late
from .adasum_vectors import check_rounded, vector
from .arrays import check_equal, numbers
from .halves import compressed
from .operation_table import BOOL, CELLS, DTYPES, FLOATS, MOVED, OPS, Array, expected

PLAIN = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")  # NumPy lacks bfloat16; reduce_program tests it
ANYTHING = (*PLAIN, *MOVED)  # dtypes of operations without a kernel
ADASUM = ("float16", "float32", "float64")
ROWS = (0, 1, 2, 3, 5, 16, 33, 1000, 20_001, 70_001)
RESTS = ((), (1,), (3,), (0,), (2, 5), (3, 1, 2))
SMALLEST_CHUNK = 1 << 16  # bytes; smaller values count as this
CHUNKS = (4096, 5000, 1 << 16, SMALLEST_CHUNK + 1, 100_001, 131_071, (1 << 19) + 7, (1 << 20) - 1)
LAYOUTS = ("C", "F", "steps", "backwards", "misaligned")
WIRES = (None, "bfloat16", "float16")
PAUSES = (0.0, 0.0, 0.0, 0.0001, 0.002)


@dataclass(frozen=True)
class Operation:
    """One collective, the same on all ranks. The fields that count depend on the kind."""

    kind: str
    name: str | None
    # One tensor, several for a group; a row's shape where each rank has its own number of rows
    members: tuple[tuple[str, tuple[int, ...]], ...] = ()
    op: str = "Sum"
    scales: tuple[float, float] = (1.0, 1.0)
    root: int = 0
    rows: tuple[int, ...] = ()  # rows of each rank in an allgather
    splits: tuple[tuple[int, ...], ...] = ()  # splits of each rank in an all-to-all
    in_place: bool = False
    odd: int | None = None  # a rank whose tensors have one dimension more: every rank gets a `MismatchError`
    wire: str | None = None  # wire dtype of a reduction that is `tuned`; several are compared with the result
    ranks: tuple[int, ...] = ()  # ranks of a process set, in which all other rank numbers count; empty: all ranks
    seed: int = 0  # seed of the values

    @property
    def tuned(self) -> bool:
        """Return whether the operation may be compressed as the knob says."""
        return self.seed % 2 == 1 and self.kind in REDUCTIONS and self.op in OPS


@dataclass(frozen=True)
class Phase:
    """Operations that all ranks submit before any of them has to wait."""

    operations: tuple[Operation, ...]
    # Seed of each rank's order and manner; 0 submits in order, with plain tensors, and waits at the end
    manners: tuple[int, ...]
    knobs: Mapping[str, Any] = field(default_factory=dict)  # set by rank 0 before
    step: bool = False
    joined: tuple[int, ...] = ()  # ranks that join instead; the others do when they have submitted everything


Program = tuple[Phase, ...]


@dataclass(frozen=True)
class Kind:
    """One kind of operation."""

    # Function of `st` and the world size: strategies for the fields of an `Operation` that count
    fields: Callable[[Any, int], dict[str, Any]]
    # Function of operation, tensors, rank and whether to block: the result then, else a handle
    start: Callable[[Operation, list[Array], int, bool], Any]
    # Function of operation, tensors of all ranks and rank: this rank's result, one array for each tensor
    results: Callable[[Operation, list[list[Array]], int], list[Array]]
    shared: bool = True  # whether all ranks get the same
    # Function of a dtype, a result and the expected one; raises unless they agree
    check: Callable[[str, Array, Array], None] = check_equal
    pairs: bool = False  # whether it needs 1, 2, 4, 8 .. ranks


# ---- what can be drawn


def _shapes(st: Any) -> Any:
    return st.one_of(st.just(()), st.builds(lambda rows, rest: (rows, *rest), st.sampled_from(ROWS), _rests(st)))


def _rests(st: Any) -> Any:
    return st.sampled_from(RESTS)


def _one(st: Any, shapes: Any, dtypes: tuple[str, ...] = PLAIN) -> Any:
    """Members of an operation on one tensor."""
    return st.tuples(st.tuples(st.sampled_from(dtypes), shapes))


def _many(st: Any, shapes: Any, dtypes: tuple[str, ...] = PLAIN) -> Any:
    return st.lists(st.tuples(st.sampled_from(dtypes), shapes), min_size=1, max_size=6).map(tuple)


def _reduction(st: Any, members: Any) -> dict[str, Any]:
    factors = st.one_of(st.just(1.0), st.sampled_from((0.5, -2.0, 3.0, 0.0, 1e-3)), st.floats(-1e6, 1e6, width=32))
    return {
        "members": members,
        "op": st.sampled_from(OPS),
        "scales": st.one_of(st.just((1.0, 1.0)), st.tuples(factors, factors)),
        "in_place": st.booleans(),
    }


def _splits(st: Any, size: int) -> Any:
    counts = st.one_of(st.integers(0, 4), st.sampled_from((0, 0, 33, 1001, 20_001)))
    row = st.lists(counts, min_size=size, max_size=size).map(tuple)
    return st.lists(row, min_size=size, max_size=size).map(tuple)


def subsets(size: int) -> tuple[tuple[int, ...], ...]:
    """Process sets that programs use: overlapping ones, and ones that share no rank."""
    chosen = (range(0, size, 2), range(1, size, 2), range(size - 1), (0, size - 1))
    found = dict.fromkeys(tuple(sorted(set(each))) for each in chosen)
    return tuple(each for each in found if 0 < len(each) < size)


def program(st: Any, size: int, sets: tuple[tuple[int, ...], ...] = ()) -> Any:
    """Strategy of programs for `size` ranks; `sets` are the ranks of the process sets that they may use."""
    groups = st.sampled_from(((), (), *sets))
    joined = st.one_of(st.just(()), st.just(()), st.sets(st.integers(0, size - 1), max_size=size - 1).map(sorted))
    manner = st.one_of(st.just(0), st.integers(0, 2**32 - 1))
    phase = st.builds(
        Phase,
        operations=st.lists(
            st.tuples(st.sampled_from(sorted(KINDS)), groups).flatmap(lambda drawn: _operation(st, *drawn, size)),
            min_size=1,
            max_size=6,
        )
        .map(_distinct)
        .map(tuple),
        manners=st.tuples(*[manner] * size),
        knobs=st.one_of(
            st.just({}),
            st.fixed_dictionaries(
                {"chunk_bytes": st.sampled_from(CHUNKS)},
                optional={
                    "fusion_threshold": st.sampled_from((0, 1, 5000, 77_777, 333_333, 64 << 20)),
                    "cycle_time_ms": st.sampled_from((0.0, 0.1, 1.0, 5.0)),
                    "stores": st.sampled_from(("auto", "cached", "streaming")),
                    "compression": st.sampled_from(("none", "bf16", "fp16")),
                },
            ),
        ),
        step=st.booleans(),
        joined=joined.map(tuple),
    ).map(_without_joined)
    return st.lists(phase, min_size=1, max_size=5).map(tuple)


def _operation(st: Any, kind: str, ranks: tuple[int, ...], world: int) -> Any:
    size = len(ranks) or world
    if KINDS[kind].pairs and size & (size - 1):
        kind = "grouped_allreduce"
    return st.builds(
        Operation,
        kind=st.just(kind),
        name=st.sampled_from((None, "a", "b")),
        odd=st.one_of(st.none(), st.none(), st.none(), st.integers(0, size - 1)) if size > 1 else st.none(),
        ranks=st.just(ranks),
        seed=st.integers(0, 999),
        **KINDS[kind].fields(st, size),
    ).map(_allowed)


def _allowed(operation: Operation) -> Operation:
    """Nearest operation that the engine accepts on every rank."""
    changes: dict[str, Any] = {}
    dtypes = [dtype for dtype, _ in operation.members]
    if operation.op in OPS and any(dtype in DTYPES and CELLS[dtype, operation.op].reduce is None for dtype in dtypes):
        changes["op"] = "Max"
    if any(dtype in BOOL for dtype in dtypes):
        changes["scales"] = (1.0, 1.0)
    scalar = operation.kind == "allgather" and operation.members[0][1] == () and set(operation.rows) == {1}
    if not operation.members or scalar:
        changes["odd"] = None
    return Operation(**{**vars(operation), **changes})


def _without_joined(phase: Phase) -> Phase:
    """Nearest phase that does not need the ranks that join."""
    if not phase.joined:
        return phase
    size = len(phase.manners)
    left = min(set(range(size)) - set(phase.joined))
    operations = []
    for each in phase.operations:
        changes: dict[str, Any] = {"ranks": (), "scales": (1.0, 1.0)}
        if each.ranks:  # drawn for fewer ranks
            changes |= {"rows": tuple(each.rows[k % len(each.ranks)] for k in range(size)) if each.rows else ()}
            changes |= (
                {"splits": tuple(_stretched(each.splits[k % len(each.ranks)], size) for k in range(size))}
                if (each.splits)
                else {}
            )
        operation = replace(each, **changes)
        if KINDS[operation.kind].pairs and size & (size - 1):
            operation = replace(operation, kind="grouped_allreduce", op="Sum")
        if operation.root in phase.joined:
            operation = replace(operation, root=left)
        if operation.odd in phase.joined or len(phase.joined) == size - 1:
            operation = replace(operation, odd=None)  # no other rank is left to disagree with
        gone = set(phase.joined)
        operation = replace(
            operation,
            rows=tuple(0 if rank in gone else rows for rank, rows in enumerate(operation.rows)),
            splits=tuple((0,) * size if rank in gone else row for rank, row in enumerate(operation.splits)),
        )
        operations.append(_allowed(operation))
    return replace(phase, operations=tuple(operations))


def _stretched(row: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(row[k % len(row)] for k in range(size))


def _distinct(operations: list[Operation]) -> list[Operation]:
    """Make names unique within a phase, so that ranks may submit in any order; later phases use them again."""
    return [
        Operation(**{**vars(each), "name": None if each.name is None else f"{each.name}{place}"})
        for place, each in enumerate(operations)
    ]


def cut_kinds(program: Program) -> set[str]:
    """Kinds for which some rank submits more bytes than a chunk, while the chunk size in force is odd."""
    found: set[str] = set()
    chunk = 0
    for phase in program:
        chunk = phase.knobs.get("chunk_bytes", chunk)
        if chunk > SMALLEST_CHUNK and chunk % 2:
            ranks = range(len(phase.manners))
            found.update(each.kind for each in phase.operations if any(_bytes(each, rank) > chunk for rank in ranks))
    return found


def _bytes(operation: Operation, rank: int) -> int:
    """Bytes that a rank submits."""
    rows = operation.rows[rank % len(operation.rows)] if operation.rows else 1
    rows *= sum(operation.splits[rank % len(operation.splits)]) if operation.splits else 1
    return sum(rows * math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape in operation.members)


# ---- what the ranks call

SETS: dict[tuple[int, ...], engine.ProcessSet] = {}


def form_sets(size: int) -> None:
    """Form the process sets that programs use. Collective."""
    SETS.update({ranks: engine.add_process_set(ranks) for ranks in subsets(size)})


def where(operation: Operation) -> engine.ProcessSet:
    return SETS[operation.ranks] if operation.ranks else engine.global_process_set


def _how(operation: Operation) -> dict[str, Any]:
    return {
        "process_set": where(operation),
        "compression": engine.Compression.tuned if operation.tuned else engine.Compression.none,
    }


def _allreduce(operation: Operation, tensors: list[Array], rank: int, blocking: bool) -> Any:
    call = {
        (True, True): engine.allreduce_,
        (True, False): engine.allreduce,
        (False, True): engine.allreduce_async_,
        (False, False): engine.allreduce_async,
    }[blocking, operation.in_place]
    return call(tensors[0], getattr(engine, operation.op), operation.name, *operation.scales, **_how(operation))


def _grouped_allreduce(operation: Operation, tensors: list[Array], rank: int, blocking: bool) -> Any:
    call = {
        (True, True): engine.grouped_allreduce_,
        (True, False): engine.grouped_allreduce,
        (False, True): engine.grouped_allreduce_async_,
        (False, False): engine.grouped_allreduce_async,
    }[blocking, operation.in_place]
    return call(tensors, getattr(engine, operation.op), operation.name, *operation.scales, **_how(operation))


def _broadcast(operation: Operation, tensors: list[Array], rank: int, blocking: bool) -> Any:
    call = {
        (True, True): engine.broadcast_,
        (True, False): engine.broadcast,
        (False, True): engine.broadcast_async_,
        (False, False): engine.broadcast_async,
    }[blocking, operation.in_place]
    root = operation.ranks[operation.root] if operation.ranks else operation.root
    return call(tensors[0], root, operation.name, where(operation))


def _allgather(operation: Operation, tensors: list[Array], rank: int, blocking: bool) -> Any:
    return (engine.allgather if blocking else engine.allgather_async)(tensors[0], operation.name, where(operation))


def _alltoall(operation: Operation, tensors: list[Array], rank: int, blocking: bool) -> Any:
    return (engine.alltoall if blocking else engine.alltoall_async)(
        tensors[0], operation.splits[rank], operation.name, where(operation)
    )


def _reducescatter(operation: Operation, tensors: list[Array], rank: int, blocking: bool) -> Any:
    call = engine.reducescatter if blocking else engine.reducescatter_async
    return call(tensors[0], getattr(engine, operation.op), operation.name, *operation.scales, **_how(operation))


def _grouped_reducescatter(operation: Operation, tensors: list[Array], rank: int, blocking: bool) -> Any:
    call = engine.grouped_reducescatter if blocking else engine.grouped_reducescatter_async
    return call(tensors, getattr(engine, operation.op), operation.name, *operation.scales, **_how(operation))


def _barrier(operation: Operation, tensors: list[Array], rank: int, blocking: bool) -> Any:
    place = where(operation)
    return engine.barrier(operation.name, place) if blocking else place.engine.barrier(operation.name)


# ---- what comes out


def _combined(operation: Operation, brought: list[list[Array]], rank: int) -> list[Array]:
    return [adasum([each.astype(np.float64) for each in values]) for values in zip(*brought, strict=True)]


def _reduced(operation: Operation, brought: list[list[Array]], rank: int) -> list[Array]:
    wanted = []
    for (dtype, _), *values in zip(operation.members, *brought, strict=True):
        if operation.wire is not None and dtype in FLOATS:
            want = compressed(dtype, operation.wire, operation.op, values, *operation.scales)
            wanted.append(want.reshape(values[0].shape))
        else:
            wanted.append(expected(dtype, operation.op, values, *operation.scales))
    return wanted


def _received(operation: Operation, brought: list[list[Array]], rank: int) -> list[Array]:
    parts = []
    for sent, splits in zip(brought, operation.splits, strict=True):
        start = sum(splits[:rank])
        parts.append(sent[0][start : start + splits[rank]])
    return [np.concatenate(parts), np.array([splits[rank] for splits in operation.splits], np.int32)]


def _share(operation: Operation, brought: list[list[Array]], rank: int) -> list[Array]:
    return [np.array_split(each, len(brought))[rank] for each in _reduced(operation, brought, rank)]


KINDS: dict[str, Kind] = {
    "allreduce": Kind(lambda st, size: _reduction(st, _one(st, _shapes(st))), _allreduce, _reduced),
    "grouped_allreduce": Kind(lambda st, size: _reduction(st, _many(st, _shapes(st))), _grouped_allreduce, _reduced),
    "grouped_adasum": Kind(
        lambda st, size: {
            "members": _many(st, _shapes(st), ADASUM),
            "op": st.just("Adasum"),
            "in_place": st.booleans(),
        },
        _grouped_allreduce,
        _combined,
        check=partial(check_rounded, beside=8.0),  # a result may nearly cancel: the inputs are that large
        pairs=True,
    ),
    "broadcast": Kind(
        lambda st, size: {
            "members": _one(st, _shapes(st), ANYTHING),
            "root": st.integers(0, size - 1),
            "in_place": st.booleans(),
        },
        _broadcast,
        lambda operation, brought, rank: brought[operation.root],
    ),
    "allgather": Kind(
        lambda st, size: {
            "members": _one(st, _rests(st), ANYTHING),
            "rows": st.tuples(*[st.sampled_from(ROWS)] * size),
        },
        _allgather,
        lambda operation, brought, rank: [np.concatenate([np.atleast_1d(each[0]) for each in brought])],
    ),
    "alltoall": Kind(
        lambda st, size: {"members": _one(st, _rests(st), ANYTHING), "splits": _splits(st, size)},
        _alltoall,
        _received,
        shared=False,
    ),
    "reducescatter": Kind(
        lambda st, size: {
            **_reduction(st, _one(st, _shapes(st).filter(bool))),
            "in_place": st.just(False),
        },
        _reducescatter,
        _share,
        shared=False,
    ),
    "grouped_reducescatter": Kind(
        lambda st, size: {
            **_reduction(st, _many(st, _shapes(st).filter(bool))),
            "in_place": st.just(False),
        },
        _grouped_reducescatter,
        _share,
        shared=False,
    ),
    "barrier": Kind(lambda st, size: {}, _barrier, lambda operation, brought, rank: []),
}


REDUCTIONS = ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter", "grouped_adasum")


def tensors_of(operation: Operation, rank: int) -> list[Array]:
    """Tensors that `rank` submits."""
    arrays = []
    for place, (dtype, shape) in enumerate(operation.members):
        if operation.rows:
            shape = (operation.rows[rank], *shape)
        elif operation.splits:
            shape = (sum(operation.splits[rank]), *shape)
        if operation.rows and shape == (1,) and operation.odd is None:
            shape = ()  # a 0-d tensor counts as one row
        if rank == operation.odd:
            shape = (*shape, 2)
        draw = vector if operation.op == "Adasum" else numbers
        arrays.append(draw(dtype, shape, rank, operation.seed * 8 + place))
    return arrays


def identity_of(operation: Operation, array: Array) -> Array:
    """Array that a rank that has joined contributes in place of its own."""
    if operation.op in ("Sum", "Average", "Adasum"):
        return np.zeros_like(array)
    if operation.op == "Product":
        return np.ones_like(array)
    if array.dtype == bool:
        return np.full_like(array, operation.op == "Min")
    if array.dtype.kind == "f":
        return np.full_like(array, np.inf if operation.op == "Min" else -np.inf)
    limits = np.iinfo(array.dtype)
    return np.full_like(array, limits.max if operation.op == "Min" else limits.min)


def laid_out(array: Array, layout: str) -> Array:
    """Equal array with another layout in memory."""
    if array.ndim == 0:
        return array.copy()
    if layout == "F":
        return array.copy(order="F")
    if layout == "steps":
        wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2 + 1), array.dtype)
        view = wide[..., 1::2]
    elif layout == "backwards":
        view = np.zeros(array.shape, array.dtype)[::-1]
    elif layout == "misaligned":
        view = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    else:
        return array.copy()
    view[...] = array
    return view


# ---- a rank at work


@dataclass
class Flight:
    """An operation that this rank has submitted."""

    place: str
    operation: Operation
    tensors: list[Array]
    brought: list[list[Array]]
    handle: Any
    due: int = 0  # index of the phase after which this rank waits for it


@dataclass(frozen=True)
class Outcome:
    """Report of a rank: failures by operation, and digests of the results that all ranks share."""

    failures: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class Walk:
    """Execution of a program on one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.flights: list[Flight] = []
        self.outcome = Outcome()

    def run(self, phases: Program) -> Outcome:
        for number, phase in enumerate(phases):
            self.phase(number, phase)
        for flight in self.flights:
            self.land(flight)
        return self.outcome

    def phase(self, number: int, phase: Phase) -> None:
        dice = random.Random(phase.manners[self.rank])
        plain = phase.manners[self.rank] == 0
        if phase.knobs and self.rank == 0:
            engine.session.runtime.current_engine().set_knobs(**phase.knobs)
        order = [k for k, each in enumerate(phase.operations) if not each.ranks or self.rank in each.ranks]
        if self.rank in phase.joined:
            order = []
            self.join(number)
        if not plain:
            dice.shuffle(order)
        # The n-th unnamed operation of a kind meets the n-th of the other ranks, so these keep their order.
        unnamed = iter(sorted(k for k in order if phase.operations[k].name is None))
        order = [next(unnamed) if phase.operations[k].name is None else k for k in order]
        for k in order:
            layout = "C" if plain else dice.choice(LAYOUTS)
            blocking = not plain and k == order[-1] and dice.random() < 0.5
            if not plain:
                be_late(dice.choice(PAUSES))
            flight = self.bring(f"{number}.{k}", phase.operations[k], layout, blocking, phase.joined)
            flight.due = number if plain or blocking else number + dice.choice((0, 0, 1, 2))
            if not plain and flight.operation.name is None and dice.random() < 0.1:
                flight.handle = None  # its result is never waited for
            else:
                self.flights.append(flight)
        if phase.step:
            engine.session.runtime.current_engine().mark_step()
        due = [flight for flight in self.flights if flight.due <= number]
        if not plain:
            dice.shuffle(due)
        for flight in due:
            if not plain and dice.random() < 0.2:
                _ = flight.handle.done
            self.land(flight)
        self.flights = [flight for flight in self.flights if flight.due > number]
        if phase.joined and self.rank not in phase.joined:
            self.join(number)

    def join(self, number: int) -> None:
        self.outcome.digests[f"join {number}"] = str(engine.join())

    def place(self, operation: Operation) -> int:
        """This rank's number in the process set."""
        return operation.ranks.index(self.rank) if operation.ranks else self.rank

    def bring(
        self, place: str, operation: Operation, layout: str, blocking: bool, joined: tuple[int, ...] = ()
    ) -> Flight:
        named = [each for each in self.flights if each.operation.name == operation.name is not None]
        for flight in [each for each in named if each.operation.ranks == operation.ranks]:
            self.land(flight)  # a name can be in flight only once
            self.flights.remove(flight)
        brought = [tensors_of(operation, rank) for rank in range(len(operation.ranks) or self.size)]
        if operation.kind in REDUCTIONS:
            for rank in joined:
                brought[rank] = [identity_of(operation, each) for each in brought[rank]]
        me = self.place(operation)
        tensors = [laid_out(array, layout) for array in brought[me]]
        flight = Flight(place, operation, tensors, brought, None)
        start = KINDS[operation.kind].start
        if blocking:
            flight.handle = Blocked(lambda: start(operation, tensors, me, True))
        else:
            flight.handle = start(operation, tensors, me, False)
        return flight

    def land(self, flight: Flight) -> None:
        """Wait for an operation, and compare its result with NumPy's."""
        operation = flight.operation
        try:
            result = flight.handle.wait()
        except engine.errors.MismatchError as error:
            if operation.odd is None:
                self.outcome.failures[flight.place] = f"{operation}: {error}"
            else:
                self.compare(flight, flight.tensors, flight.brought[self.place(operation)])
            return
        if operation.odd is not None:
            self.outcome.failures[flight.place] = f"{operation}: no mismatch was found"
            return
        results = [] if result is None else list(result) if isinstance(result, list | tuple) else [result]
        kind = KINDS[operation.kind]
        for wire in WIRES if operation.tuned else (None,):  # the knob may have turned in flight: any wire is right
            self.outcome.failures.pop(flight.place, None)
            meant = replace(operation, wire=wire)
            self.compare(flight, results, kind.results(meant, flight.brought, self.place(operation)), kind.check)
            if flight.place not in self.outcome.failures:
                break
        if operation.in_place:
            if not all(got is given for got, given in zip(results, flight.tensors, strict=True)):
                self.outcome.failures[flight.place] = f"{operation}: the result is another tensor"
        else:
            self.compare(flight, flight.tensors, flight.brought[self.place(operation)])
        if kind.shared:
            whole = hashlib.blake2b(digest_size=8)
            for each in results:
                whole.update(each.tobytes())
            self.outcome.digests[flight.place] = whole.hexdigest()

    def compare(
        self,
        flight: Flight,
        got: list[Array],
        want: list[Array],
        check: Callable[[str, Array, Array], None] = check_equal,
    ) -> None:
        try:
            assert len(got) == len(want), f"{len(got)} tensors, expected {len(want)}"
            for a, b in zip(got, want, strict=True):
                check(str(np.asarray(a).dtype), np.asarray(a), b)
        except AssertionError as error:
            self.outcome.failures[flight.place] = f"{flight.operation}: {error}"


class Blocked:
    """Handle of a call that has blocked."""

    done = True

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        try:
            self.result = call()
        except engine.errors.MismatchError as error:
            self.error = error

    def wait(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


def problems(outcomes: list[Outcome]) -> list[str]:
    """Faults on any rank, or between ranks."""
    found = [f"rank {rank}, {text}" for rank, each in enumerate(outcomes) for text in each.failures.values()]
    for place in sorted({place for outcome in outcomes for place in outcome.digests}):
        digests = {outcome.digests[place] for outcome in outcomes if place in outcome.digests}
        if len(digests) > 1:
            found.append(f"operation {place}: ranks hold different bits")
    return found
