"""The elastic example and its twin with a fixed number of ranks differ by five lines."""

from __future__ import annotations

import difflib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..waiting import until

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "how-to" / "elastic.md"


def lines(name: str) -> list[str]:
    """Return a program's lines without its docstring and imports."""
    text = (EXAMPLES / f"{name}.py").read_text()
    return text[text.index("EPOCHS =") :].splitlines()


def test_five_lines_make_a_training_elastic() -> None:
    changes = [*difflib.ndiff(lines("torch_fixed"), lines("elastic_torch"))]
    assert len([each for each in changes if each.startswith("+")]) == 5
    assert len([each for each in changes if each.startswith("-")]) == 4


def test_the_page_has_the_example() -> None:
    text = (EXAMPLES / "elastic_torch.py").read_text().split('"""\n\n', 1)[1]
    assert text.replace("  # type: ignore[no-untyped-def]", "") in PAGE.read_text()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "options"), [("torch_fixed", ()), ("elastic_torch", ()), ("elastic_torch", ("--min-np", "1"))]
)
def test_it_learns_on_two_ranks(name: str, options: tuple[str, ...]) -> None:
    script = str(EXAMPLES / f"{name}.py")
    command = [sys.executable, "-m", "engine.launch", "-np", "2", *options, "--", sys.executable, script]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, loss" in done.stdout and float(done.stdout.rpartition(" ")[2]) < 1


@pytest.mark.slow
def test_the_user_ends_it_without_a_word_of_its_workers(tmp_path: Path) -> None:
    """SIGTERM to the launcher: workers are told at their next commit, long before the grace period ends."""
    text = (EXAMPLES / "elastic_torch.py").read_text().replace("EPOCHS = 5", "EPOCHS = 10**9")
    trains = "        optimizer.zero_grad()\n"
    assert trains in text
    (tmp_path / "train.py").write_text(text.replace(trains, f"{trains}        open('trains', 'w').close()\n"))
    command = [sys.executable, "-m", "engine.launch", "-np", "2", "--min-np", "1", "--grace-period", "60"]
    with subprocess.Popen([*command, sys.executable, "train.py"], cwd=tmp_path, stderr=subprocess.PIPE) as job:
        until((tmp_path / "trains").exists, "the training", 60)
        job.send_signal(signal.SIGTERM)
        said = job.communicate(timeout=50)[1].decode()
    assert job.returncode == 128 + signal.SIGTERM
    assert [line.partition(":")[0] for line in said.splitlines()] == ["enginerun"] * said.count("\n"), said
    assert "wants to leave" not in said and "SIGKILL" not in said
