"""The static checks, as tests: one command runs them all, and one summary says what failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

COMMANDS = {
    "ruff-check": ["ruff", "check"],
    "ruff-format": ["ruff", "format", "--check"],
    "mypy": ["mypy"],
    "stubtest": ["stubtest", "engine_ext.core", "--mypy-config-file", "pyproject.toml"],
    "cython-lint": ["cython-lint", "engine_ext"],
    "import-linter": ["lint-imports"],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", COMMANDS)
def test_check(name: str) -> None:
    program, *arguments = COMMANDS[name]
    run = subprocess.run([BIN / program, *arguments], cwd=ROOT, text=True, capture_output=True)
    if run.returncode != 0:
        pytest.fail(f"{program} {' '.join(arguments)}\n{run.stdout}{run.stderr}", pytrace=False)
