"""An installation by `make` shows how far it is, and the end of pip's output if it fails."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tools.install import install_packages, read_step

from .environments import ROOT

WANTED = ["--no-index", "--dry-run", "no-such-package" * 20]


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("Collecting torch==2.13.0 (from -c constraints.txt (line 3))\n", "finding torch==2.13.0"),
        ("Processing /somewhere/else/numpy-2.3-cp311.whl (from enginerun==0.1)\n", "finding numpy-2.3-cp311.whl"),
        (
            "  Downloading torch-2.13.0-cp311.whl.metadata (29 kB)\n",
            "downloading torch-2.13.0-cp311.whl.metadata (29 kB)",
        ),
        ("  Building editable for enginerun (pyproject.toml): started\n", "building enginerun"),
        ("  [12/216] Compiling Cython source engine_ext/core.pyx\n", "building file 12 of 216"),
        ("Installing collected packages: a, b, enginerun\n", "unpacking 3 packages"),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(HTTPSConnectionPool("
            "host='index.example', port=443): refused)': /whl/cpu/torch/\n",
            "asking index.example again, which does not answer",
        ),
        ("  Link requires a different Python\n", ""),
    ],
)
def test_a_step_is_read_from_a_line_of_pip(line: str, step: str) -> None:
    assert read_step(line) == step


def write_package(folder: Path, backend: str) -> Path:
    """Write a package that its own backend builds."""
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
        '[project]\nname = "own"\nversion = "1"\n'
    )
    (folder / "own.py").write_text(backend)
    return folder


def test_a_failure_shows_the_end_of_the_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    package = write_package(
        tmp_path, "def build_wheel(*_):\n    print('[3/7] Compiling')\n    raise SystemExit('no header')\n"
    )
    log = tmp_path / "build" / "log"
    arguments = ["--no-index", "--no-build-isolation", "--no-deps", "--target", str(tmp_path / "site"), str(package)]
    assert install_packages("Building it", arguments, log) != 0
    output = capfd.readouterr().out
    assert output.startswith("Building it\n")
    assert "failed: building file 3 of 7\n" in output or "failed: building own\n" in output
    assert "no header" in output
    assert output.endswith(f"all it wrote is in {log}\n")
    assert "no header" in log.read_text()


@pytest.mark.parametrize(("told", "columns"), [(0, 80), (16, 16)])
def test_a_terminal_has_one_line_that_changes(told: int, columns: int, tmp_path: Path) -> None:
    """It is never longer than the terminal is wide, which not every terminal tells."""
    first, second = pty.openpty()
    fcntl.ioctl(second, termios.TIOCSWINSZ, struct.pack("HHHH", 24, told, 0, 0))
    code = f"from tools.install import *; install_packages('Looking', {WANTED}, Path('log'))"
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=second, stderr=second, cwd=tmp_path, env=environment
    )
    os.close(second)
    output = b""
    while True:
        try:
            output += os.read(first, 4096)
        except OSError:  # the other side is closed
            break
    assert process.wait(timeout=60) == 0
    lines = output.decode().replace("\r\n", "\n").split("\n")
    assert lines[0] == "Looking"
    steps = lines[1].split("\r\x1b[K")
    assert len(steps) >= 3 and max(len(step) for step in steps[:-1]) == min(columns - 1, len("    0 s  starting pip"))
    assert "No matching distribution" in output.decode()
