"""Measurement of local steps: starts ranks on two hosts."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import environment, paths, records
from benchmarks.common.processes import RankError
from benchmarks.common.tables import Table, format_duration
from benchmarks.hosts.places import Cable, create_hosts

PARTS = ("steps", "loss")
LAUNCH = (sys.executable, "-m", "engine.launch", "-np", "2")
WORKER = "benchmarks.local_steps.worker"


@dataclass(frozen=True)
class LocalStepSettings:
    """Measurements to make: the throughput, and the loss of trainings."""

    parts: tuple[str, ...] = PARTS  # among `PARTS`
    rate: str = "100mbit"  # rate of the cable between the two hosts, in the form of tc(8)
    # Number of parameters of the model whose throughput is measured, a multiple of a million
    parameters: int = 4_000_000
    compute: float = 0.1  # seconds that a step computes
    # Options of `OuterOptimizer` for both parts
    every: int = 10
    fragments: int = 4
    delay: int = 3
    compression: str = "bf16"
    lr: float = 0.4
    momentum: float = 0.8
    rounds: int = 5  # rounds in which the variants take turns
    steps: int = 600  # inner steps of each training
    synchronous_steps: int = 200  # number of them with averaged gradients, before the local ones begin
    batch: int = 16  # samples of a rank in a step
    # Learning rate of AdamW in both ways to train: the best of 6, 8, 10, 12 and 16 thousandths for averaged gradients
    inner_lr: float = 8e-3
    seeds: tuple[int, ...] = (4, 5, 6)  # seeds of the trainings; the settings were chosen with others
    timeout: float = 3600.0  # longest time of a part in seconds

    def check(self) -> None:
        """Raise ValueError if the throughput's model is not made of whole matrices."""
        if self.parameters < 1_000_000 or self.parameters % 1_000_000:
            raise ValueError(f"the model has a multiple of a million parameters, not {self.parameters}")


def run(settings: LocalStepSettings, console: Console) -> Path:
    """Measure, and write `out/local-steps.json`. Parts that are not measured stay as they were."""
    settings.check()
    before, begun = environment.record(), time.perf_counter()
    results: dict[str, Any] = {}
    with create_hosts(2, 1, Cable("slow", settings.rate, settings.rate, 0.0, "64kb")) as places:
        prefix = [*places.get_launch_prefix(), "env", f"--chdir={paths.ROOT}"]
        for part in settings.parts:
            results |= _run_ranks([*prefix, *LAUNCH, *places.launch_options(), "--quiet", "--"], part, settings)
    console.print(f"{', '.join(settings.parts)}: {time.perf_counter() - begun:.0f} s")
    earlier = records.read("local-steps") or {}
    alike = earlier.get("settings", {}).get("compression") == settings.compression
    kept = {name: value for name, value in earlier.items() if alike and name in ("steps", "losses")}
    results |= {"seconds": round(time.perf_counter() - begun, 1)}
    return records.write("local-steps", asdict(settings), before, kept | results)


def _run_ranks(launch: Sequence[str], part: str, settings: LocalStepSettings) -> dict[str, Any]:
    """Start two ranks, and return the result of the first."""
    command = [*launch, sys.executable, "-m", WORKER, part, json.dumps(asdict(settings))]
    done = subprocess.run(
        command, cwd=paths.ROOT, stdout=subprocess.PIPE, text=True, timeout=settings.timeout, check=False
    )
    lines = [line.partition("{")[2] for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or len(lines) != 1:
        raise RankError(f"the measurement {part!r} ended with {done.returncode}: {done.stdout[-1000:]}")
    found: dict[str, Any] = json.loads("{" + lines[0])
    return found


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the tables of `out/local-steps.json`."""
    settings, tables = content["settings"], []
    note = environment.describe(content["environment"])
    names = ("every", "fragments", "delay", "compression", "lr", "momentum")
    options = " ".join(f"{name}={settings[name]}" for name in names)
    if steps := content.get("steps"):
        what = (
            f"A step of {settings['parameters'] / 1e6:.0f} million parameters that computes {settings['compute']} s, "
            f"two hosts over {settings['rate']}"
        )
        table = Table(what, ["variant", "median of a step", "throughput beside no communication"])
        alone = statistics.median(row["alone"] for row in steps)
        for name, title in (
            ("alone", "no communication"),
            ("local", "local steps"),
            ("synchronous", "averaged gradients"),
        ):
            own = statistics.median(row[name] for row in steps)
            table.rows.append([title, format_duration(own), f"{100 * alone / own:.1f} %"])
        table.note = f"{options}; {len(steps)} rounds. {note}"
        tables.append(table)
    if losses := content.get("losses"):
        table = Table(
            f"Loss of a small GPT on unseen text after {settings['steps']} steps, two hosts",
            ["seed", "averaged gradients", "local steps", "difference"],
        )
        for row in losses:
            change = f"{100 * (row['local'] / row['synchronous'] - 1):+.2f} %"
            table.rows.append([str(row["seed"]), f"{row['synchronous']:.4f}", f"{row['local']:.4f}", change])
        table.note = f"{options}; the first {settings['synchronous_steps']} steps with averaged gradients. {note}"
        tables.append(table)
    return tables
