"""A user's own `engine.py` beside the script: the launcher detects it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.launch.cli.hidden_package import find_hiding_file

COMMAND = ("python3.12", "-u", "train.py", "--epochs", "3")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("import engine.torch\n")
    return tmp_path


def test_a_file_of_the_packages_name_beside_the_script_is_named(place: Path) -> None:
    (place / "engine.py").touch()
    told = find_hiding_file(COMMAND, place)
    assert told is not None and str(place / "engine.py") in told and "import enginerun.torch" in told


def test_a_package_of_that_name_is_named_too(place: Path) -> None:
    (place / "engine").mkdir()
    (place / "engine" / "__init__.py").touch()
    assert str(place / "engine" / "__init__.py") in (find_hiding_file(COMMAND, place) or "")


@pytest.mark.parametrize("command", [("bash", "train.py"), ("python", "-c", "pass"), ("python", "other.py"), COMMAND])
def test_where_nothing_is_hidden_nothing_is_said(place: Path, command: tuple[str, ...]) -> None:
    if command is not COMMAND:
        (place / "engine.py").touch()
    assert find_hiding_file(command, place) is None


def test_a_script_that_uses_the_other_name_knows(place: Path) -> None:
    (place / "engine.py").touch()
    (place / "train.py").write_text("import enginerun.torch as hvd\n")
    assert find_hiding_file(COMMAND, place) is None
