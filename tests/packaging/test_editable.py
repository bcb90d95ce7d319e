"""An editable install never runs stale code, and ranks that import together build once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .environments import Environment
from .marks import write_marks

pytestmark = pytest.mark.timeout(600)  # the first test builds

MARKS = "import engine_ext.core as core; print(core.mark_pyx, core.mark_pxd, core.mark_h)"
RANKS = 8


@pytest.fixture
def tree(editable: Environment) -> Path:
    write_marks(editable.cwd, 1, 1, 1)
    return editable.cwd


def builds(tree: Path) -> int:
    """How often the module was linked since the last clean build."""
    (log,) = (tree / "build").glob("*/.ninja_log")
    return len(re.findall(r"\tengine_ext/core\.cpython-[^\t/]+\.so\t", log.read_text()))


def test_runs_the_sources_and_the_build_of_the_tree(editable: Environment, tree: Path) -> None:
    output = editable.python_says(
        "import engine, engine_ext.core as core; print(engine.__file__); print(core.__file__)"
    )
    python_file, extension = output.splitlines()
    assert Path(python_file) == tree / "engine/__init__.py"
    assert Path(extension).is_relative_to(tree / "build")


@pytest.mark.parametrize(
    ("marks", "expected"), [((2, 1, 1), "2 1 1"), ((1, 3, 1), "1 3 1"), ((1, 1, 4), "1 1 4")], ids=["pyx", "pxd", "h"]
)
def test_an_edit_is_built_before_it_is_imported(
    editable: Environment, tree: Path, marks: tuple[int, int, int], expected: str
) -> None:
    assert editable.python_says(MARKS) == "1 1 1"
    write_marks(tree, *marks)
    assert editable.python_says(MARKS) == expected


def test_dashboards_are_found(editable: Environment, tree: Path) -> None:
    code = (
        "from engine.metrics.dashboards import contents; print(contents()['dashboards/enginerun-ranks.json'], end='')"
    )
    assert editable.python_says(code) == (tree / "grafana/dashboards/enginerun-ranks.json").read_text().rstrip("\n")


def test_a_new_python_file_is_seen(editable: Environment, tree: Path) -> None:
    (tree / "engine/launch/fresh.py").write_text("fresh = 5\n")
    assert editable.python_says("from engine.launch.fresh import fresh; print(fresh)") == "5"


def test_ranks_that_import_together_build_once(editable: Environment, tree: Path) -> None:
    assert editable.python_says(MARKS) == "1 1 1"
    write_marks(tree, 9, 9, 9)
    before = builds(tree)
    ranks = [editable.popen(f"input(); {MARKS}") for _ in range(RANKS)]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    outputs = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    assert outputs == ["9 9 9"] * RANKS
    assert builds(tree) == before + 1


def test_a_build_that_fails_is_an_import_error_that_shows_why(editable: Environment, tree: Path) -> None:
    core = tree / "engine_ext/core.pyx"
    core.write_text(core.read_text() + "cdef int broken = undeclared\n")
    output = editable.python_says(MARKS, status=1)
    assert "ImportError" in output
    assert "undeclared" in output
    write_marks(tree, 1, 1, 1)
    assert editable.python_says(MARKS) == "1 1 1"
