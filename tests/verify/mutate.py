"""Builds the engine without each of its fences, and shows what detects its absence: a stress run, or the model.

    python -m tests.verify.mutate --build build/mutate

A stress run cannot detect what the processor forgives: on x86 a fence beside a locked instruction (the unlock of a
mutex, an atomic addition) costs nothing to leave out, and one-sided fences are no instructions: the build without them
is the build with them. Those the weaker memory model has to detect. The run fails if the unmutated build loses a
wake-up, or if a missing fence is not detected.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..ranks import ROOT, RanksFailed, run_ranks
from . import model, stress

# Ranks, cycle time in ms, options of the launcher.
Shape = tuple[int, float, tuple[str, ...]]
SHAPES: tuple[Shape, ...] = (
    (2, 0.0, ("--no-binding",)),
    (2, 1.0, ()),
    (3, 0.0, ("--no-binding",)),
    (2, 0.0, ()),
    (4, 1.0, ("--no-binding",)),
)
# Fences that are no instruction on x86.
ONE_SIDED = ("TURN", "LOOK")
# Blocks in which the absence of a fence shows most often. Other fences are stressed by all blocks in turn.
FOCUS = {"WAKE": "calls", "STAGE": "chunks", "ENGINE": "pairs", "CALLER": "calls", "GIVE_BACK": "returns"}


@dataclass
class Seen:
    """Result of the stress runs of one build."""

    same: bool = False  # as the build with all fences
    seconds: float = 0.0
    operations: int = 0
    late_wakes: int = 0
    lost_polls: int = 0
    slow: int = 0
    starved: float = 0.0  # seconds that threads were ready to run and did not: a busy machine is slow with every fence
    failed: str = ""

    @property
    def lost(self) -> int:
        return self.late_wakes + self.lost_polls + self.slow + bool(self.failed)

    def __str__(self) -> str:
        if self.same:
            return "the same build"
        if self.failed:
            return f"a run failed: {self.failed.splitlines()[0]}"
        if not self.lost:
            return f"none in {self.operations} operations, {self.seconds:.0f} s"
        return (
            f"{self.late_wakes} late, {self.lost_polls} lost, {self.slow} slow in {self.operations} operations, "
            f"{self.seconds:.0f} s; starved for {self.starved:.1f} s"
        )


def fences() -> dict[str, int]:
    """Names and numbers of the fences in fences.h."""
    text = (ROOT / "engine_ext/platform/fences.h").read_text()
    return {name: int(number) for name, number in re.findall(r"^\s*FENCE_(\w+) = (\d+)", text, re.MULTILINE)}


def build(directory: Path, number: int) -> Path:
    """Build without fence `number` (0: with all); return the directory of the installation."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ninja, site = directory / "ninja", directory / f"without-{number}"
    define = f"-Dc_args=-DENGINE_WITHOUT_FENCE={number}"

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"`{' '.join(command)}` failed\n{done.stdout[-4000:]}{done.stderr[-4000:]}")

    if (ninja / "build.ninja").exists():
        run("meson", "configure", str(ninja), define)
    else:
        layout = ("--prefix=/", "-Dpython.platlibdir=/", "-Dpython.purelibdir=/", "-Dpython.bytecompile=-1")
        run("meson", "setup", str(ninja), *layout, define)
    run("meson", "compile", "-C", str(ninja))
    run("meson", "install", "-C", str(ninja), "--quiet", "--destdir", str(site))
    return site


def run_once(site: Path, shape: Shape, seconds: float, seed: int, blocks: tuple[str, ...], seen: Seen) -> None:
    """Run one stress run, and add its counts to `seen`."""
    ranks, cycle_time_ms, options = shape
    begun = time.monotonic()
    try:
        reports: list[stress.Report] = run_ranks(
            ranks,
            stress.hammer,
            seconds,
            cycle_time_ms,
            seed,
            blocks,
            env={"PYTHONPATH": str(site)},
            options=options,
            timeout=4 * seconds + 60,
        ).values
    except RanksFailed as failure:
        seen.failed = str(failure)
        return
    seen.seconds += time.monotonic() - begun
    seen.operations += sum(report.operations for report in reports)
    seen.starved += sum(report.starved for report in reports)
    seen.late_wakes += sum(report.late_wakes for report in reports)
    seen.lost_polls += sum(len(report.lost_polls) for report in reports)
    for report in reports:
        for key, start, end in report.slow:
            present = max(other.starts.get(key, start) for other in reports)
            seen.slow += end - max(start, present) >= stress.LATE


def hammer(site: Path, seconds: float, without: str = "") -> Seen:
    """Run every shape for `seconds`; a build without a fence only until it loses a wake-up."""
    seen = Seen()
    blocks = (FOCUS[without],) if without in FOCUS else ()
    for seed, shape in enumerate(SHAPES):
        run_once(site, shape, seconds, seed, blocks, seen)
        if seen.failed or (without and seen.lost):
            break
    return seen


def missed_by_model(name: str) -> str:
    found = model.finders(name) if name in model.FENCES else ()
    return ", ".join(f"{memory}: {scenario}" for memory, scenario in found)


def table(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "mutate", help="where to build")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of the stress runs of a build")
    parser.add_argument("fence", nargs="*", help="leave out these only (WAKE, STAGE, ...)")
    options = parser.parse_args()
    directory = options.build.resolve()
    chosen = {name: number for name, number in fences().items() if name in options.fence or not options.fence}
    forgiven = ONE_SIDED if platform.machine() == "x86_64" else ()
    # All builds precede the first run: runs need an idle machine, builds do not.
    sites = {name: build(directory, number) for name, number in chosen.items() if name not in forgiven}
    everything = build(directory, 0)
    rows = [("fence", "lost wake-ups without it", "found missing by the model")]
    seen = hammer(everything, options.seconds)
    rows.append(("(all there)", str(seen), ""))
    print(f"with all fences: {seen}", flush=True)
    bad = [f"the unmutated build: {seen}"] if seen.lost else []
    for name in chosen:
        seen = hammer(sites[name], options.seconds, name) if name in sites else Seen(same=True)
        missed = missed_by_model(name)
        rows.append((name, str(seen), missed or "nothing found"))
        print(f"without {name}: {seen}; model: {missed or 'finds nothing'}", flush=True)
        if not seen.lost and not missed:
            bad.append(f"neither finds that {name} is missing")
    print("\n" + table(rows))
    for line in bad:
        print(f"FAILED: {line}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
