"""The example, and its twin for ranks that stay: five lines make the one of the other."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "elastic.md"


def lines(name: str) -> list[str]:
    """A program without its docstring and its imports."""
    text = (EXAMPLES / f"{name}.py").read_text()
    return text[text.index("EPOCHS =") :].splitlines()


def test_five_lines_make_a_training_elastic() -> None:
    changes = [*difflib.ndiff(lines("torch_fixed"), lines("elastic_torch"))]
    assert len([each for each in changes if each.startswith("+")]) == 5
    assert len([each for each in changes if each.startswith("-")]) == 4


def test_the_page_has_the_example() -> None:
    text = (EXAMPLES / "elastic_torch.py").read_text().split('"""\n\n', 1)[1]
    assert text.replace("  # type: ignore[no-untyped-def]", "") in PAGE.read_text()


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
