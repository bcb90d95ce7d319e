"""Runs the collective benchmark: every contender alive at once, asked in turn, in short blocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.collective.contenders import NAMES, Contender, GroupContender, started
from benchmarks.common import binding, environment, neighbours, progress, records
from benchmarks.common.stats import Summary
from benchmarks.common.tables import size

KIB, MIB = 1 << 10, 1 << 20
SIZES = (*(4**k for k in range(1, 13)), 64 * MIB, 100 * MIB, 256 * MIB)
BUSY_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 100 * MIB)
QUICK_SIZES = (4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 100 * MIB)
QUICK_BUSY_SIZES = (4 * KIB, MIB)
PARTS = ("sizes", "busy", "calls", "idle")


@dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    ranks: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = SIZES
    busy_sizes: tuple[int, ...] = BUSY_SIZES
    contenders: tuple[str, ...] = NAMES
    parts: tuple[str, ...] = PARTS
    rounds: int = 7
    block_seconds: float = 0.2
    least: int = 5
    most: int = 1000
    tensors: int = 2000
    steps: int = 40
    idle_seconds: float = 10.0

    @classmethod
    def quick(cls) -> Settings:
        """Return settings for a look of about a minute."""
        return cls(
            sizes=QUICK_SIZES,
            busy_sizes=QUICK_BUSY_SIZES,
            rounds=3,
            block_seconds=0.1,
            least=3,
            steps=10,
            idle_seconds=3.0,
        )

    def record(self) -> dict[str, Any]:
        """Return them for a JSON record."""
        return asdict(self)


Pair = tuple[Contender, str]


def run(settings: Settings, console: Console) -> Path:
    """Measure, and write `out/collective.json`."""
    before = environment.record()
    processors = binding.available()
    results: dict[str, Any] = {"sizes": [], "calls": [], "idle": []}
    begun = time.perf_counter()
    for ranks in settings.ranks:
        wanted = _sizes(settings)
        if not wanted and not _measures_engine(settings, ranks, processors):
            continue
        largest = max((nbytes for sizes in wanted.values() for nbytes in sizes), default=4 * KIB)
        with started(settings.contenders, ranks, largest, processors) as contenders:
            pairs = [(contender, case) for contender in contenders for case in contender.cases]
            steps = sum(len(sizes) for sizes in wanted.values()) * len(pairs) * (settings.rounds + 1)
            with progress.bar(console, f"{ranks} ranks", steps) as advance:
                for busy, sizes in wanted.items():
                    with neighbours.busy(processors) if busy else contextlib.nullcontext():
                        for nbytes in sizes:
                            results["sizes"] += _size(settings, pairs, ranks, nbytes, busy, advance)
            if _measures_engine(settings, ranks, processors):
                _engine_only(settings, contenders, ranks, results, console)
    results["seconds"] = round(time.perf_counter() - begun, 1)
    return records.write("collective", settings.record(), before, results)


def _sizes(settings: Settings) -> dict[bool, Sequence[int]]:
    """Sizes to measure with idle and with busy processors."""
    wanted: dict[bool, Sequence[int]] = {}
    if "sizes" in settings.parts:
        wanted[False] = settings.sizes
    if "busy" in settings.parts:
        wanted[True] = settings.busy_sizes
    return wanted


def _measures_engine(settings: Settings, ranks: int, processors: Sequence[int]) -> bool:
    """Say whether the cost of calls and of idleness is measured: where every rank has a processor."""
    return (
        "engine" in settings.contenders and ranks <= len(processors) and bool({"calls", "idle"} & set(settings.parts))
    )


def _rotated(pairs: Sequence[Pair], by: int) -> Iterator[Pair]:
    """Start each round elsewhere, so that nobody always runs after the same neighbour's cache and heat."""
    for i in range(len(pairs)):
        yield pairs[(i + by) % len(pairs)]


def _size(
    settings: Settings, pairs: Sequence[Pair], ranks: int, nbytes: int, busy: bool, advance: progress.Advance
) -> list[dict[str, Any]]:
    label = f"{size(nbytes)}{', busy' if busy else ''}"
    first: dict[Pair, float | None] = {}
    iterations: dict[Pair, int] = {}
    rounds: dict[Pair, list[list[float]]] = {pair: [] for pair in pairs}
    for pair in pairs:
        contender, case = pair
        first[pair] = None if busy else contender.first(case, nbytes)
        iterations[pair] = _iterations(settings, contender, case, nbytes)
        advance(label)
    for number in range(settings.rounds):
        for pair in _rotated(pairs, number):
            contender, case = pair
            rounds[pair].append(contender.block(case, nbytes, 2, iterations[pair]))
            advance(label)
    return [
        {
            "ranks": ranks,
            "busy": busy,
            "contender": contender.name,
            "case": case,
            "bytes": nbytes,
            "first": first[contender, case],
            "round_medians": [float(np.median(block)) for block in rounds[contender, case]],
            **Summary.of([seconds for block in rounds[contender, case] for seconds in block]).record(),
        }
        for contender, case in pairs
    ]


def _iterations(settings: Settings, contender: Contender, case: str, nbytes: int) -> int:
    """Warm up, and return how many iterations, writing the tensor included, fit into a block."""
    warmup = 20 if nbytes <= MIB else 5
    contender.block(case, nbytes, warmup, 1)
    start = time.perf_counter()
    contender.block(case, nbytes, 0, settings.least)
    each = (time.perf_counter() - start) / settings.least
    return int(min(settings.most, max(settings.least, settings.block_seconds / each)))


def _engine_only(
    settings: Settings, contenders: Sequence[Contender], ranks: int, results: dict[str, Any], console: Console
) -> None:
    engine = next(c for c in contenders if c.name == "engine")
    assert isinstance(engine, GroupContender)
    if "calls" in settings.parts:
        request = {"tensors": settings.tensors, "steps": settings.steps, "warmup": 5}
        for what in ("hook", "call"):
            console.print(f"{ranks} ranks: {settings.tensors} tensors, time in the {what}")
            answers = engine.group.ask({"do": what, **request})
            results["calls"] += [
                {"ranks": ranks, "what": what, "rank": rank, "tensors": settings.tensors, **Summary.of(means).record()}
                for rank, means in enumerate(answers)
            ]
    if "idle" in settings.parts:
        for contender in contenders:
            if isinstance(contender, GroupContender):
                console.print(f"{ranks} ranks: {contender.name} idle for {settings.idle_seconds:g} s")
                answers = contender.group.ask({"do": "idle", "seconds": settings.idle_seconds})
                row = {"ranks": ranks, "contender": contender.name}
                results["idle"] += [{**row, "rank": rank, "cores": cores} for rank, cores in enumerate(answers)]
