"""One rank of a contender. Started by `benchmarks.collective.contenders`."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.collective import calls
from benchmarks.collective.backends import BACKENDS, Backend, Prepared
from benchmarks.common.worker import Worker

PERIOD = 1021
"""Length of the pattern of the first call: prime, so that shifted or swapped chunks are noticed."""


class WrongSumError(RuntimeError):
    """A contender returned something else than the sum over all ranks."""


class Rank:
    """The requests that a rank answers."""

    def __init__(self, worker: Worker, backend: Backend) -> None:
        self._worker = worker
        self._backend = backend
        self._kept: tuple[tuple[str, int], Prepared] | None = None
        self._total = worker.ranks * (worker.ranks + 1) // 2

    def first(self, request: dict[str, Any]) -> float:
        """Reduce a new tensor of a new size once, check every element, and return the seconds of the call."""
        case, nbytes = request["case"], int(request["bytes"])
        self._kept = None
        prepared = self._backend.prepare(case, nbytes)
        self._kept = ((case, nbytes), prepared)
        values, run = prepared
        pattern = np.resize(np.arange(PERIOD, dtype=np.float32), values.size)
        np.multiply(pattern, self._worker.rank + 1, out=values)
        self._worker.meet()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        if not np.array_equal(values, pattern * self._total):
            raise WrongSumError(f"first call, {case}, {nbytes} bytes: not the sum over {self._worker.ranks} ranks")
        return seconds

    def block(self, request: dict[str, Any]) -> list[float]:
        """Return the seconds of each call. The tensor is written before each, as a backward pass would have."""
        case, nbytes, warmup, iterations = (
            request["case"],
            int(request["bytes"]),
            request["warmup"],
            request["iterations"],
        )
        if self._kept is None or self._kept[0] != (case, nbytes):
            self._kept = ((case, nbytes), self._backend.prepare(case, nbytes))
        values, run = self._kept[1]
        meet, clock, own, total, middle = (
            self._worker.meet,
            time.perf_counter,
            self._worker.rank + 1,
            self._total,
            values.size // 2,
        )
        samples = []
        for _ in range(warmup + iterations):
            values.fill(own)
            meet()
            start = clock()
            run()
            samples.append(clock() - start)
            if not values[0] == values[middle] == values[-1] == total:
                raise WrongSumError(f"{case}, {nbytes} bytes: not the sum over {self._worker.ranks} ranks")
        return samples[warmup:]


def main() -> None:
    """Join the contender's ranks and answer requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", choices=sorted(BACKENDS), required=True)
    parser.add_argument("--largest", type=int, required=True)
    worker = Worker(parser)
    try:
        backend = BACKENDS[worker.options.contender](
            worker.rank, worker.ranks, worker.options.socket + ".meeting", worker.options.largest
        )
    except BaseException:
        worker.fail()
        raise
    rank = Rank(worker, backend)
    handlers = {"first": rank.first, "block": rank.block, "idle": calls.idle}
    if worker.options.contender == "engine":
        handlers |= {"hook": calls.Hook(worker), "call": calls.AsyncCall(worker)}
    worker.serve(handlers)
    backend.close()


if __name__ == "__main__":
    main()
