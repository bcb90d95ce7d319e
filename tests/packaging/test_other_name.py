"""`import enginerun`: the package's other name, for users who have an `engine.py` of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .environments import Environment

pytestmark = pytest.mark.timeout(600)  # the first test builds

THEIRS = "def train_one_epoch(): return 'theirs'\n"
SAME = """
import enginerun.collectives, sys
import engine, engine.collectives, engine.errors
assert enginerun is engine
assert enginerun.collectives is engine.collectives is sys.modules["engine.collectives"]
from enginerun.errors import EngineError
assert EngineError is engine.errors.EngineError
import enginerun.collectives.process_sets
sets = engine.collectives.process_sets
assert sets.__spec__.name == "engine.collectives.process_sets" == engine.ProcessSet.__module__
"""
BESIDE = """
import pickle
from engine import train_one_epoch
import enginerun, numpy
import engine
enginerun.init()
total = enginerun.allreduce(numpy.ones(2), enginerun.Sum, name="x")
one = pickle.loads(pickle.dumps(enginerun.ProcessSet([0])))
assert type(one) is enginerun.ProcessSet
print(train_one_epoch(), engine.__file__.endswith("engine.py"), total.tolist())
enginerun.shutdown()
"""
# A thread that finds a module half imported waits for it, and then goes on with what it has found.
AT_ONCE = """
import sys, threading
sys.setswitchinterval(1e-5)
wrong = []
def use(name, program):
    while name not in sys.modules:
        pass
    try:
        exec(program, {})
    except Exception as error:
        wrong.append(repr(error))
for name, program in {
    "enginerun": "import enginerun; enginerun.init",
    "enginerun.runner.function": "from enginerun.runner.function import run",
}.items():
    threads = [threading.Thread(target=use, args=(name, program)) for _ in range(4)]
    for each in threads:
        each.start()
    __import__(name)
    for each in threads:
        each.join()
assert not wrong, wrong
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "engine.py").write_text(THEIRS)
    return tmp_path / "train.py"


def start(installed: Environment, script: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    command = [*launcher, installed.python, script.name]
    environ = {"PATH": os.defpath, "HOME": str(installed.path)}
    return subprocess.run(command, cwd=script.parent, env=environ, capture_output=True, text=True, timeout=60)


def test_both_names_are_one_package(installed: Environment) -> None:
    installed.python_says(SAME)


def test_threads_may_import_at_once(installed: Environment) -> None:
    installed.python_says(AT_ONCE)


def test_beside_somebodys_own_engine_both_can_be_imported(installed: Environment, script: Path) -> None:
    script.write_text(BESIDE)
    done = start(installed, script, str(installed.path / "bin" / "enginerun"), "-np", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("theirs True [2.0, 2.0]") == 2, done.stdout
    assert "hides the package" not in done.stderr


def test_the_order_of_imports_does_not_matter(installed: Environment, script: Path) -> None:
    script.write_text("import enginerun.collectives\nimport engine\nprint(engine.train_one_epoch())\n")
    done = start(installed, script)
    assert done.stdout == "theirs\n", done.stderr


def test_the_switch_for_horovods_scripts_goes_round_it(installed: Environment, script: Path) -> None:
    script.write_text("import horovod, engine\nprint(horovod.__version__, engine.train_one_epoch())\n")
    done = start(installed, script, str(installed.path / "bin" / "enginerun"), "-np", "1", "--horovod")
    assert "0.28.1 theirs" in done.stdout, done.stderr


def test_a_module_that_is_not_there_is_not_found(installed: Environment, script: Path) -> None:
    for program in ("import enginerun.nothing\n", "import engine, enginerun.nothing\n"):
        script.write_text(program)
        assert "No module named 'enginerun.nothing'" in start(installed, script).stderr


def test_it_runs_as_a_module(installed: Environment, script: Path) -> None:
    command = [installed.python, "-m", "enginerun.launch", "-np", "1", installed.python, "-c", "print('ran')"]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=60)
    assert "ran" in done.stdout, done.stderr
