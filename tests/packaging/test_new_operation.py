"""Adding an operation takes a file, a number and a line of the table; everything else derives from its row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .environments import ROOT, Environment, run
from .rotate import EDITS

pytestmark = pytest.mark.timeout(600)  # the first test builds

# On three ranks: small, in several chunks, of a dtype that is not reduced, fused, wrong, and after others have joined.
PROGRAM = """
import numpy as np
import engine
from engine import errors
from engine.session import runtime

engine.init()
native, rank, size = runtime.current_engine(), engine.rank(), engine.size()
before = (rank - 1) % size

def rotated(value, name):
    output = np.zeros_like(value)
    native.rotate(value, output, name).wait()
    return output

assert rotated(np.full(3, rank, np.float32), "small").tolist() == [before] * 3
assert (rotated(np.arange(1_000_000) * (rank + 1), "chunks") == np.arange(1_000_000) * (before + 1)).all()
assert rotated(np.full(2, rank + 1j, np.complex128), "moved").tolist() == [before + 1j] * 2
outputs = [np.zeros(5) for _ in range(40)]
handles = [native.rotate(np.full(5, rank + float(k)), output, f"fused.{k}") for k, output in enumerate(outputs)]
engine.barrier()  # whoever waits for one of them has it sent at once, alone if a rank is slow
for handle in handles:
    handle.wait()
assert [output[0] for output in outputs] == [before + k for k in range(40)]
assert any(row["kind"] == "rotate" and row["tensors"] > 1 for row in native.history())
assert engine.allreduce(np.ones(2), op=engine.Sum).tolist() == [size, size]
try:
    rotated(np.zeros(3 + rank, np.float32), "wrong")
except errors.MismatchError as error:
    assert "rank 1 sent rotate float32[4]" in str(error), error
else:
    raise AssertionError("ranks brought different shapes, and nobody was told")
if rank == 2:
    rotated(np.full(3, rank, np.float32), "small")
engine.join()
print("rotated")
"""


def test_an_operation_is_a_row(editable: Environment) -> None:
    command = [editable.path / "bin/enginerun", "-np", "3", editable.python, "-c", PROGRAM]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(editable.path)}
    job = subprocess.run(command, cwd=editable.cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("rotated") == 3


def test_the_recipe_names_every_file() -> None:
    recipe = (ROOT / "CONTRIBUTING.md").read_text().partition("**To add an operation**")[2].partition("\n\n")[0]
    assert [name for name in EDITS if f"`{name}`" not in recipe] == []


@pytest.mark.parametrize("name", ["bindings/collectives", "operations/kinds", "operations/rotate"])
def test_sources_with_the_operation_are_cython(tree: Path, tmp_path: Path, name: str) -> None:
    """Code that the recipe adds uses no undefined name; Cython alone shows that, without a build."""
    cython = ["-m", "cython", "-3", "--fast-fail", f"engine_ext/{name}.pyx", "-o", tmp_path / "out.c"]
    run([sys.executable, *cython], tree)
