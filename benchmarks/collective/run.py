"""Runs of the collective benchmark: all contenders stay alive and are measured in turns, in short blocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.collective.contenders import DEFAULTS, Contender, GroupContender, start_contenders
from benchmarks.collective.operations import FLOAT, get_granularity
from benchmarks.collective.operations import NAMES as OTHERS
from benchmarks.common import binding, environment, neighbours, progress, records
from benchmarks.common.stats import Summary
from benchmarks.common.tables import format_size

KIB, MIB = 1 << 10, 1 << 20
SIZES = (*(4**k for k in range(1, 13)), 64 * MIB, 100 * MIB, 256 * MIB)
BUSY_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 100 * MIB)
QUICK_SIZES = (4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 100 * MIB)
QUICK_BUSY_SIZES = (4 * KIB, MIB)
OPERATION_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
QUICK_OPERATION_SIZES = (4 * KIB, MIB)
PARTS = ("sizes", "busy", "operations", "calls", "idle")
OPERATIONS = ("allreduce", *OTHERS)
CALLS = ("hook", "call", "call_new", "call_alone")


@dataclass(frozen=True)
class CollectiveSettings:
    """Measurements to make, and their duration."""

    ranks: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = SIZES
    busy_sizes: tuple[int, ...] = BUSY_SIZES
    operations: tuple[str, ...] = OTHERS
    operation_sizes: tuple[int, ...] = OPERATION_SIZES
    contenders: tuple[str, ...] = DEFAULTS
    parts: tuple[str, ...] = PARTS
    against: str = ""
    """Directory in which another build of the engine is installed, by `pip install --target`; empty: none."""
    rounds: int = 7
    block_seconds: float = 0.2
    operation_rounds: int = 5
    operation_block_seconds: float = 0.05
    settle: int = 20
    warmup: int = 2
    least: int = 5
    most: int = 1000
    tensors: int = 2000
    steps: int = 5
    call_rounds: int = 10
    idle_seconds: float = 10.0

    @classmethod
    def for_quick_run(cls) -> CollectiveSettings:
        """Return settings for a quick run of about a minute."""
        return cls(
            sizes=QUICK_SIZES,
            busy_sizes=QUICK_BUSY_SIZES,
            rounds=3,
            operation_sizes=QUICK_OPERATION_SIZES,
            block_seconds=0.1,
            operation_rounds=3,
            operation_block_seconds=0.02,
            least=3,
            call_rounds=3,
            idle_seconds=3.0,
        )

    def select_operations(self, chosen: Sequence[str]) -> CollectiveSettings:
        """Return settings for only some of `OPERATIONS`, by size."""
        parts = ("sizes", "busy") if "allreduce" in chosen else ()
        others = tuple(name for name in chosen if name != "allreduce")
        return replace(self, operations=others, parts=(*parts, "operations") if others else parts)

    def check(self) -> None:
        """Raise ValueError if a message could not be divided among the ranks."""
        for ranks in self.ranks:
            for name in ("allreduce", *self.operations):
                sizes = (*self.sizes, *self.busy_sizes) if name == "allreduce" else self.operation_sizes
                part = "operations" if name != "allreduce" else "sizes"
                each = FLOAT if name == "allreduce" else get_granularity(name, ranks)
                for nbytes in sizes if part in self.parts else ():
                    if nbytes < each or nbytes % each:
                        raise ValueError(
                            f"{name} over {ranks} ranks: sizes are multiples of {each} bytes, not {nbytes}"
                        )

    def record(self) -> dict[str, Any]:
        """Return the settings for a JSON record."""
        return asdict(self)


Pair = tuple[Contender, str]


def run(settings: CollectiveSettings, console: Console) -> Path:
    """Measure, and write `out/collective.json`."""
    settings.check()
    before = environment.record()
    processors = binding.list_processors()
    results: dict[str, Any] = {"sizes": [], "operations": [], "calls": [], "idle": []}
    begun = time.perf_counter()
    for ranks in settings.ranks:
        wanted = _select_sizes(settings)
        chosen = settings.operations if "operations" in settings.parts else ()
        if not wanted and not chosen and not _measures_engine(settings, ranks, processors):
            continue
        largest = max((nbytes for sizes in wanted.values() for nbytes in sizes), default=4 * KIB)
        names = [name for name in settings.contenders if wanted or name != "limits"]
        with start_contenders(names, ranks, largest, processors, settings.against) as contenders:
            pairs = [(contender, case) for contender in contenders for case in contender.cases]
            steps = sum(len(sizes) for sizes in wanted.values()) * len(pairs)
            steps += (
                len(chosen) * len(settings.operation_sizes) * sum(isinstance(c, GroupContender) for c in contenders)
            )
            with progress.show_progress(console, f"{ranks} ranks", steps * (settings.rounds + 1)) as advance:
                for busy, sizes in wanted.items():
                    with neighbours.keep_busy(processors) if busy else contextlib.nullcontext():
                        for nbytes in sizes:
                            results["sizes"] += measure_size(settings, pairs, ranks, nbytes, busy, advance)
                for name in chosen:
                    results["operations"] += _measure_operation(settings, contenders, ranks, name, advance)
            if _measures_engine(settings, ranks, processors):
                _measure_engine_only(settings, contenders, ranks, results, console)
    results["seconds"] = round(time.perf_counter() - begun, 1)
    return records.write("collective", settings.record(), before, results)


def _select_sizes(settings: CollectiveSettings) -> dict[bool, Sequence[int]]:
    """Return the sizes to measure with idle and with busy processors."""
    wanted: dict[bool, Sequence[int]] = {}
    if "sizes" in settings.parts:
        wanted[False] = settings.sizes
    if "busy" in settings.parts:
        wanted[True] = settings.busy_sizes
    return wanted


def _measure_operation(
    settings: CollectiveSettings, contenders: Sequence[Contender], ranks: int, name: str, advance: progress.Advance
) -> list[dict[str, Any]]:
    """Measure one of the other operations at all sizes, in shorter blocks, because there are many of them."""
    seconds, rounds = settings.operation_block_seconds, settings.operation_rounds
    brief = replace(settings, block_seconds=seconds, rounds=rounds, settle=5, warmup=1, least=3)
    pairs: list[Pair] = [(contender, name) for contender in contenders if isinstance(contender, GroupContender)]
    sizes = settings.operation_sizes[:1] if name == "barrier" else settings.operation_sizes
    return [row for nbytes in sizes for row in measure_size(brief, pairs, ranks, nbytes, False, advance)]


def _measures_engine(settings: CollectiveSettings, ranks: int, processors: Sequence[int]) -> bool:
    """Return whether the cost of calls and of idleness is measured: only if every rank has a processor."""
    return (
        "engine" in settings.contenders and ranks <= len(processors) and bool({"calls", "idle"} & set(settings.parts))
    )


def _rotate_pairs(pairs: Sequence[Pair], by: int) -> Iterator[Pair]:
    """Yield the pairs from another start in each round, so that none always follows the same neighbour."""
    for i in range(len(pairs)):
        yield pairs[(i + by) % len(pairs)]


def measure_size(
    settings: CollectiveSettings, pairs: Sequence[Pair], ranks: int, nbytes: int, busy: bool, advance: progress.Advance
) -> list[dict[str, Any]]:
    """Measure one size, with the pairs in turns, and return a row for each."""
    other = f"{pairs[0][1]}, " if pairs and pairs[0][1] in OTHERS else ""
    label = f"{other}{format_size(nbytes)}{', busy' if busy else ''}"
    first: dict[Pair, float | None] = {}
    iterations: dict[Pair, int] = {}
    rounds: dict[Pair, list[list[float]]] = {pair: [] for pair in pairs}
    for pair in pairs:
        contender, case = pair
        first[pair] = None if busy else contender.time_first_call(case, nbytes)
        iterations[pair] = _calibrate_iterations(settings, contender, case, nbytes)
        advance(label)
    for number in range(settings.rounds):
        for pair in _rotate_pairs(pairs, number):
            contender, case = pair
            rounds[pair].append(contender.time_block(case, nbytes, settings.warmup, iterations[pair]))
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
            **Summary.from_samples([seconds for block in rounds[contender, case] for seconds in block]).record(),
        }
        for contender, case in pairs
    ]


def _calibrate_iterations(settings: CollectiveSettings, contender: Contender, case: str, nbytes: int) -> int:
    """Warm up, and return the number of iterations that fit into a block, including writing the tensor."""
    contender.time_block(case, nbytes, settings.settle if nbytes <= MIB else min(settings.settle, 5), 1)
    start = time.perf_counter()
    contender.time_block(case, nbytes, 0, settings.least)
    each = (time.perf_counter() - start) / settings.least
    return int(min(settings.most, max(settings.least, settings.block_seconds / each)))


def _measure_engine_only(
    settings: CollectiveSettings, contenders: Sequence[Contender], ranks: int, results: dict[str, Any], console: Console
) -> None:
    engine = next(c for c in contenders if c.name == "engine")
    assert isinstance(engine, GroupContender)
    if "calls" in settings.parts:
        with progress.show_progress(
            console, f"{ranks} ranks, {settings.tensors} calls", len(CALLS) * settings.call_rounds
        ) as advance:
            results["calls"] += _measure_calls(settings, engine, ranks, advance)
    if "idle" in settings.parts:
        for contender in contenders:
            if isinstance(contender, GroupContender):
                console.print(f"{ranks} ranks: {contender.name} idle for {settings.idle_seconds:g} s")
                answers = contender.group.ask_ranks({"do": "idle", "seconds": settings.idle_seconds})
                row = {"ranks": ranks, "contender": contender.name}
                results["idle"] += [{**row, "rank": rank, "cores": cores} for rank, cores in enumerate(answers)]


def _measure_calls(
    settings: CollectiveSettings, engine: GroupContender, ranks: int, advance: progress.Advance
) -> list[dict[str, Any]]:
    """Measure the cost of a call for its caller, with the kinds of calls in turns; return a row for each rank."""
    rounds: dict[str, list[list[list[float]]]] = {what: [] for what in CALLS}
    for number in range(settings.call_rounds):
        for i in range(len(CALLS)):
            what = CALLS[(i + number) % len(CALLS)]
            request = {"do": what, "tensors": settings.tensors, "steps": settings.steps, "warmup": 2}
            rounds[what].append(engine.group.ask_ranks(request))
            advance(what)
    return [
        {
            "ranks": ranks,
            "what": what,
            "rank": rank,
            "tensors": settings.tensors,
            "round_medians": [float(np.median(block[rank])) for block in rounds[what]],
            **Summary.from_samples([mean for block in rounds[what] for mean in block[rank]]).record(),
        }
        for what in CALLS
        for rank in range(ranks)
    ]
