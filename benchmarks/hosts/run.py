"""Runs of the benchmark of several hosts: all contenders on the same hosts in turns, per cable and number of ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import compression
from benchmarks.collective import run as collective
from benchmarks.common import environment, progress, records
from benchmarks.hosts.contenders import NAMES, HostContender, Variant
from benchmarks.hosts.idle import idle
from benchmarks.hosts.places import CABLES, placed
from benchmarks.training import run as training

KIB, MIB = 1 << 10, 1 << 20
HOSTS = 2
SIZES = (4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 100 * MIB)
PARTS = ("sizes", "compression", "training", "idle")
COMPRESSIONS = ("none", "fp16")


@dataclass(frozen=True)
class Settings:
    """Measurements to make, and their duration."""

    parts: tuple[str, ...] = PARTS
    cables: tuple[str, ...] = tuple(CABLES)
    per_host: tuple[int, ...] = (1, 2)
    sizes: tuple[int, ...] = SIZES
    contenders: tuple[str, ...] = NAMES
    also: tuple[str, ...] = ()
    """Further engines with other settings, in the form of `Variant.parse`."""
    workloads: tuple[str, ...] = training.WORKLOADS
    rounds: int = 5
    block_seconds: float = 0.15
    compressed: int = 16 * MIB
    training_rounds: int = 6
    training_block_seconds: float = 1.0
    idle_seconds: float = 10.0

    @classmethod
    def quick(cls) -> Settings:
        """Return settings for a quick run of about three minutes."""
        return cls(
            rounds=3,
            block_seconds=0.05,
            sizes=(4 * KIB, MIB, 16 * MIB, 100 * MIB),
            workloads=("gpt", "tiny"),
            training_rounds=2,
            training_block_seconds=0.5,
            idle_seconds=3.0,
        )

    def variants(self) -> list[Variant]:
        """Return the contenders; engines with other settings follow the engine."""
        found = [Variant(name, name) for name in self.contenders]
        return found[:1] + [Variant.parse(text) for text in self.also] + found[1:]

    def check(self) -> None:
        """Raise ValueError for an invalid contender, a duplicate name, or a size that is not a multiple of float32."""
        names = [variant.name for variant in self.variants()]
        if len(set(names)) < len(names):
            raise ValueError(f"contenders need names of their own, not {', '.join(names)}")
        for nbytes in self.sizes:
            if nbytes < 4 or nbytes % 4:
                raise ValueError(f"sizes are multiples of 4 bytes, the size of a float32, not {nbytes}")

    def block(self, cable: str, nbytes: int) -> collective.Settings:
        """Return the settings to measure one size: large ones over a slow cable take seconds each."""
        slow = CABLES[cable].rate and nbytes >= 16 * MIB
        large = nbytes >= 16 * MIB
        return collective.Settings(
            rounds=self.rounds,
            block_seconds=self.block_seconds,
            settle=1 if slow else 10,
            warmup=0 if slow and nbytes > 16 * MIB else 1,
            least=2 if large else 5,
            most=500,
        )


def run(settings: Settings, console: Console, merge: bool = False) -> Path:
    """Measure, and write `out/hosts.json`; with `merge`, parts of the last run that are not run now are kept."""
    settings.check()
    before = environment.record()
    begun = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for cable in settings.cables:
        for per_host in settings.per_host:
            rows += _world(settings, cable, per_host, console)
        if "compression" in settings.parts and CABLES[cable].rate:
            rows += _compression(settings, cable, console)
    if "training" in settings.parts:
        rows += _training(settings, console)
    if "idle" in settings.parts:
        console.print(f"a job that does nothing, for {settings.idle_seconds:g} s")
        with placed(HOSTS, 1, CABLES["plain"]) as places:
            rows += [{"part": "idle", **row} for row in idle(places, settings.idle_seconds)]
    for row in rows:
        row |= {"revision": before["revision"], "load": before["load_before"]}
    if merge and (last := records.read("hosts")):
        new = {_together(row) for row in rows}
        rows = [row for row in last["results"] if _together(row) not in new] + rows
    return records.write(
        "hosts", asdict(settings), before, {"results": rows, "seconds": round(time.perf_counter() - begun, 1)}
    )


def _together(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of rows that were measured in turns, and so can be compared."""
    return tuple(row.get(name) for name in ("part", "cable", "per_host", "workload"))


def _world(settings: Settings, cable: str, per_host: int, console: Console) -> list[dict[str, Any]]:
    """Measure allreduces by size, on new hosts."""
    if "sizes" not in settings.parts:
        return []
    rows: list[dict[str, Any]] = []
    with placed(HOSTS, per_host, CABLES[cable]) as places, contextlib.ExitStack() as stack:
        contenders = [_started(stack, HostContender(variant, places)) for variant in settings.variants()]
        pairs: list[collective.Pair] = [(contender, "private") for contender in contenders]
        title = f"{HOSTS} hosts x {per_host}, {cable}"
        with progress.bar(console, title, len(settings.sizes) * len(pairs) * (settings.rounds + 1)) as advance:
            for nbytes in settings.sizes:
                how = settings.block(cable, nbytes)
                rows += collective.measure(how, pairs, places.ranks, nbytes, False, advance)
    return [{"part": "sizes", "cable": cable, "per_host": per_host, **row} for row in rows]


def _compression(settings: Settings, cable: str, console: Console) -> list[dict[str, Any]]:
    """Measure the engine's allreduce, uncompressed and as halves, over a slow cable."""
    with placed(HOSTS, 1, CABLES[cable]) as places, contextlib.ExitStack() as stack:
        contender = _started(stack, HostContender(Variant("compression", "compression"), places, COMPRESSIONS))
        how = compression.Settings(HOSTS, settings.compressed, settings.rounds)
        with progress.bar(console, f"compression, {cable}", len(COMPRESSIONS) * how.rounds) as advance:
            rows = compression.measure(how, contender, advance)
    return [{"part": "compression", "cable": cable, "per_host": 1, "bytes": how.nbytes, **row} for row in rows]


def _training(settings: Settings, console: Console) -> list[dict[str, Any]]:
    """Measure the cost of communication in a step, beside DDP over gloo."""
    how = training.Settings(
        workloads=settings.workloads,
        variants=("floor", "ddp", "engine"),
        ranks=HOSTS,
        rounds=settings.training_rounds,
        block_seconds=settings.training_block_seconds,
    )
    rows = []
    for name in settings.workloads:
        with placed(HOSTS, 1, CABLES["plain"]) as places:
            rows.append({"part": "training", "cable": "plain", **training.workload(how, name, console, places)})
    return rows


def _started(stack: contextlib.ExitStack, contender: HostContender) -> HostContender:
    stack.callback(contender.close)
    return contender
