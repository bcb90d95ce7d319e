"""The example, and its twin for ranks that stay: five lines make the one of the other."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine.elastic

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NEEDS_RUN = pytest.mark.skipif(not hasattr(engine.elastic, "run"), reason="there is no engine.elastic.run yet")


def lines(name: str) -> list[str]:
    """A program without its docstring and its imports."""
    text = (EXAMPLES / f"{name}.py").read_text()
    return text[text.index("EPOCHS =") :].splitlines()


def test_five_lines_make_a_training_elastic() -> None:
    changes = [*difflib.ndiff(lines("torch_fixed"), lines("elastic_torch"))]
    assert len([each for each in changes if each.startswith("+")]) == 5
    assert len([each for each in changes if each.startswith("-")]) == 4


@pytest.mark.parametrize("name", ["torch_fixed", pytest.param("elastic_torch", marks=NEEDS_RUN)])
def test_it_learns_on_two_ranks(name: str) -> None:
    command = [sys.executable, "-m", "engine.launch", "-np", "2", "--", sys.executable, str(EXAMPLES / f"{name}.py")]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, loss" in done.stdout and float(done.stdout.rpartition(" ")[2]) < 1
