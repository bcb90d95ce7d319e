"""Rules about the tests' own sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .syntax import list_nodes, parse_rooms

TESTS = Path(__file__).parents[1]
# Files that may change the import path, because tests run them as other processes.
PATHS = {"ranks.py", "strange/uptime.py"}
# Files that let time pass. Programs that tests write out, and that cannot import `waiting`, may sleep, too.
SLEEPS = {"waiting.py", "launch/launch_jobs.py", "autotune/test_session.py"}


def list_trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file of the tests, by its path below them."""
    return {name.removeprefix("tests/"): tree for name, tree in parse_rooms("tests").items()}


def functions(name: str) -> list[str]:
    """Return the modules with a top-level function of that name."""
    return [
        module
        for module, tree in list_trees().items()
        if any(isinstance(node, ast.FunctionDef) and node.name.lstrip("_") == name for node in tree.body)
    ]


@pytest.mark.parametrize(
    ("name", "module"), [("until", "waiting.py"), ("marked", "waiting.py"), ("on_ranks", "on_ranks.py")]
)
def test_what_many_tests_share_is_written_once(name: str, module: str) -> None:
    assert functions(name) == [module]


def test_no_registry_of_tests_but_one() -> None:
    """Tests are known to pytest only: nothing else collects functions or names of cases."""
    found = [
        f"{module}:{node.lineno}"
        for module, tree in list_trees().items()
        for node in list_nodes(tree)
        if (isinstance(node, ast.ClassDef) and node.name in ("Case", "Cases") and module != "on_ranks.py")
        or (isinstance(node, ast.Attribute) and node.attr in ("registered", "case") and module != "on_ranks.py")
    ]
    assert found == []


def test_no_test_changes_the_import_path() -> None:
    changes = ("sys.path.insert", "sys.path.append", "sys.path[")
    found = {
        module
        for module, tree in list_trees().items()
        if "sys.path" in (TESTS / module).read_text()
        for node in list_nodes(tree)
        if isinstance(node, (ast.Call, ast.Assign)) and ast.unparse(node).startswith(changes)
    }
    assert found <= PATHS


def test_nothing_sleeps_to_wait_for_a_state() -> None:
    """A function of `waiting` lets time pass, and so names the reason; programs in strings are checked, too."""
    found = {module for module in list_trees() if "time" + ".sleep(" in (TESTS / module).read_text()}
    assert found <= SLEEPS
