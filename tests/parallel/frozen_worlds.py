"""Worlds of threads with pretended GPUs, in which gradients travel in frozen batches or alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..waiting import be_late
from .pretended_gpu import Optimizer, PretendedGpu
from .thread_world import ThreadWorld

Entry = tuple[int, ...]
Passes = list[list[Entry]]
COUNTS = list(range(100, 140))  # elements of gradients, by which they are known
SMALL = 8192  # bytes of a threshold that fits a part of them


class World:
    """Ranks with a pretended GPU each."""

    def __init__(self, hosts: Sequence[int], **settings: Any) -> None:
        self.size = len(hosts)
        self.threads = ThreadWorld(self.size, hosts, **{"cycle_time_ms": 1.0, "fusion_threshold": SMALL, **settings})
        self.gpus = [PretendedGpu(each) for each in self.threads.engines]

    def run(self, program: Callable[..., Any]) -> list[Any]:
        """Run a program on each rank with the rank, its engine and its GPU; return the results."""
        return self.threads.run(lambda rank: program(rank, self.threads.engines[rank], self.gpus[rank]))


@contextmanager
def world(hosts: Sequence[int], **settings: Any) -> Iterator[World]:
    made = World(hosts, **settings)
    try:
        with made.threads:
            yield made
    finally:
        for gpu in made.gpus:
            gpu.end()


def backward(optimizer: Optimizer, order: Sequence[int], late: Callable[[], float]) -> None:
    """Run a backward pass that makes gradients in an order, each after `delay()` seconds."""
    for k in order:
        be_late(late())
        optimizer.bring(k)
    optimizer.finish()
