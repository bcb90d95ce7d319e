"""An editable install never runs stale code, and ranks that import at the same time build once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .environments import Environment
from .marks import read_marks, write_marks

pytestmark = pytest.mark.timeout(600)  # the first test builds

MARKS = "import engine_ext.core as core; print(core.mark_pyx, core.mark_pxd, core.mark_h)"
RANKS = 8


@pytest.fixture
def sources(editable: Environment) -> Path:
    return editable.cwd


def shown(sources: Path) -> str:
    """Output of `MARKS` when the build is up to date with the sources."""
    return "{} {} {}".format(*read_marks(sources))


def builds(sources: Path) -> int:
    """Number of times that the module was linked since the last clean build."""
    (log,) = (sources / "build").glob("*/.ninja_log")
    return len(re.findall(r"\tengine_ext/core\.cpython-[^\t/]+\.so\t", log.read_text()))


def test_runs_the_sources_and_the_build_of_the_tree(editable: Environment, sources: Path) -> None:
    output = editable.python_says(
        "import engine, engine_ext.core as core; print(engine.__file__); print(core.__file__)"
    )
    python_file, extension = output.splitlines()
    assert Path(python_file) == sources / "engine/__init__.py"
    assert Path(extension).is_relative_to(sources / "build")


@pytest.mark.parametrize("edited", [0, 1, 2], ids=["pyx", "pxd", "h"])
def test_an_edit_is_built_before_it_is_imported(editable: Environment, sources: Path, edited: int) -> None:
    before = shown(sources)
    assert editable.python_says(MARKS) == before
    marks = list(read_marks(sources))
    marks[edited] += 1
    write_marks(sources, (marks[0], marks[1], marks[2]))
    assert editable.python_says(MARKS) == "{} {} {}".format(*marks) != before


def test_dashboards_are_found(editable: Environment, sources: Path) -> None:
    code = (
        "from engine.metrics.dashboards import read_dashboards; "
        "print(read_dashboards()['dashboards/enginerun-ranks.json'], end='')"
    )
    assert editable.python_says(code) == (sources / "grafana/dashboards/enginerun-ranks.json").read_text().rstrip("\n")


def test_a_new_python_file_is_seen(editable: Environment, sources: Path) -> None:
    (sources / "engine/launch/fresh.py").write_text("fresh = 5\n")
    assert editable.python_says("from engine.launch.fresh import fresh; print(fresh)") == "5"


def test_ranks_that_import_together_build_once(editable: Environment, sources: Path) -> None:
    assert editable.python_says(MARKS) == shown(sources)
    write_marks(sources, (9, 9, 9))
    before = builds(sources)
    ranks = [editable.popen(f"input(); {MARKS}") for _ in range(RANKS)]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    outputs = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    assert outputs == ["9 9 9"] * RANKS
    assert builds(sources) == before + 1


def test_a_build_that_fails_is_an_import_error_that_shows_why(editable: Environment, sources: Path) -> None:
    core = sources / "engine_ext/core.pyx"
    whole = core.read_text()
    core.write_text(whole + "cdef int broken = undeclared\n")
    output = editable.python_says(MARKS, status=1)
    assert "ImportError" in output
    assert "undeclared" in output
    core.write_text(whole)
    assert editable.python_says(MARKS) == shown(sources)
