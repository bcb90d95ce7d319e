"""Operations other than a single allreduce, for each contender, and their expected results.

A message's size is that of a rank's larger buffer: the output for an allgather, the input for all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
FLOAT = 4
MEMBERS = 16
"""Number of tensors of a group, all of one size."""

NAMES = (
    "allgather",
    "broadcast",
    "reducescatter",
    "alltoall",
    "grouped_allreduce",
    "grouped_allgather",
    "grouped_reducescatter",
    "barrier",
)


@dataclass(frozen=True)
class Prepared:
    """Operation on one rank, ready to be called repeatedly."""

    values: Values  # 1-d data to send, overwritten before each call; a group's tensors are consecutive parts of it
    run: Callable[[], Any]  # blocking call, which alone is timed
    results: Callable[[Any], Sequence[Values]]  # converts the result of `run` to the received tensors, as arrays
    operation: str = "allreduce"  # "allreduce", or one of `NAMES`
    ranks: tuple[int, ...] = ()  # ranks that take part; empty: all; on other ranks, `run` does nothing


def prepare_in_place(values: Values, run: Callable[[], Any], ranks: tuple[int, ...] = ()) -> Prepared:
    """Return an allreduce whose result replaces its values."""
    return Prepared(values, run, lambda _: [values], ranks=ranks)


def get_granularity(operation: str, ranks: int) -> int:
    """Return the bytes of which a message's size must be a multiple, so that all ranks' parts are equal.

    >>> get_granularity("alltoall", 2), get_granularity("grouped_allreduce", 2)
    (8, 128)
    """
    return FLOAT * ranks * (MEMBERS if operation.startswith("grouped_") else 1)


def split_members(operation: str, values: Values) -> list[Values]:
    """Return the input tensors of an operation, as parts of `values`."""
    return np.split(values, MEMBERS) if operation.startswith("grouped_") else [values]


def compute_expected(operation: str, pattern: Values, place: int, weights: Sequence[int]) -> list[Values]:
    """Return the tensors that the rank at `place` receives if the rank at place i sends `weights[i] * pattern`.

    The values are small whole numbers, so sums are exact. A broadcast comes from place 0.
    """
    kind = operation.removeprefix("grouped_")
    if kind == "barrier":
        return []
    return [_compute_expected_tensor(kind, tensor, place, weights) for tensor in split_members(operation, pattern)]


def _compute_expected_tensor(kind: str, pattern: Values, place: int, weights: Sequence[int]) -> Values:
    if kind == "allreduce":
        return pattern * sum(weights)
    if kind == "broadcast":
        return pattern * weights[0]
    if kind == "allgather":
        return np.concatenate([pattern * weight for weight in weights])
    part = np.split(pattern, len(weights))[place]
    return part * sum(weights) if kind == "reducescatter" else np.concatenate([part * weight for weight in weights])


@dataclass
class Operations(ABC):
    """Operations of one contender on one rank. Each method is named after the operation that it prepares."""

    ranks: int

    def prepare(self, operation: str, nbytes: int) -> Prepared:
        """Return the operation on new tensors."""
        count = nbytes // FLOAT
        method: Callable[[int], Prepared] = getattr(self, operation)
        return method(count // self.ranks if operation.endswith("allgather") else count)

    @abstractmethod
    def broadcast(self, count: int) -> Prepared:
        """Prepare a broadcast of `count` numbers, in place, from rank 0."""

    @abstractmethod
    def allgather(self, count: int) -> Prepared:
        """Prepare an allgather of `count` numbers of each rank."""

    @abstractmethod
    def reducescatter(self, count: int) -> Prepared:
        """Prepare a reducescatter of `count` numbers, of which each rank keeps an equal part."""

    @abstractmethod
    def alltoall(self, count: int) -> Prepared:
        """Prepare an alltoall of `count` numbers, an equal part for each rank."""

    @abstractmethod
    def grouped_allreduce(self, count: int) -> Prepared:
        """Prepare an allreduce of `count` numbers in `MEMBERS` tensors, in place."""

    @abstractmethod
    def grouped_allgather(self, count: int) -> Prepared:
        """Prepare an allgather of `count` numbers of each rank, in `MEMBERS` tensors."""

    @abstractmethod
    def grouped_reducescatter(self, count: int) -> Prepared:
        """Prepare a reducescatter of `count` numbers in `MEMBERS` tensors."""

    def barrier(self, count: int) -> Prepared:
        """Prepare a barrier, which has no size: `count` numbers are at hand, and nothing is received."""
        return Prepared(np.empty(count, np.float32), self.wait_in_barrier, lambda _: [], "barrier")

    @abstractmethod
    def wait_in_barrier(self) -> None:
        """Wait until every rank has come."""


@dataclass
class EngineOperations(Operations):
    """Blocking calls of `engine` with names. All but broadcast and the grouped allreduce return new tensors."""

    engine: Any

    def broadcast(self, count: int) -> Prepared:
        tensor, values = _make_tensor(count)
        call, name = self.engine.broadcast_, f"broadcast.{count}"
        return Prepared(values, lambda: call(tensor, 0, name=name), lambda _: [values], "broadcast")

    def allgather(self, count: int) -> Prepared:
        return self._prepare_single("allgather", count)

    def reducescatter(self, count: int) -> Prepared:
        return self._prepare_single("reducescatter", count, op=self.engine.Sum)

    def alltoall(self, count: int) -> Prepared:
        return self._prepare_single("alltoall", count)

    def grouped_allreduce(self, count: int) -> Prepared:
        tensor, values = _make_tensor(count)
        tensors = tensor.chunk(MEMBERS)
        call, operation, name = self.engine.grouped_allreduce_, self.engine.Sum, f"grouped_allreduce.{count}"
        results = split_members("grouped_allreduce", values)
        return Prepared(values, lambda: call(tensors, op=operation, name=name), lambda _: results, "grouped_allreduce")

    def grouped_allgather(self, count: int) -> Prepared:
        return self._prepare_group("grouped_allgather", count)

    def grouped_reducescatter(self, count: int) -> Prepared:
        return self._prepare_group("grouped_reducescatter", count, op=self.engine.Sum)

    def wait_in_barrier(self) -> None:
        self.engine.barrier()

    def _prepare_single(self, operation: str, count: int, **options: Any) -> Prepared:
        tensor, values = _make_tensor(count)
        call, name = getattr(self.engine, operation), f"{operation}.{count}"
        return Prepared(values, lambda: call(tensor, name=name, **options), lambda result: [result.numpy()], operation)

    def _prepare_group(self, operation: str, count: int, **options: Any) -> Prepared:
        tensor, values = _make_tensor(count)
        tensors = tensor.chunk(MEMBERS)
        call, name = getattr(self.engine, operation), f"{operation}.{count}"
        return Prepared(values, lambda: call(tensors, name=name, **options), _to_arrays, operation)


@dataclass
class GlooOperations(Operations):
    """Calls of `torch.distributed` on gloo, with preallocated outputs.

    Groups use its coalesced calls; reduce-scatter has none, so it uses one asynchronous call for each tensor.
    """

    def broadcast(self, count: int) -> Prepared:
        import torch.distributed

        tensor, values = _make_tensor(count)
        call = torch.distributed.broadcast
        return Prepared(values, lambda: call(tensor, 0), lambda _: [values], "broadcast")

    def allgather(self, count: int) -> Prepared:
        import torch.distributed

        return self._prepare_into("allgather", torch.distributed.all_gather_into_tensor, count, count * self.ranks)

    def reducescatter(self, count: int) -> Prepared:
        import torch.distributed

        return self._prepare_into("reducescatter", torch.distributed.reduce_scatter_tensor, count, count // self.ranks)

    def alltoall(self, count: int) -> Prepared:
        import torch.distributed

        return self._prepare_into("alltoall", torch.distributed.all_to_all_single, count, count)

    def grouped_allreduce(self, count: int) -> Prepared:
        import torch.distributed

        tensor, values = _make_tensor(count)
        tensors, results = list(tensor.chunk(MEMBERS)), split_members("grouped_allreduce", values)
        call = torch.distributed.all_reduce_coalesced
        return Prepared(values, lambda: call(tensors), lambda _: results, "grouped_allreduce")

    def grouped_allgather(self, count: int) -> Prepared:
        import torch
        import torch.distributed

        tensor, values = _make_tensor(count)
        tensors = list(tensor.chunk(MEMBERS))
        gathered = torch.empty(MEMBERS, self.ranks, count // MEMBERS)
        outputs = [[gathered[member, rank] for member in range(MEMBERS)] for rank in range(self.ranks)]
        results = _to_arrays(gathered.flatten(1))
        call = torch.distributed.all_gather_coalesced
        return Prepared(values, lambda: call(outputs, tensors), lambda _: results, "grouped_allgather")

    def grouped_reducescatter(self, count: int) -> Prepared:
        import torch
        import torch.distributed

        tensor, values = _make_tensor(count)
        outputs = torch.empty(MEMBERS, count // MEMBERS // self.ranks)
        pairs = list(zip(outputs, tensor.chunk(MEMBERS), strict=True))
        results = _to_arrays(outputs)
        call = torch.distributed.reduce_scatter_tensor

        def run() -> None:
            for work in [call(output, given, async_op=True) for output, given in pairs]:
                work.wait()

        return Prepared(values, run, lambda _: results, "grouped_reducescatter")

    def wait_in_barrier(self) -> None:
        import torch.distributed

        torch.distributed.barrier()

    def _prepare_into(self, operation: str, call: Any, count: int, received: int) -> Prepared:
        tensor, values = _make_tensor(count)
        output, result = _make_tensor(received)
        return Prepared(values, lambda: call(output, tensor), lambda _: [result], operation)


@dataclass
class MpiOperations(Operations):
    """Calls of Open MPI with preallocated outputs. A group is one non-blocking call per tensor, and one `Waitall`."""

    mpi: Any

    def broadcast(self, count: int) -> Prepared:
        values = np.empty(count, np.float32)
        call, buffer = self.mpi.COMM_WORLD.Bcast, [values, self.mpi.FLOAT]
        return Prepared(values, lambda: call(buffer, root=0), lambda _: [values], "broadcast")

    def allgather(self, count: int) -> Prepared:
        return self._prepare_into("allgather", "Allgather", count, count * self.ranks)

    def reducescatter(self, count: int) -> Prepared:
        return self._prepare_into("reducescatter", "Reduce_scatter_block", count, count // self.ranks, op=self.mpi.SUM)

    def alltoall(self, count: int) -> Prepared:
        return self._prepare_into("alltoall", "Alltoall", count, count)

    def grouped_allreduce(self, count: int) -> Prepared:
        values = np.empty(count, np.float32)
        results = split_members("grouped_allreduce", values)
        pairs = [(self.mpi.IN_PLACE, [tensor, self.mpi.FLOAT]) for tensor in results]
        return self._prepare_group("grouped_allreduce", "Iallreduce", values, pairs, results, op=self.mpi.SUM)

    def grouped_allgather(self, count: int) -> Prepared:
        return self._group_into("grouped_allgather", "Iallgather", count, count * self.ranks)

    def grouped_reducescatter(self, count: int) -> Prepared:
        received = count // self.ranks
        return self._group_into("grouped_reducescatter", "Ireduce_scatter_block", count, received, op=self.mpi.SUM)

    def wait_in_barrier(self) -> None:
        self.mpi.COMM_WORLD.Barrier()

    def _prepare_into(self, operation: str, method: str, count: int, received: int, **options: Any) -> Prepared:
        values, result = np.empty(count, np.float32), np.empty(received, np.float32)
        call = getattr(self.mpi.COMM_WORLD, method)
        sent, got = [values, self.mpi.FLOAT], [result, self.mpi.FLOAT]
        return Prepared(values, lambda: call(sent, got, **options), lambda _: [result], operation)

    def _group_into(self, operation: str, method: str, count: int, received: int, **options: Any) -> Prepared:
        values, results = np.empty(count, np.float32), split_members(operation, np.empty(received, np.float32))
        kind = self.mpi.FLOAT
        pairs = [
            ([sent, kind], [got, kind]) for sent, got in zip(split_members(operation, values), results, strict=True)
        ]
        return self._prepare_group(operation, method, values, pairs, results, **options)

    def _prepare_group(
        self, operation: str, method: str, values: Values, pairs: list[Any], results: list[Values], **options: Any
    ) -> Prepared:
        call, wait = getattr(self.mpi.COMM_WORLD, method), self.mpi.Request.Waitall
        return Prepared(values, lambda: wait([call(*pair, **options) for pair in pairs]), lambda _: results, operation)


def _make_tensor(count: int) -> tuple[Any, Values]:
    """Return a new tensor, and the same memory as an array."""
    import torch

    tensor = torch.empty(count, dtype=torch.float32)
    return tensor, tensor.numpy()


def _to_arrays(tensors: Any) -> list[Values]:
    return [tensor.numpy() for tensor in tensors]
