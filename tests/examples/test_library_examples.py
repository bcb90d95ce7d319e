"""The examples for Accelerate and Lightning, on the engine and on gloo. `make recipes` has both libraries."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..waiting import until_files
from .test_examples import EXAMPLES, run
from .test_torch_examples import TORCHRUN

PROGRAM = Path(__file__).with_name("example_saved.py")
LIBRARIES = ("accelerate", "lightning")
EPOCHS = 2
Trained = tuple[list[str], bytes]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trained]:
    """Give a function that runs an example on two ranks; it returns the printed losses and the parameters."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES), prepend=os.pathsep)

    def train_example(library: str, backend: str, launcher: tuple[str, ...] = TORCHRUN) -> Trained:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed; `make recipes` runs this test")
        monkeypatch.setenv("EXAMPLE", str(EXAMPLES / f"torch_{library}.py"))
        monkeypatch.setenv("HERE", str(tmp_path))
        text = run([*launcher, PROGRAM, "--backend", backend, "--epochs", EPOCHS], tmp_path, timeout=200)
        assert re.search(rf"^\d\d\.\d% of 297 new digits are read correctly by 2 ranks on {backend}$", text, re.M)
        losses = re.findall(r"^epoch \d+: loss (\d+\.\d{6}), \d+ samples/s$", text, re.M)
        assert len(losses) == EPOCHS and float(losses[1]) < float(losses[0]) < 2.3, text
        paths = [tmp_path / f"parameters-{rank}" for rank in range(2)]
        until_files(*paths)  # Lightning's first rank does not wait for the others that it started
        first, second = (path.read_bytes() for path in paths)
        assert first == second and len(first) > 4 * 130_000
        for path in paths:
            path.unlink()
        return losses, first

    return train_example


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("library", LIBRARIES)
def test_losses_and_parameters_are_those_of_gloo(library: str, train: Callable[..., Trained]) -> None:
    assert train(library, "engine") == train(library, "gloo")


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_ranks_that_lightning_starts_train_as_those_of_torchrun(train: Callable[..., Trained]) -> None:
    assert train("lightning", "engine", (sys.executable,)) == train("lightning", "engine")


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_the_library_help_is_shown_and_a_run_says_how_to_install_it(library: str, tmp_path: Path) -> None:
    hiding = f"import runpy, sys; sys.modules[{library!r}] = None; del sys.argv[0]; "
    hiding += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", hiding, str(EXAMPLES / f"torch_{library}.py")]
    environ = os.environ | {"PYTHONPATH": str(EXAMPLES)}
    options = {"cwd": tmp_path, "env": environ, "capture_output": True, "text": True, "timeout": 100}
    told = subprocess.run([*command, "--help"], **options)
    assert told.returncode == 0 and "--backend" in told.stdout, told.stderr
    done = subprocess.run(command, **options)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"torch_{library}.py: {library} is not installed in {sys.prefix}: pip install {library}"
    assert "Traceback" not in done.stderr
