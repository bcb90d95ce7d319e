"""Runs thousands of schedules of the protocol's steps, and shows that an omitted check of the engine would be found.

    python -m tests.verify.interleave --build build/interleave
    python -m tests.verify.interleave --seed 1234 --size 3      # one schedule again

Ranks are threads of one process, of which the scheduler of schedule.c runs one at a time. It knows sequential
consistency only: fences that the processor needs are for mutate.py and the thread sanitizer.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = re.findall(r"^subdir\('(\w+)'\)", (ROOT / "meson.build").read_text(), re.MULTILINE)
SOURCES = (*PACKAGES, "tools", "tests/verify", "meson.build", "LICENSE")
PART = 250  # schedules run in one process


@dataclass(frozen=True)
class Mutant:
    """Change of the engine that loses wake-ups."""

    name: str
    file: str
    old: str
    new: str


DRIVER = "engine_ext/control/driver.pyx"
MUTANTS = (
    Mutant(
        "the engine thread does not look again after announcing its sleep",
        DRIVER,
        "e.moved = drive_once(e)\n        stall_check(e)",
        "e.moved = False\n        stall_check(e)",
    ),
    Mutant(
        "a caller does not look again after announcing its sleep",
        DRIVER,
        "if not drive_once(e) and not is_goal_met(e, goal) and",
        "if not is_goal_met(e, goal) and",
    ),
    Mutant(
        "who gives the role back does not look what is left",
        DRIVER,
        "or load_acquire(&e.segment.coordinator.tail) != cursor or",
        "or",
    ),
    Mutant(
        "who gives the role back does not look whether it was rung meanwhile",
        DRIVER,
        "if (busy or door_count(&e.segment.mine.door[SLEEP_ENGINE]) != count\n            or",
        "if (busy\n            or",
    ),
    Mutant(
        "the engine thread does not look whether it was rung before it sleeps",
        "engine_ext/control/engines.pyx",
        "door_sleep(door, count, remaining_ns(",
        "door_sleep(door, door_count(door), remaining_ns(",
    ),
    Mutant(
        "the engine thread takes the last count of an engine's door for the one before its turn",
        DRIVER,
        "        store32_release(&e.role, Role.ENGINE_ASLEEP)\n        full_fence(FENCE_ROLE)",
        "        e.driven_at = door_count(&mine.door[SLEEP_ENGINE])\n"
        "        store32_release(&e.role, Role.ENGINE_ASLEEP)\n        full_fence(FENCE_ROLE)",
    ),
    Mutant(
        "stages of an entry ring nobody",
        "engine_ext/transport/shm.pyx",
        "if segment.crew[i] != rank and load32_relaxed(&page.asleep) & SLEEP_IN_ENTRY and (",
        "if False and (",
    ),
)


class Build:
    """The engine with a scheduling point at every step, built from a copy of the sources."""

    def __init__(self, directory: Path) -> None:
        self.tree, self.ninja, self.site = directory / "tree", directory / "ninja", directory / "site"
        self.library = directory / "libschedule.so"
        self.environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def copy(self) -> None:
        """Update the copy; unchanged files keep their times, so that they are not compiled again."""
        for source in SOURCES:
            paths = [ROOT / source] if (ROOT / source).is_file() else sorted((ROOT / source).rglob("*"))
            for path in paths:
                target = self.tree / path.relative_to(ROOT)
                if path.is_file() and path.suffix != ".pyc":
                    target.parent.mkdir(parents=True, exist_ok=True)
                    if not target.exists() or target.read_bytes() != path.read_bytes():
                        shutil.copyfile(path, target)

    def make(self) -> None:
        if not (self.ninja / "build.ninja").exists():
            layout = ("--prefix=/", "-Dpython.platlibdir=/", "-Dpython.purelibdir=/", "-Dpython.bytecompile=-1")
            points = f"-Dc_args=-O1 -include {self.tree / 'tests/verify/schedule.h'}"
            self._run("meson", "setup", str(self.ninja), *layout, "-Dbuildtype=plain", "-Db_lundef=false", points)
        self._run("meson", "compile", "-C", str(self.ninja))
        self._run("meson", "install", "-C", str(self.ninja), "--quiet", "--destdir", str(self.site))
        source = self.tree / "tests/verify/schedule.c"
        flags = ("-O1", "-fPIC", "-shared", "-std=c11", "-D_GNU_SOURCE", "-pthread")
        self._run("cc", *flags, str(source), "-o", str(self.library))

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, cwd=self.tree, env=self.environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"`{' '.join(command)}` failed\n{done.stdout[-4000:]}{done.stderr[-4000:]}")

    def play(self, size: int, first: int, count: int) -> tuple[int, str]:
        """Run schedules; return the number of steps, and the first fault with its seed, or an empty string."""
        command = [sys.executable, "-P", "-m", "tests.verify.interleave_program", "--library", str(self.library)]
        options = ["--size", str(size), "--first", str(first), "--count", str(count)]
        environment = {**self.environment, "PYTHONPATH": f"{self.site}{os.pathsep}{ROOT}"}
        limit = 60 + count
        try:
            done = subprocess.run(
                [*command, *options], env=environment, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired as expired:
            return 0, f"not done within {limit} s\n{(expired.stderr or b'').decode()[-2000:]}"
        if done.returncode != 0:
            seeds = re.findall(r"^seed (\d+)$", done.stderr, re.MULTILINE)
            text = re.sub(r"^seed \d+\n", "", done.stderr, flags=re.MULTILINE)
            return 0, f"size {size}, seed {seeds[-1] if seeds else '?'}: {text}"
        return int(re.findall(r"(\d+) steps", done.stdout)[0]), ""


def search(build: Build, schedules: int, quiet: bool = False) -> str:
    """Run `schedules` schedules, of 2 and 3 ranks in turn; return the first fault, or an empty string."""
    begun, steps = time.monotonic(), 0
    for part in range(0, schedules, PART):
        size = 2 + part // PART % 2
        taken, wrong = build.play(size, part, min(PART, schedules - part))
        if wrong:
            return wrong
        steps += taken
        if not quiet:
            print(f"{part + PART} schedules, {steps} steps, {time.monotonic() - begun:.0f} s", flush=True)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "interleave", help="where to build")
    parser.add_argument("--schedules", type=int, default=4000, help="of the engine as it is")
    parser.add_argument("--mutant-schedules", type=int, default=4000, help="at most, of each mutant")
    parser.add_argument("--seed", type=int, help="play this schedule alone")
    parser.add_argument("--size", type=int, default=2, help="ranks, with --seed")
    options = parser.parse_args()
    build = Build(options.build.resolve())
    build.copy()
    build.make()
    if options.seed is not None:
        steps, wrong = build.play(options.size, options.seed, 1)
        print(wrong or f"nothing lost in {steps} steps")
        return bool(wrong)
    wrong = search(build, options.schedules)
    if wrong:
        print(f"FAILED: {wrong}")
        return 1
    bad = 0
    for mutant in MUTANTS:
        file = build.tree / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"mutant {mutant.name!r} does not fit {mutant.file} any more")
        file.write_text(text.replace(mutant.old, mutant.new))
        try:
            build.make()
            wrong = search(build, options.mutant_schedules, quiet=True)
        finally:
            file.write_text(text)
        print(f"{mutant.name}: {wrong.splitlines()[0] if wrong else 'NOT FOUND'}", flush=True)
        bad += not wrong
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
