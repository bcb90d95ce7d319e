"""Fixtures of the packaging tests: one sdist, and one build of it for a wheel and for an editable installation.

Each environment has one of the two installed.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest

from .environments import BUILD, ROOT, Environment, commit, copy_tree, make_environment, run
from .marks import write_marks
from .rotate import add_operation

pytest.importorskip("mesonpy", reason="building needs the dev extra")


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unbuilt copy of the source tree, with one more operation."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    write_marks(tree, (1, 1, 1))
    add_operation(tree)
    commit(tree)
    return tree


@pytest.fixture(scope="session")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", directory, tree], tree)
    (archive,) = directory.iterdir()
    return archive


@pytest.fixture(scope="session")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the sdist; building from them shows that the sdist has all that a build needs."""
    directory = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4
    (root,) = directory.iterdir()
    return root


@pytest.fixture(scope="session")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", *BUILD, "-w", directory, unpacked], unpacked)
    (archive,) = directory.iterdir()
    return archive


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Environment with the wheel installed; programs run in an empty directory."""
    environment = make_environment(tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("elsewhere"))
    environment.install(wheel)
    return environment


@pytest.fixture(scope="session")
def editable(unpacked: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Environment with the sdist's files installed in place, after the wheel is made; programs run in their root.

    It reuses the wheel's build. (The tests themselves run in an editable installation that was built as one.)
    """
    environment = make_environment(tmp_path_factory.mktemp("editable"), unpacked)
    environment.install(*BUILD, "--editable", unpacked)
    return environment
