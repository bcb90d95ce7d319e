"""Examples that are one file with its own installation: the notebook, and the script with inline metadata.

The engine's wheel is a real one. Empty wheels stand for those of torch and other projects, and the packages themselves
are those of the environment that runs the tests: so nothing here needs a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest

from .environments import ROOT, make_environment
from .stand_in_wheels import write_stand_in

pytestmark = pytest.mark.timeout(600)  # kernels and ranks that import torch, after the build of a wheel

EXAMPLES = ROOT / "examples"
OUTER = Path(sysconfig.get_path("purelib"))
OTHERS = ("cloudpickle", "numpy", "pyyaml", "torch")


def execute_notebook(directory: Path, python: Path, install: bool, **variables: str) -> str:
    """Run the cells of the notebook in a kernel of an interpreter, and return what they print."""
    nbformat = pytest.importorskip("nbformat", reason="needs the test extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the test extra")
    manager = pytest.importorskip("jupyter_client", reason="needs the test extra").AsyncKernelManager()
    manager.kernel_spec.argv[0] = str(python)  # else the Python that is first on PATH
    notebook: Any = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    if not install:
        notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", [])]
    client = nbclient.NotebookClient(
        notebook, km=manager, timeout=None, resources={"metadata": {"path": str(directory)}}
    )
    # Within pytest a kernel would leave the output of processes alone.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    client.execute(env=environment | variables)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def check_printed(printed: str) -> None:
    assert "epoch 4: loss " in printed, printed
    assert "2 ranks, loss " in printed, printed
    assert "ValueError: the data of this rank is broken" in printed, printed


def test_notebook_trains_on_two_ranks_and_shows_what_failed(tmp_path: Path) -> None:
    check_printed(execute_notebook(tmp_path, Path(sys.executable), install=False))


def test_notebook_has_no_outputs_and_installs_no_name_of_ours() -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the test extra")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not [cell.outputs for cell in notebook.cells if cell.get("outputs")]
    (install,) = [cell for cell in notebook.cells if "install" in cell.metadata.get("tags", [])]
    words = next(line for line in install.source.splitlines() if line.startswith("%pip")).split()
    assert [word for word in words if "enginerun" in word] == ["./enginerun-*.whl"]


def test_notebook_installs_a_wheel_that_lies_beside_it(wheel: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "environment", tmp_path)
    for name in OTHERS:
        write_stand_in(tmp_path, name)
    shutil.copy2(wheel, tmp_path)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_IGNORE_INSTALLED": "1"}
    check_printed(execute_notebook(tmp_path, environment.python, install=True, **offline))
    assert environment.python_says("import engine; print(engine.__file__)").startswith(str(environment.path))


def read_metadata() -> dict[str, Any]:
    """Return the block of the script, which PEP 723 defines."""
    lines = (EXAMPLES / "torch_run.py").read_text().splitlines()
    start, end = lines.index("# /// script"), lines.index("# ///")
    return tomllib.loads("\n".join(line[2:] for line in lines[start + 1 : end]))


def test_script_takes_the_engine_from_wheels_that_lie_here() -> None:
    """A resolver asks no index for the name, since it is not ours on any."""
    metadata = read_metadata()
    assert [each for each in metadata["dependencies"] if each.startswith("enginerun")] == ["enginerun[run]"]
    assert metadata["tool"]["uv"]["sources"]["enginerun"] == {"index": "wheels"}
    (index,) = metadata["tool"]["uv"]["index"]
    assert index["explicit"] is True and index["format"] == "flat"
    assert (EXAMPLES / index["url"]).resolve() == ROOT / "dist"


def test_script_trains_on_two_ranks(tmp_path: Path) -> None:
    script = shutil.copy2(EXAMPLES / "torch_run.py", tmp_path)
    done = subprocess.run(
        [sys.executable, script, "--epochs", "1"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks, loss ") and done.stdout.endswith("the same on all: True\n"), done.stdout


def test_uv_runs_the_script_with_a_wheel_and_without_a_network(wheel: Path, tmp_path: Path) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}") or pytest.skip("needs uv (the dev extra)")
    for name in ("examples", "dist", "others"):
        (tmp_path / name).mkdir()
    shutil.copy2(EXAMPLES / "torch_run.py", tmp_path / "examples")
    shutil.copy2(wheel, tmp_path / "dist")
    for name in OTHERS:
        write_stand_in(tmp_path / "others", name, OUTER)
    settings = {"CACHE_DIR": tmp_path / "cache", "FIND_LINKS": tmp_path / "others", "PYTHON": sys.executable}
    variables = {f"UV_{name}": str(value) for name, value in settings.items()}
    command = [uv, "run", "--offline", "--no-config", "--script", "examples/torch_run.py", "--epochs", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks, loss " in done.stdout and "the same on all: True" in done.stdout, done.stdout
    # A wheel that lies elsewhere is not taken; an empty cache has none either.
    (tmp_path / "dist" / wheel.name).rename(tmp_path / "others" / wheel.name)
    variables["UV_CACHE_DIR"] = str(tmp_path / "empty")
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and "enginerun" in done.stderr, done.stderr
