"""What is measured: one class per contender, each an in-place float32 sum over all ranks."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Prepared = tuple[Values, Callable[[], Any]]
"""The numbers, which a caller may overwrite, and the call that sums them over the ranks."""


class Backend(ABC):
    """A contender on one rank."""

    cases: tuple[str, ...] = ("private",)

    @abstractmethod
    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        """Join the other ranks. `largest`: bytes of the largest message."""

    @abstractmethod
    def prepare(self, case: str, nbytes: int) -> Prepared:
        """Return a tensor of that many bytes, never used before, and the call that reduces it."""

    @abstractmethod
    def close(self) -> None:
        """Leave in order."""


class EngineBackend(Backend):
    """`engine.allreduce_`, named, as a training loop calls it."""

    cases = ("private", "shared")

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._engine = importlib.import_module("engine")
        self._engine.init()
        if (self._engine.rank(), self._engine.size()) != (rank, ranks):
            raise RuntimeError(
                f"the engine is rank {self._engine.rank()} of {self._engine.size()}, not {rank} of {ranks}"
            )
        self._shared: memoryview = importlib.import_module("engine.runtime").engine().share(largest)

    def prepare(self, case: str, nbytes: int) -> Prepared:
        import torch

        count = nbytes // 4
        if case == "shared":
            tensor = torch.frombuffer(self._shared, dtype=torch.float32, count=count)
        else:
            tensor = torch.empty(count, dtype=torch.float32)
        name = f"{case}.{nbytes}"
        allreduce, operation = self._engine.allreduce_, self._engine.Sum
        return tensor.numpy(), lambda: allreduce(tensor, op=operation, name=name)

    def close(self) -> None:
        self._engine.shutdown()


class CompressionBackend(EngineBackend):
    """`engine.allreduce_` with each `Compression`, of one private tensor, so that they can take turns quickly.

    For small whole numbers the sums are exact.
    """

    cases = ("none", "fp16", "bf16")
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
        return tensor.numpy(), lambda: allreduce(tensor, op=operation, name=name, compression=compression)


class GlooBackend(Backend):
    """`torch.distributed.all_reduce` on the gloo backend."""

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting_place}", rank=rank, world_size=ranks)

    def prepare(self, case: str, nbytes: int) -> Prepared:
        import torch
        import torch.distributed

        tensor = torch.empty(nbytes // 4, dtype=torch.float32)
        allreduce = torch.distributed.all_reduce
        return tensor.numpy(), lambda: allreduce(tensor)

    def close(self) -> None:
        import torch.distributed

        torch.distributed.destroy_process_group()


class MpiBackend(Backend):
    """`MPI_Allreduce` in place on a buffer, through mpi4py."""

    def __init__(self, rank: int, ranks: int, meeting_place: str, largest: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (rank, ranks):
            raise RuntimeError(f"MPI has {MPI.COMM_WORLD.size} ranks, not {ranks}")

    def prepare(self, case: str, nbytes: int) -> Prepared:
        values = np.empty(nbytes // 4, dtype=np.float32)
        buffer = [values, self._mpi.FLOAT]
        allreduce, in_place, operation = self._mpi.COMM_WORLD.Allreduce, self._mpi.IN_PLACE, self._mpi.SUM
        return values, lambda: allreduce(in_place, buffer, op=operation)

    def close(self) -> None:
        self._mpi.Finalize()


BACKENDS: dict[str, type[Backend]] = {
    "engine": EngineBackend,
    "compression": CompressionBackend,
    "gloo": GlooBackend,
    "mpi": MpiBackend,
}
