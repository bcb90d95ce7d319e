"""What the tests of packaging share: one sdist, the wheel built from it, and an environment with that wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .environments import FAST, ROOT, Environment, copy_tree, make_environment, run
from .marks import write_marks
from .rotate import add_operation

pytest.importorskip("mesonpy", reason="building needs the dev extra")


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree that nothing is built in."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    return copy_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="session")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", directory, tree], tree)
    (archive,) = directory.iterdir()
    return archive


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist: so the sdist holds all that a build needs."""
    directory = tmp_path_factory.mktemp("wheel")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", FAST, "-w", directory, sdist], directory)
    (archive,) = directory.iterdir()
    return archive


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel in it; programs run in an empty directory."""
    environment = make_environment(tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("elsewhere"))
    environment.install(wheel)
    return environment


@pytest.fixture(scope="session")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with a copy of the tree installed in place, and one operation more; programs run in its root."""
    tree = copy_tree(tmp_path_factory.mktemp("editable-tree"))
    write_marks(tree, 1, 1, 1)
    add_operation(tree)
    environment = make_environment(tmp_path_factory.mktemp("editable"), tree)
    environment.install(FAST, "--editable", tree)
    return environment
