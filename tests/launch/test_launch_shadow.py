"""An `engine.py` of the user's own, beside the script: it is noticed, and the package's other name goes round it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.launch.shadow import shadowed

COMMAND = ("python3.12", "-u", "train.py", "--epochs", "3")
THEIRS = "def train_one_epoch(): return 'theirs'\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("import engine.torch\n")
    return tmp_path


def test_a_file_of_the_packages_name_beside_the_script_is_named(place: Path) -> None:
    (place / "engine.py").touch()
    told = shadowed(COMMAND, place)
    assert told is not None and str(place / "engine.py") in told and "import enginerun.torch" in told


def test_a_package_of_that_name_is_named_too(place: Path) -> None:
    (place / "engine").mkdir()
    (place / "engine" / "__init__.py").touch()
    assert str(place / "engine" / "__init__.py") in (shadowed(COMMAND, place) or "")


@pytest.mark.parametrize("command", [("bash", "train.py"), ("python", "-c", "pass"), ("python", "other.py"), COMMAND])
def test_where_nothing_is_hidden_nothing_is_said(place: Path, command: tuple[str, ...]) -> None:
    if command is not COMMAND:
        (place / "engine.py").touch()
    assert shadowed(command, place) is None


def test_a_script_that_uses_the_other_name_knows(place: Path) -> None:
    (place / "engine.py").touch()
    (place / "train.py").write_text("import enginerun.torch as hvd\n")
    assert shadowed(COMMAND, place) is None


def run(place: Path, program: str, *, launcher: bool = False) -> subprocess.CompletedProcess[str]:
    (place / "train.py").write_text(program)
    command = [sys.executable, "train.py"]
    if launcher:
        command = [sys.executable, "-P", "-m", "enginerun.launch", "-np", "2", *command]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60)


def test_both_names_are_one_package(place: Path) -> None:
    done = run(
        place,
        "import enginerun.collectives, sys\n"
        "import engine, engine.collectives, engine.errors\n"
        "assert enginerun is engine and enginerun.collectives is engine.collectives is sys.modules['engine.collectives']\n"
        "from enginerun.errors import EngineError\n"
        "assert EngineError is engine.errors.EngineError\n"
        "import enginerun.process_sets\n"
        "assert engine.process_sets.__spec__.name == engine.process_sets.ProcessSet.__module__ == 'engine.process_sets'\n",
    )
    assert done.returncode == 0, done.stderr


def test_beside_somebodys_own_engine_both_can_be_imported(place: Path) -> None:
    (place / "engine.py").write_text(THEIRS)
    done = run(
        place,
        "import pickle\n"
        "from engine import train_one_epoch\n"
        "import enginerun, numpy\n"
        "import engine\n"
        "enginerun.init()\n"
        "total = enginerun.allreduce(numpy.ones(2), enginerun.Sum, name='x')\n"
        "one = pickle.loads(pickle.dumps(enginerun.ProcessSet([0])))\n"
        "assert type(one) is enginerun.ProcessSet\n"
        "print(train_one_epoch(), engine.__file__.endswith('engine.py'), total.tolist())\n"
        "enginerun.shutdown()\n",
        launcher=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("theirs True [2.0, 2.0]") == 2, done.stdout
    assert "hides the package" not in done.stderr


def test_the_order_of_imports_does_not_matter(place: Path) -> None:
    (place / "engine.py").write_text(THEIRS)
    done = run(place, "import enginerun.collectives\nimport engine\nprint(engine.train_one_epoch())\n")
    assert done.stdout == "theirs\n", done.stderr


def test_a_module_that_is_not_there_is_not_found(place: Path) -> None:
    done = run(place, "import enginerun.nothing\n")
    assert "No module named 'enginerun.nothing'" in done.stderr
