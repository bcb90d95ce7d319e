"""Backends: one class per contender, each with an in-place float32 sum over all ranks, and other operations."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.collective.operations import (
    EngineOperations,
    GlooOperations,
    MpiOperations,
    Operations,
    Prepared,
    Values,
    prepare_in_place,
)
from benchmarks.common import native


class CollectiveBackend(ABC):
    """Contender on one rank."""

    cases: tuple[str, ...] = ("private",)
    """Variants of the sum."""
    operations: Operations | None = None
    """Operations other than the sum."""

    @abstractmethod
    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        """Join the other ranks. `largest` is the size of the largest message in bytes."""

    @abstractmethod
    def prepare(self, case: str, nbytes: int) -> Prepared:
        """Return the sum of a new tensor of that many bytes."""

    def prepare_any(self, case: str, nbytes: int) -> Prepared:
        """Return a variant of the sum, or one of the other operations."""
        if case in self.cases or self.operations is None:
            return self.prepare(case, nbytes)
        return self.operations.prepare(case, nbytes)

    @abstractmethod
    def close(self) -> None:
        """Leave in order."""


class EngineCollectiveBackend(CollectiveBackend):
    """`engine.allreduce_` with a name, as a training loop calls it: of a torch tensor, of an array, and prepared."""

    cases = ("private", "array", "prepared", "shared")

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._engine = importlib.import_module("engine")
        self._engine.init()
        if (self._engine.rank(), self._engine.size()) != (rank, ranks):
            raise RuntimeError(
                f"the engine is rank {self._engine.rank()} of {self._engine.size()}, not {rank} of {ranks}"
            )
        self.operations = EngineOperations(ranks, self._engine)
        self._shared: memoryview = importlib.import_module("engine.session.runtime").current_engine().share(largest)

    def prepare(self, case: str, nbytes: int) -> Prepared:
        import torch

        count = nbytes // 4
        if case == "shared":
            tensor = torch.frombuffer(self._shared, dtype=torch.float32, count=count)
        else:
            tensor = torch.empty(count, dtype=torch.float32)
        name = f"{case}.{nbytes}"
        allreduce, operation, values = self._engine.allreduce_, self._engine.Sum, tensor.numpy()
        if case == "prepared":
            return prepare_in_place(values, self._engine.prepare_allreduce(tensor, op=operation, name=name))
        reduced = values if case == "array" else tensor
        return prepare_in_place(values, lambda: allreduce(reduced, op=operation, name=name))

    def close(self) -> None:
        self._engine.shutdown()


class CompressionBackend(EngineCollectiveBackend):
    """`engine.allreduce_` of one private tensor with each `Compression`, so that they can quickly take turns.

    Sums of small whole numbers are exact.
    """

    cases = ("none", "fp16", "bf16", "fp8")
    _tensor: Any = None

    def prepare(self, case: str, nbytes: int) -> Prepared:
        import torch

        if self._tensor is None or self._tensor.nbytes != nbytes:
            self._tensor = torch.empty(nbytes // 4, dtype=torch.float32)
        tensor = self._tensor
        allreduce, operation, compression = (
            self._engine.allreduce_,
            self._engine.Sum,
            getattr(self._engine.Compression, case),
        )
        name = f"{case}.{nbytes}"
        return prepare_in_place(
            tensor.numpy(), lambda: allreduce(tensor, op=operation, name=name, compression=compression)
        )


class GlooBackend(CollectiveBackend):
    """`torch.distributed.all_reduce` on the gloo backend."""

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=ranks)
        self.operations = GlooOperations(ranks)

    def prepare(self, case: str, nbytes: int) -> Prepared:
        import torch
        import torch.distributed

        tensor = torch.empty(nbytes // 4, dtype=torch.float32)
        allreduce = torch.distributed.all_reduce
        return prepare_in_place(tensor.numpy(), lambda: allreduce(tensor))

    def close(self) -> None:
        import torch.distributed

        torch.distributed.destroy_process_group()


class MpiBackend(CollectiveBackend):
    """`MPI_Allreduce` in place on a buffer, through mpi4py."""

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.operations = MpiOperations(ranks, MPI)
        if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (rank, ranks):
            raise RuntimeError(f"MPI has {MPI.COMM_WORLD.size} ranks, not {ranks}")

    def prepare(self, case: str, nbytes: int) -> Prepared:
        values = np.empty(nbytes // 4, dtype=np.float32)
        buffer = [values, self._mpi.FLOAT]
        allreduce, here, operation = self._mpi.COMM_WORLD.Allreduce, self._mpi.IN_PLACE, self._mpi.SUM
        return prepare_in_place(values, lambda: allreduce(here, buffer, op=operation))

    def close(self) -> None:
        self._mpi.Finalize()


class SocketsBackend(CollectiveBackend):
    """Transfer of the bytes of a sum, without the sum, between two hosts with equally many ranks, over bare sockets.

    Each host sends and receives as many bytes as a tensor has. Each of its ranks moves an equal part of them, in both
    directions at once. It has its own connection to the rank with the same local number on the other host.
    """

    TRIES = 1000
    LIMIT = 60.0

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        self._here = int(os.environ["LOCAL_WORLD_SIZE"])
        if ranks != 2 * self._here:
            raise RuntimeError(f"bare sockets connect two hosts, of {self._here} ranks each, not {ranks} ranks")
        self._rank, self._partner = rank, (rank + self._here) % ranks
        port = int(os.environ["MASTER_PORT"]) + int(os.environ["LOCAL_RANK"])
        self._socket = self._listen(port) if rank < self._partner else self._connect_to_partner(port)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._exchange = ctypes.CDLL(str(native.compile_source("exchange.c", shared=True))).exchange
        self._exchange.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._tries = 0 if ranks > len(os.sched_getaffinity(0)) > 1 else self.TRIES

    def prepare(self, case: str, nbytes: int) -> Prepared:
        values = np.empty(max(1, nbytes // 4 // self._here), dtype=np.float32)
        received = np.empty_like(values)
        exchange, number, tries = self._exchange, self._socket.fileno(), self._tries
        out, back, count = values.ctypes.data, received.ctypes.data, values.nbytes

        def run() -> None:
            if failed := exchange(number, out, back, count, tries):
                raise OSError(-failed, os.strerror(-failed))

        # The received data are those that the partner has sent.
        return Prepared(values, run, lambda _: [received], "broadcast", (self._partner, self._rank))

    def close(self) -> None:
        self._socket.close()

    def _listen(self, port: int) -> socket.socket:
        with socket.create_server((os.environ["MASTER_ADDR"], port)) as listener:
            listener.settimeout(self.LIMIT)
            return listener.accept()[0]

    def _connect_to_partner(self, port: int) -> socket.socket:
        deadline = time.monotonic() + self.LIMIT
        while True:
            try:
                return socket.create_connection((os.environ["MASTER_ADDR"], port), self.LIMIT)
            except ConnectionRefusedError:  # The partner does not listen yet.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def select_share(case: str, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks that reduce together with this one, or that reduce while this one is idle.

    >>> select_share("world", 3, 4), select_share("halves", 3, 4), select_share("half", 3, 4)
    ((0, 1, 2, 3), (2, 3), (0, 1))
    """
    middle = ranks // 2
    if case == "world":
        return tuple(range(ranks))
    return tuple(range(middle) if rank < middle or case == "half" else range(middle, ranks))


class Subsets(CollectiveBackend):
    """Sums over all ranks, over two halves of them at once, and over the first half while the other is idle."""

    cases = ("world", "halves", "half")

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        super().__init__(rank, ranks, meeting_place, largest)
        self._rank, self._ranks = rank, ranks

    def prepare(self, case: str, nbytes: int) -> Prepared:
        values = np.empty(nbytes // 4, dtype=np.float32)
        ranks = select_share(case, self._rank, self._ranks)
        if self._rank not in ranks:
            return prepare_in_place(values, lambda: None, ranks)
        return prepare_in_place(values, self.sum(values, case == "world"), ranks)

    @abstractmethod
    def sum(self, values: Values, world: bool) -> Callable[[], Any]:
        """Return the call that sums an array in place, over all ranks or over this rank's half."""


class EngineSubsets(Subsets, EngineCollectiveBackend):
    """Sums over process sets of the engine."""

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        super().__init__(rank, ranks, meeting_place, largest)
        halves = [self._engine.add_process_set(select_share("halves", first, ranks)) for first in (0, ranks - 1)]
        self._half = next(half for half in halves if half.included())

    def sum(self, values: Values, world: bool) -> Callable[[], Any]:
        import torch

        tensor, allreduce, operation = torch.from_numpy(values), self._engine.allreduce_, self._engine.Sum
        ranks, name = self._engine.global_process_set if world else self._half, f"sum.{values.size}"
        return lambda: allreduce(tensor, op=operation, name=name, process_set=ranks)


class GlooSubsets(Subsets, GlooBackend):
    """Sums over groups of `torch.distributed.new_group`."""

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        import torch.distributed

        super().__init__(rank, ranks, meeting_place, largest)
        middle = ranks // 2
        halves = [torch.distributed.new_group(select_share("halves", first, ranks)) for first in (0, ranks - 1)]
        self._half = halves[rank >= middle]

    def sum(self, values: Values, world: bool) -> Callable[[], Any]:
        import torch
        import torch.distributed

        tensor, allreduce, group = torch.from_numpy(values), torch.distributed.all_reduce, self._half
        return (lambda: allreduce(tensor)) if world else (lambda: allreduce(tensor, group=group))


class MpiSubsets(Subsets, MpiBackend):
    """Sums over communicators of `MPI_Comm_split`."""

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        super().__init__(rank, ranks, meeting_place, largest)
        self._half = self._mpi.COMM_WORLD.Split(rank >= ranks // 2, rank)

    def sum(self, values: Values, world: bool) -> Callable[[], Any]:
        here, buffer, operation = self._mpi.IN_PLACE, [values, self._mpi.FLOAT], self._mpi.SUM
        allreduce = (self._mpi.COMM_WORLD if world else self._half).Allreduce
        return lambda: allreduce(here, buffer, op=operation)


BACKENDS: dict[str, type[CollectiveBackend]] = {
    "engine": EngineCollectiveBackend,
    "compression": CompressionBackend,
    "gloo": GlooBackend,
    "mpi": MpiBackend,
    "mpich": MpiBackend,
    "impi": MpiBackend,
    "sockets": SocketsBackend,
    "engine-sets": EngineSubsets,
    "gloo-sets": GlooSubsets,
    "mpi-sets": MpiSubsets,
}
