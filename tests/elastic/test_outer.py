"""Elastic jobs with `OuterOptimizer`: workers are killed, others replace them, and shared parameters stay equal."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ..waiting import until

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def worlds_of(directory: Path) -> list[tuple[int, int, int, int, int]]:
    """Return (world, rank, size, pid, first step) of each worker's entries into worlds, in their order."""
    found = []
    for path in directory.glob("worlds.*"):
        for line in path.read_text().splitlines():
            if len(words := line.split()) == 5:
                pid, world, rank, size, step = map(int, words)
                found.append((world, rank, size, pid, step))
    return sorted(found)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kills", "options"),
    [(1, ()), pytest.param(1, ("within",), marks=pytest.mark.slow), pytest.param(50, (), marks=pytest.mark.slow)],
)
def test_kills_are_survived_and_newcomers_share_parameters(
    kills: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "engine.launch", "-np", "2", "--min-np", "1"]
    command += ["--blacklist-cooldown-range", "1", "2", "--"]  # else a place whose workers fail often is left alone
    program = [sys.executable, "-m", "tests.elastic.outer_program", str(tmp_path), "200", *options]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    drawn = random.Random(1)
    limit = 300  # seconds for a newcomer, which imports torch, on a busy machine

    def full_world(after: int) -> list[tuple[int, int, int, int, int]]:
        entries = [each for each in worlds_of(tmp_path) if each[0] > after and each[2] == 2]
        last = [each for each in entries if each[0] == entries[-1][0]] if entries else []
        return last if len(last) == 2 else []

    said = (tmp_path / "errors").open("w")
    with subprocess.Popen([*command, *program], env=environ, cwd=ROOT, stderr=said) as job:
        try:
            world = 0
            for _ in range(kills):
                entries = until(lambda after=world: full_world(after), f"a world after {world}", limit)
                world = entries[0][0]
                begun = max(each[4] for each in entries)
                steps = drawn.randrange(20)
                until(
                    lambda least=begun + steps: any(
                        int(path.read_text() or 0) >= least for path in tmp_path.glob("step.*")
                    ),
                    f"{steps} steps of world {world}",
                    limit,
                )
                with suppress(ProcessLookupError):
                    os.kill(drawn.choice(entries)[3], signal.SIGKILL)
            until(lambda: full_world(world), f"a world after {world}", limit)
            (tmp_path / "enough").touch()
            assert job.wait(limit) == 0, (tmp_path / "errors").read_text()
        finally:
            job.terminate()
    results = [path.read_text() for path in sorted(tmp_path.glob("result.*"))]
    assert len(results) == 2 and results[0] == results[1]
    loss, step = results[0].split()
    assert float(loss) < 0.01 and int(step) >= 200
    workers = len(list(tmp_path.glob("worlds.*")))
    assert workers == 2 + kills, workers
