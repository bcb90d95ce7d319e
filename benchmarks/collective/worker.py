"""Rank of a contender. Started by `benchmarks.collective.contenders`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.collective import calls
from benchmarks.collective.backends import BACKENDS, CollectiveBackend
from benchmarks.collective.operations import MEMBERS, Prepared, Values, compute_expected
from benchmarks.common.worker import GroupWorker, Handler, WrongResultError

PERIOD = 1021
"""Length of the first call's pattern: prime, so that shifted or swapped chunks are noticed."""


class CollectiveRank:
    """Handlers of the requests to a rank."""

    def __init__(self, worker: GroupWorker, backend: CollectiveBackend) -> None:
        self._worker = worker
        self._backend = backend
        self._kept: tuple[tuple[str, int], Prepared] | None = None

    def time_first_call(self, request: dict[str, Any]) -> float:
        """Call once on new tensors of a new size, check every element, and return the seconds of the call."""
        case, nbytes = request["case"], int(request["bytes"])
        self._kept = None
        prepared = self._backend.prepare_any(case, nbytes)
        self._kept = ((case, nbytes), prepared)
        pattern = np.resize(np.arange(PERIOD, dtype=np.float32), prepared.values.size)
        np.multiply(pattern, self._worker.rank + 1, out=prepared.values)
        self._worker.meet()
        start = time.perf_counter()
        returned = prepared.run()
        seconds = time.perf_counter() - start
        results, wanted = prepared.results(returned), self._compute_expected(prepared, pattern)
        if len(results) != len(wanted) or not all(map(np.array_equal, results, wanted)):
            raise WrongResultError(f"first call, {self._describe_mismatch(case, nbytes)}")
        return seconds

    def time_block(self, request: dict[str, Any]) -> list[float]:
        """Return the seconds of each call. The tensors are written before each, as in a backward pass."""
        case, nbytes, warmup, iterations = (
            request["case"],
            int(request["bytes"]),
            request["warmup"],
            request["iterations"],
        )
        if self._kept is None or self._kept[0] != (case, nbytes):
            self._kept = ((case, nbytes), self._backend.prepare_any(case, nbytes))
        prepared = self._kept[1]
        ones = np.ones(MEMBERS * self._worker.ranks, dtype=np.float32)  # with equal elements, a few samples suffice
        wanted = _get_probes(self._compute_expected(prepared, ones))
        values, run, results = prepared.values, prepared.run, prepared.results
        meet, clock, own = self._worker.meet, time.perf_counter, self._worker.rank + 1
        samples = []
        for _ in range(warmup + iterations):
            values.fill(own)
            meet()
            start = clock()
            returned = run()
            samples.append(clock() - start)
            if _get_probes(results(returned)) != wanted:
                raise WrongResultError(self._describe_mismatch(case, nbytes))
            del returned  # freed here, not while the next call is timed
        return samples[warmup:]

    def _compute_expected(self, prepared: Prepared, pattern: Values) -> list[Values]:
        rank, ranks = self._worker.rank, prepared.ranks or range(self._worker.ranks)
        if rank not in ranks:
            return [pattern * (rank + 1)]
        return compute_expected(prepared.operation, pattern, ranks.index(rank), [r + 1 for r in ranks])

    def _describe_mismatch(self, case: str, nbytes: int) -> str:
        return f"{case}, {nbytes} bytes: not the result over {self._worker.ranks} ranks"


def _get_probes(tensors: Sequence[Values]) -> tuple[float, float, float]:
    """Return the first element of the first tensor, the middle one of the middle one, and the last one of the last."""
    first, middle, last = tensors[0], tensors[len(tensors) // 2], tensors[-1]
    return float(first[0]), float(middle[middle.size // 2]), float(last[-1])


def main() -> None:
    """Join the contender's ranks and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", choices=sorted(BACKENDS), required=True)
    parser.add_argument("--largest", type=int, required=True)
    worker = GroupWorker(parser)
    try:
        backend = BACKENDS[worker.options.contender](
            worker.rank, worker.ranks, worker.options.socket + ".meeting", worker.options.largest
        )
    except BaseException:
        worker.report_failure()
        raise
    rank = CollectiveRank(worker, backend)
    handlers: dict[str, Handler] = {"first": rank.time_first_call, "block": rank.time_block, "idle": calls.measure_idle}
    if worker.options.contender == "engine":
        hooks = calls.Hooks(worker)
        handlers |= {
            "hook": hooks.submit,
            "steps": hooks.time_steps,
            "call": calls.AsyncCall(worker, "allreduce_async_"),
            "call_new": calls.AsyncCall(worker, "allreduce_async"),
            "call_alone": calls.AsyncCall(worker, "allreduce_async_", alone=True),
        }
    worker.serve(handlers)
    backend.close()


if __name__ == "__main__":
    main()
