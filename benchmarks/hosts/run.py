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
from benchmarks.hosts.contenders import NAMES, ContenderVariant, HostContender
from benchmarks.hosts.idle import measure_idle_job
from benchmarks.hosts.places import CABLES, create_hosts
from benchmarks.training import run as training

KIB, MIB = 1 << 10, 1 << 20
HOSTS = 2
SIZES = (4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 100 * MIB)
PARTS = ("sizes", "compression", "training", "idle")
COMPRESSIONS = ("none", "fp16", "fp8")
DEFAULT_CABLES = ("plain", "gigabit")


@dataclass(frozen=True)
class HostsSettings:
    """Measurements to make, and their duration."""

    parts: tuple[str, ...] = PARTS
    cables: tuple[str, ...] = DEFAULT_CABLES
    per_host: tuple[int, ...] = (1, 2)
    sizes: tuple[int, ...] = SIZES
    contenders: tuple[str, ...] = NAMES
    also: tuple[str, ...] = ()
    """Further engines with other settings, in the form of `ContenderVariant.parse`."""
    workloads: tuple[str, ...] = training.WORKLOADS
    rounds: int = 5
    block_seconds: float = 0.15
    compressed: tuple[int, ...] = (16 * MIB, 100 * MIB)
    training_rounds: int = 6
    training_block_seconds: float = 1.0
    idle_seconds: float = 10.0

    @classmethod
    def for_quick_run(cls) -> HostsSettings:
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

    def list_variants(self) -> list[ContenderVariant]:
        """Return the contenders; engines with other settings follow the engine."""
        found = [ContenderVariant(name, name) for name in self.contenders]
        return found[:1] + [ContenderVariant.parse(text) for text in self.also] + found[1:]

    def check(self) -> None:
        """Raise ValueError for an invalid contender, a duplicate name, or a size that is not a multiple of float32."""
        names = [variant.name for variant in self.list_variants()]
        if len(set(names)) < len(names):
            raise ValueError(f"contenders need names of their own, not {', '.join(names)}")
        for nbytes in self.sizes:
            if nbytes < 4 or nbytes % 4:
                raise ValueError(f"sizes are multiples of 4 bytes, the size of a float32, not {nbytes}")

    def get_block_settings(self, cable: str, nbytes: int) -> collective.CollectiveSettings:
        """Return the settings to measure one size: large ones over a slow cable take seconds each."""
        slow = CABLES[cable].rate and nbytes >= 16 * MIB
        large = nbytes >= 16 * MIB
        return collective.CollectiveSettings(
            rounds=self.rounds,
            block_seconds=self.block_seconds,
            settle=1 if slow else 10,
            warmup=0 if slow and nbytes > 16 * MIB else 1,
            least=2 if large else 5,
            most=500,
        )


def run(settings: HostsSettings, console: Console, merge: bool = False) -> Path:
    """Measure, and write `out/hosts.json`; with `merge`, parts of the last run that are not run now are kept."""
    settings.check()
    before = environment.record()
    begun = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for cable in settings.cables:
        for per_host in settings.per_host:
            rows += _measure_sizes(settings, cable, per_host, console)
        if "compression" in settings.parts:
            for per_host in settings.per_host:
                rows += _measure_compression(settings, cable, per_host, console)
    if "training" in settings.parts:
        rows += _measure_training(settings, console)
    if "idle" in settings.parts:
        console.print(f"a job that does nothing, for {settings.idle_seconds:g} s")
        with create_hosts(HOSTS, 1, CABLES["plain"]) as places:
            rows += [{"part": "idle", **row} for row in measure_idle_job(places, settings.idle_seconds)]
    for row in rows:
        row |= {"revision": before["revision"], "load": before["load_before"]}
    if merge and (last := records.read("hosts")):
        new = {_make_turn_key(row) for row in rows}
        rows = [row for row in last["results"] if _make_turn_key(row) not in new] + rows
    return records.write(
        "hosts", asdict(settings), before, {"results": rows, "seconds": round(time.perf_counter() - begun, 1)}
    )


def _make_turn_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key of rows that were measured in turns, and so can be compared."""
    return tuple(row.get(name) for name in ("part", "cable", "per_host", "workload"))


def _measure_sizes(settings: HostsSettings, cable: str, per_host: int, console: Console) -> list[dict[str, Any]]:
    """Measure allreduces by size, on new hosts."""
    if "sizes" not in settings.parts:
        return []
    rows: list[dict[str, Any]] = []
    with create_hosts(HOSTS, per_host, CABLES[cable]) as places, contextlib.ExitStack() as stack:
        contenders = [_close_at_exit(stack, HostContender(variant, places)) for variant in settings.list_variants()]
        pairs: list[collective.Pair] = [(contender, "private") for contender in contenders]
        title = f"{HOSTS} hosts x {per_host}, {cable}"
        with progress.show_progress(
            console, title, len(settings.sizes) * len(pairs) * (settings.rounds + 1)
        ) as advance:
            for nbytes in settings.sizes:
                how = settings.get_block_settings(cable, nbytes)
                rows += collective.measure_size(how, pairs, places.ranks, nbytes, False, advance)
    return [{"part": "sizes", "cable": cable, "per_host": per_host, **row} for row in rows]


def _measure_compression(settings: HostsSettings, cable: str, per_host: int, console: Console) -> list[dict[str, Any]]:
    """Measure the engine's allreduce over a cable: uncompressed, as halves and in 8 bits."""
    rows: list[dict[str, Any]] = []
    with create_hosts(HOSTS, per_host, CABLES[cable]) as places, contextlib.ExitStack() as stack:
        contender = _close_at_exit(
            stack, HostContender(ContenderVariant("compression", "compression"), places, COMPRESSIONS)
        )
        for nbytes in settings.compressed:
            if nbytes > CABLES[cable].most:
                continue
            how = compression.CompressionSettings(places.ranks, nbytes, settings.rounds, first=2)
            title = f"compression, {HOSTS} hosts x {per_host}, {cable}"
            with progress.show_progress(console, title, len(COMPRESSIONS) * how.rounds) as advance:
                found = compression.measure_cases(how, contender, advance)
            rows += [
                {"part": "compression", "cable": cable, "per_host": per_host, "bytes": nbytes, **row} for row in found
            ]
    return rows


def _measure_training(settings: HostsSettings, console: Console) -> list[dict[str, Any]]:
    """Measure the cost of communication in a step, beside DDP over gloo."""
    how = training.TrainingSettings(
        workloads=settings.workloads,
        variants=("floor", "ddp", "engine"),
        ranks=HOSTS,
        rounds=settings.training_rounds,
        block_seconds=settings.training_block_seconds,
    )
    rows = []
    for name in settings.workloads:
        with create_hosts(HOSTS, 1, CABLES["plain"]) as places:
            rows.append({"part": "training", "cable": "plain", **training.measure_workload(how, name, console, places)})
    return rows


def _close_at_exit(stack: contextlib.ExitStack, contender: HostContender) -> HostContender:
    stack.callback(contender.close)
    return contender
