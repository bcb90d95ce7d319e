"""Run checks that take too long for the test command: many ranks, other Pythons, the oldest and the newest torch.

Each part prints what it did, and the command fails if a part does. Parts that cannot run here are named and left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.release.pythons import find_interpreter

from ..parts import run_parts
from ..waiting import until
from .strange_machines import JOB, Machine, install, lines

ROOT = Path(__file__).parents[2]
RANKS = 64
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
FAST = "-Csetup-args=-Doptimization=0"  # these checks do not depend on optimization


class LeftOutError(Exception):
    """A part cannot run here; the message gives the reason."""


def many_ranks(build: Path) -> str:
    """Run collectives on many ranks; then scrape the metrics of as many, kill one, and check output and leftovers."""
    del build
    with tempfile.TemporaryDirectory() as home:
        install(Path(home, "site"))
        machine = Machine(Path(home), Path(home, "site"))
        machine.deadline = 300.0
        launch = [sys.executable, "-m", "engine.launch", "-np", RANKS, "--start-timeout", 120]
        try:
            done = lines(machine.run([*launch, "--summary", sys.executable, JOB]))
            assert done == sorted(f"rank {rank} of {RANKS} is done" for rank in range(RANKS)), done
            _killed(machine, launch)
        finally:
            machine.kill()
    return f"{RANKS} ranks; {RANKS} scraped, and one of them killed: named, and nothing left"


def _killed(machine: Machine, launch: list[object]) -> None:
    hold = machine.home / "hold"
    hold.mkdir()
    port = machine.home / "sd.json"
    options = ["--metrics-port", 0, "--metrics-file-sd", port, "--quiet", "--output-dir", machine.home / "out"]
    process = machine.start([*launch, *options, sys.executable, JOB, "hold", hold])
    until(lambda: len([*hold.glob("rounds.*")]) == RANKS, "all ranks are at work", machine.deadline)
    [target] = re.findall(r'"(127\.0\.0\.1:\d+)"', port.read_text())
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=30) as answer:
        scraped = set(re.findall(r'^engine_rank_up\{.*rank="(\d+)".*\} 1\.0$', answer.read().decode(), re.MULTILINE))
    assert len(scraped) == RANKS, sorted(scraped)
    victim = RANKS // 2
    os.kill(int((hold / f"up.{victim}").read_text()), signal.SIGKILL)
    ended = machine.finish(process)
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr[-3000:]
    assert f"first failure: rank {victim} on " in ended.stderr, ended.stderr[-3000:]
    assert not port.exists()


def another_python(version: str, build: Path) -> str:
    """Build the engine with another Python, and run a job there."""
    program = find_interpreter(version)
    if program is None:
        raise LeftOutError("not found")
    python = _environment(build / f"python{version}", program)
    _pip(python, "install", "--quiet", FAST, str(ROOT))
    return _job(python)


def oldest_torch(build: Path) -> str:
    """Run the torch cases with the oldest supported torch."""
    return _cases([sys.executable, "-m", "tests.strange.old_torch", "--work", build / "torch-oldest"])


def newest_torch(build: Path) -> str:
    """Install the newest torch and the engine into an environment of their own, and run the torch cases there."""
    python = _environment(build / "torch-newest", Path(sys.executable))
    _pip(python, "install", "--quiet", "torch", "numpy", "pytest", "pytest-timeout", "pytest-xdist")
    _pip(python, "install", "--quiet", FAST, str(ROOT))
    found = _run([python, "-c", "import torch; print(torch.__version__)"]).strip()
    job = _job(python)
    program = (
        f"import sys; sys.path.append({str(ROOT)!r}); from pathlib import Path; from tests.strange import old_torch; "
        f"sys.exit(old_torch.run_cases(Path(sys.executable), Path({str(build)!r}), 2, {{}}))"
    )
    return f"torch {found}: {job}; " + _cases([python, "-P", "-c", program])


def _cases(command: list[object]) -> str:
    """Run a command that runs the torch cases; return the number that passed."""
    done = _finish(command, ROOT, dict(os.environ), 3000)
    passed = re.findall(r"^(\d+) of (\d+) cases pass", done.stdout, re.MULTILINE)
    count, of = (sum(int(pair[k]) for pair in passed) for k in (0, 1))
    assert done.returncode == 0, f"{count} of {of} torch cases pass:\n{done.stdout[-3000:]}"
    return f"{count} of {of} torch cases pass, and it is known of the others why not"


def _environment(path: Path, program: Path) -> Path:
    """Make a fresh virtual environment; return its interpreter."""
    shutil.rmtree(path, ignore_errors=True)
    _run([program, "-m", "venv", path])
    return path / "bin/python"


def _pip(python: Path, *arguments: str) -> None:
    _run([python, "-m", "pip", "--disable-pip-version-check", *arguments])


def _job(python: Path) -> str:
    """Run a job of two ranks, and the engine alone."""
    out = _run([python, "-m", "engine.launch", "-np", "2", "--summary", python, JOB])
    assert "rank 1 of 2 is done" in out, out
    assert "rank 0 of 1 is done" in _run([python, JOB])
    return "2 ranks and the engine alone, " + _run([python, "--version"]).strip()


def _run(command: list[object]) -> str:
    """Run a command outside of the sources, which would hide the installation; return its output."""
    names = ("PYTHONPATH", "MESONPY_EDITABLE_SKIP", "ENGINE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    done = _finish(command, Path("/"), environment, 1800)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout[-3000:]}"
    return done.stdout


def _finish(
    command: list[object], directory: Path, environment: dict[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its output, both streams in one text."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds,
        check=False,
    )


def parts(build: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the parts by name."""
    yield "ranks", lambda: many_ranks(build)
    for version in PYTHONS:
        yield f"python{version}", lambda version=version: another_python(version, build)  # type: ignore[misc]
    yield "torch-oldest", lambda: oldest_torch(build)
    yield "torch-newest", lambda: newest_torch(build)


def main() -> int:
    """Run all parts, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True, help="where environments are made")
    parser.add_argument("parts", nargs="*", help="names: ranks, python3.12, torch-oldest, torch-newest, ...")
    given = parser.parse_args()
    known = dict(parts(given.build.absolute()))
    return run_parts(known, given.parts, parser, LeftOutError)


if __name__ == "__main__":
    sys.exit(main())
