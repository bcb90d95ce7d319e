"""Imports of `engine`, at the top of a module or within a function: no circle, and few floors of packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from .syntax import parse_file

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "engine"
FLOORS = 8  # a package stands one floor above the highest of those that it imports
BETWEEN_BINDINGS = {
    ("keras", "tensorflow"),  # serves Keras' backend, and is imported when Keras runs on it
}
"""Imports of packages that would close a circle; each is within a function, or of a module that one loads by name."""
WITHIN_PACKAGES = {
    ("engine.tensorflow.gradients", "engine.tensorflow.op"),  # an operation's gradient is an operation
    ("engine.spark.manifest", "engine.spark.columns"),
}
"""Imports of modules of one package that would close a circle."""
Graph = dict[str, set[str]]


@cache
def modules() -> dict[str, Path]:
    """Return the files of all modules, by name."""
    files = (path for path in PACKAGE.rglob("*.py") if "startup" not in path.parts and "alias" not in path.parts)
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports_of(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield all import statements below a node that run: none for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from imports_of(child)


def targets_of(name: str, path: Path) -> Iterator[str]:
    """Yield the names of the modules of `engine` that a module imports."""
    for statement in imports_of(parse_file(path)):
        if isinstance(statement, ast.Import):
            found = [each.name for each in statement.names]
        else:
            parts = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            above = parts[: len(parts) - statement.level + 1] if statement.level else []
            base = ".".join([*above, *([statement.module] if statement.module else [])])
            found = [f"{base}.{each.name}" if f"{base}.{each.name}" in modules() else base for each in statement.names]
        yield from (each for each in found if each in modules() and each != name)


@cache
def graph() -> Graph:
    """Return the modules that each module imports."""
    return {name: set(targets_of(name, path)) for name, path in modules().items()}


def packages() -> Graph:
    """Return the packages right below `engine` that each of them imports; the root itself is no package."""
    found: Graph = {}
    for name, targets in graph().items():
        for target in targets:
            here, there = (each.split(".")[1] if "." in each else "" for each in (name, target))
            if here and there and here != there:
                found.setdefault(here, set()).add(there)
    return found


def circle(edges: Graph, allowed: set[tuple[str, str]]) -> list[str]:
    """Return the members of a circle; none if there is none but through allowed imports."""
    try:
        TopologicalSorter({a: {b for b in bs if (a, b) not in allowed} for a, bs in edges.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_root_holds_packages_only() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py"}


def test_meson_knows_every_package() -> None:
    """It installs all, but leaves out the bytecode of those that it knows alone."""
    [listed] = re.findall(r"^packages = \[(.*?)\]", (PACKAGE / "meson.build").read_text(), re.DOTALL | re.MULTILINE)
    known = [each.replace("' / '", "/").strip("' \n") for each in listed.split(",")]
    folders = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")} - {".", "alias"}
    assert sorted(filter(None, known)) == sorted(folders)


def test_modules_import_each_other_in_no_circle() -> None:
    assert circle(graph(), WITHIN_PACKAGES) == []


def test_packages_import_each_other_in_no_circle() -> None:
    assert circle(packages(), BETWEEN_BINDINGS) == []


def test_packages_stand_on_few_floors() -> None:
    edges = {a: {b for b in bs if (a, b) not in BETWEEN_BINDINGS} for a, bs in packages().items()}
    floors: dict[str, int] = {}
    for name in TopologicalSorter(edges).static_order():
        floors[name] = 1 + max((floors[each] for each in edges.get(name, ())), default=0)
    assert max(floors.values()) == FLOORS, sorted(floors.items(), key=lambda item: item[1])


def test_collectives_do_not_import_the_session() -> None:
    """Collectives take the engine of a process set, and need no default engine."""
    assert {"session", "net", "gpu", "frameworks"} & packages()["collectives"] == set()
