"""Runs of the training benchmark: all variants in the same processes, in short blocks that take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import binding, environment, progress, records
from benchmarks.common.processes import DisagreementError, Group, Launcher, Places
from benchmarks.common.stats import Summary

FLOOR, PEER = "floor", "ddp"
DDP_VARIANTS = ("ddp", "ddp_view", "ddp_silent", "ddp_engine")
VARIANTS = ("floor", *DDP_VARIANTS, "engine", "engine_view", "engine_view_kept", "engine_timeline")
ALONE = ("floor", "ddp_silent")
"""Variants whose ranks reduce nothing: their parameters differ."""
DEFAULT_VARIANTS = ("floor", "ddp", "engine", "engine_view")
WORKLOADS = ("resnet50", "gpt", "tiny")
TOLERANCE = 1e-5
"""Largest relative difference allowed between the engine's parameters and DDP's after the warm-up."""


@dataclass(frozen=True)
class TrainingSettings:
    """Workloads to train, and their duration."""

    workloads: tuple[str, ...] = WORKLOADS
    variants: tuple[str, ...] = DEFAULT_VARIANTS
    ranks: int = 2
    rounds: int = 15
    block_seconds: float = 1.5
    least: int = 3
    most: int = 20
    warmup: int = 4

    def record(self) -> dict[str, Any]:
        """Return the settings for a JSON record."""
        return asdict(self)


def run(settings: TrainingSettings, console: Console) -> Path:
    """Measure, and write `out/training.json`."""
    before = environment.record()
    begun = time.perf_counter()
    results = [measure_workload(settings, name, console) for name in settings.workloads]
    return records.write(
        "training", settings.record(), before, {"workloads": results, "seconds": round(time.perf_counter() - begun, 1)}
    )


def measure_workload(
    settings: TrainingSettings, name: str, console: Console, places: Places | None = None
) -> dict[str, Any]:
    """Measure one model, on one host or on those of `places`."""
    uses_engine = any("engine" in variant for variant in settings.variants)
    arguments = ["--workload", name, *(["--engine"] if uses_engine else [])]
    launcher: Launcher = "engine" if uses_engine else "plain"
    with Group(
        f"training-{name}",
        settings.ranks,
        "benchmarks.training.worker",
        arguments,
        launcher,
        binding.list_processors(),
        places=places,
    ) as group:
        count = len(settings.variants)
        with progress.show_progress(console, name, count * (settings.rounds + 1)) as advance:
            steps, parameters = 0, {}
            for variant in settings.variants:
                parameters = group.ask_ranks({"do": "build", "variant": variant})[0]
                blocks = group.ask_ranks({"do": "block", "variant": variant, "warmup": 1, "steps": settings.warmup - 1})
                steps = steps or _count_steps(settings, blocks[0]["seconds"])
                advance(f"{variant}, warm-up")
            checks = _check(settings, group)
            rounds: dict[str, list[list[dict[str, Any]]]] = {variant: [] for variant in settings.variants}
            for number in range(settings.rounds):
                for i in range(count):
                    variant = settings.variants[(i + number) % count]
                    request = {"do": "block", "variant": variant, "warmup": 1, "steps": steps}
                    rounds[variant].append(group.ask_ranks(request))
                    advance(variant)
            _check_ranks(settings, group)
    return {
        "workload": name,
        **parameters,
        "steps": steps,
        "differences": checks,
        "variants": {variant: summarize_blocks(blocks) for variant, blocks in rounds.items()},
    }


def _count_steps(settings: TrainingSettings, seconds: list[float]) -> int:
    """Return the steps per block: the same for all variants, from the first one's warm-up."""
    return int(min(settings.most, max(settings.least, settings.block_seconds / statistics.median(seconds))))


def summarize_blocks(blocks: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Summarize `blocks[round][rank]`.

    A round's figure is the mean over the ranks: of the median of their steps, and of their processor time per step.
    """
    rounds = [statistics.fmean(statistics.median(rank["seconds"]) for rank in block) for block in blocks]
    processor = [statistics.fmean(rank["processor"] for rank in block) for block in blocks]
    every = [seconds for block in blocks for rank in block for seconds in rank["seconds"]]
    return {"rounds": rounds, "processor": processor, **Summary.from_samples(every).record()}


def _check(settings: TrainingSettings, group: Group) -> dict[str, float]:
    """Compare parameters between ranks and with DDP's, as all variants have taken the same steps on the same data."""
    _check_ranks(settings, group)
    if PEER not in settings.variants:
        return {}
    differences = {}
    for variant in settings.variants:
        if variant not in (*ALONE, PEER):
            differences[variant] = max(group.ask_ranks({"do": "difference", "variants": [variant, PEER]}))
            if not differences[variant] <= TOLERANCE:
                raise DisagreementError(
                    f"{group.name}: after {settings.warmup} steps the parameters of {variant} differ from {PEER}'s by "
                    f"{differences[variant]:.2g} of their size, more than {TOLERANCE:g}"
                )
    return differences


def _check_ranks(settings: TrainingSettings, group: Group) -> None:
    for variant in settings.variants:
        if variant not in ALONE:
            digests = group.ask_ranks({"do": "digest", "variant": variant})
            if len(set(digests)) != 1:
                raise DisagreementError(f"{group.name}: the ranks' parameters of {variant} differ: checksums {digests}")
