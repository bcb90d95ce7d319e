"""The two ways of docs/how-to/torch-distributed.md to start a program of torch.distributed by mpirun."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from engine.host.machine import free_port
from tools.environments import ROOT

from ..mpi import run_mpirun

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]
PAGE = (ROOT / "docs" / "how-to" / "torch-distributed.md").read_text(encoding="utf-8")
PLAIN, *_ = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
PROGRAM, COMMAND = re.findall(
    r"^### Under mpirun\n.*?^```python\n(.*?)^```.*?^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
)[0]
EXPECTED = [f"rank {rank} of 2: [2.0, 2.0, 2.0]" for rank in range(2)]


def start(command: str, mpi: Path, directory: Path, text: str) -> tuple[int, list[str]]:
    """Run a command of a shell that starts a program by mpirun; return the exit code and the lines of the ranks."""
    (directory / "script.py").write_text(text, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ENGINE_", "OMPI_", "PMI"))}
    own = {"OMP_NUM_THREADS": "1", "PATH": f"{mpi}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    code, said = run_mpirun(["sh", "-c", command], directory, kept | own, seconds=120)
    return code, sorted(re.findall(r"rank \d of \d: \[.*\]|environment variable \w+ expected", said))


def adapt_command(mpi: Path) -> str:
    """Return the page's command with a free port, for the MPI and a machine of one core."""
    command = COMMAND.replace("29500", str(free_port()))
    if mpi.parent.name.endswith("openmpi"):
        return command.replace("mpirun ", "mpirun --oversubscribe ")
    return command.replace("OMPI_COMM_WORLD_", "PMI_")


def test_the_engine_sets_the_variables(mpi: Path, tmp_path: Path) -> None:
    use = PLAIN[PLAIN.index("tensor = ") :]
    command = re.sub(r"sh -c.*", "python script.py", adapt_command(mpi).partition("\n")[2], flags=re.DOTALL)
    assert "RANK" not in command
    assert start(command, mpi, tmp_path, f"import torch\n{PROGRAM}{use}") == (0, EXPECTED)


def test_the_command_sets_the_variables(mpi: Path, tmp_path: Path) -> None:
    assert start(adapt_command(mpi), mpi, tmp_path, PLAIN) == (0, EXPECTED)
