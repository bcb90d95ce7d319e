"""Warning about models that differ between ranks when training begins, as after a forgotten broadcast.

Ranks average gradients, not parameters. Without a warning, ranks that begin with different models would keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..collectives.adapters import adapter_of
from ..collectives.process_sets import ProcessSet
from ..errors import EngineError, MismatchError, NotInitializedError, UnsupportedTensorError
from ..native import handles, memory
from ..text import logs, readable


class FirstStep:
    """Comparison of the ranks' parameters by checksums, once and without blocking.

    A rank that has joined does not take part. A rank whose first step comes after a `join` does not begin, since the
    others may have compared theirs without it. This rank is one of the process set, whose ranks train one model.
    """

    def __init__(self, prefix: str, process_set: ProcessSet, broadcast: str) -> None:
        self._name = f"{prefix}first step"  # equal on all ranks, unique to the optimizer
        # Call that broadcasts the model of one rank, for the warning; `{root}` stands for it
        self._broadcast = broadcast
        self._engine = process_set.engine
        self._ranks = process_set.ranks
        self._first = process_set.rank() == 0
        self._joins = self._engine.joins
        self._handle: handles.Handle | None = None
        self._sums: NDArray[np.int64] = np.empty(0, np.int64)
        self._names: list[str] = []

    def send_checksums(self, parameters: dict[str, Any]) -> None:
        """Send checksums of the parameters, before the first step changes them."""
        if len(self._ranks) == 1 or self._engine.joins != self._joins or not parameters:
            return
        self._names = sorted(parameters)  # in one order on all ranks
        self._sums = np.array([compute_checksum(parameters[name]) for name in self._names], np.uint64).view(np.int64)
        with suppress(NotInitializedError):  # A step on gradients from before the engine's end needs no engine.
            self._handle = self._engine.allgather(self._sums, self._name)

    def tell(self) -> bool:
        """Log a warning if the ranks' checksums have arrived and differ. Return whether the comparison is over.

        Raises MismatchError if ranks have the same parameters under different names.
        """
        if self._handle is None:
            return True
        if not self._handle.done:
            return False
        try:
            self._handle.wait()
        except EngineError:
            return True  # The world has failed or ended; other operations will raise it.
        data, rows = self._handle.gathered
        by_rank = np.split(np.frombuffer(data, np.int64), np.cumsum(rows)[:-1])
        expect_one_order(self._names, by_rank, self._ranks)
        if self._first:
            self._log_differences(by_rank)
        return True

    def finish(self) -> None:
        """Wait for the ranks' checksums, if they were sent, and log a warning if they differ.

        For a framework whose steps run no Python: it is called before the first step, on all ranks.
        """
        if self._handle is not None:
            with suppress(EngineError):  # The world has failed or ended; other operations will raise it.
                self._handle.wait()
            self.tell()

    def _log_differences(self, by_rank: Sequence[NDArray[np.int64]]) -> None:
        """Log which parameters differ from those of the first rank; called only there."""
        odd = {
            rank: np.flatnonzero(sums != self._sums)
            for rank, sums in zip(self._ranks, by_rank, strict=True)
            if len(sums)  # empty from a rank that has joined
        }
        differing = sorted({int(index) for indices in odd.values() for index in indices})
        if not differing:
            return
        first = differing[0]
        ranks = [rank for rank, indices in odd.items() if first in indices]
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        logs.logger.warning(
            "the ranks' parameters differ in the first step: %r%s; %s %s not the values of rank %d. So ranks train "
            "different models: call %s before the first step. If this is intended, give "
            "DistributedOptimizer(check_parameters=False) to silence this warning",
            self._names[first],
            more,
            readable.format_ranks(ranks),
            "has" if len(ranks) == 1 else "have",
            self._ranks[0],
            self._broadcast.format(root=self._ranks[0]),
        )


def expect_one_order(names: Sequence[str], by_rank: Sequence[NDArray[Any]], ranks: Sequence[int]) -> None:
    """Raise MismatchError if two ranks have the same checksums in another order, and so would match wrong parameters.

    `by_rank` has each rank's checksums in the order of the names, empty from a rank that has joined; `ranks` has the
    rank of each entry.
    """
    there = [(rank, sums) for rank, sums in zip(ranks, by_rank, strict=True) if len(sums)]
    for rank, sums in there[1:]:
        odd = np.flatnonzero(sums != there[0][1])
        if len(odd) and np.array_equal(np.sort(sums), np.sort(there[0][1])):
            raise MismatchError(
                f"rank {rank} has the parameters of rank {there[0][0]} in another order: {names[odd[0]]!r} of "
                "one rank has another name on the other, and parameters are matched by name. Give DistributedOptimizer "
                "and broadcast_optimizer_state the names of the model's parameters, or make the optimizer with its "
                "parameters in the same order on all ranks"
            )


def compute_checksum(parameter: Any) -> int:
    """Return a checksum of a parameter's values; 0 if the engine cannot read it, such as a frozen one on a device."""
    try:
        return memory.checksum(adapter_of(parameter).as_input(parameter))
    except UnsupportedTensorError:
        return 0
