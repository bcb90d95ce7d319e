"""Index of the public names of the Python modules, read from the sources without importing them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = (
    "engine",
    "engine.torch",
    "engine.torch.libraries",
    "engine.torch.elastic",
    "engine.tensorflow",
    "engine.keras",
    "engine.jax",
    "engine.mxnet",
    "engine.elastic",
    "engine.data",
    "engine.trackers",
    "engine.errors",
    "engine.ray",
    "engine.spark",
    "engine.launch",
    "autotune",
)


@dataclass(frozen=True)
class Definition:
    """Definition of a public name."""

    module: str  # module that defines it
    name: str
    node: ast.stmt

    @property
    def summary(self) -> str:
        """First line of the docstring; empty if there is none."""
        if isinstance(self.node, ast.FunctionDef | ast.ClassDef):
            return (ast.get_docstring(self.node) or "").partition("\n")[0]
        if isinstance(self.node, ast.Assign):
            return f"`{ast.unparse(self.node.value)}`."
        return ""


@cache
def find_file(module: str) -> Path | None:
    """Return the file of a module."""
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.exists()), None)


@cache
def parse_module(module: str) -> list[ast.stmt]:
    """Return the statements of a module, with those under `if` on the same level."""
    path = find_file(module)
    if path is None:
        return []
    found: list[ast.stmt] = []
    for node in ast.parse(path.read_text()).body:
        found += node.body if isinstance(node, ast.If) else [node]
    return found


def resolve_import(module: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module from which names are imported."""
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    path = find_file(module)
    up = node.level - 1 if path is not None and path.name == "__init__.py" else node.level
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def list_names(module: str) -> list[str]:
    """Return the names in `__all__`, those added from other modules included."""
    names: list[str] = []
    for node in parse_module(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names += ast.literal_eval(node.value)
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "__all__":
            other = ast.unparse(node.value).removesuffix(".__all__")
            imports = [each for each in parse_module(module) if isinstance(each, ast.ImportFrom)]
            (source,) = [each for each in imports if other in [alias.name for alias in each.names]]
            names += list_names(f"{resolve_import(module, source)}.{other}")
    return sorted(set(names))


def find_definition(module: str, name: str, passed: tuple[str, ...] = ()) -> Definition | None:
    """Return the definition of a name, found through imports; None where it is made at run time."""
    if module in passed:
        return None
    passed = (*passed, module)
    stars = []
    for node in parse_module(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Definition(module, name, node)
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return Definition(module, name, node)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return Definition(module, name, node)
        if isinstance(node, ast.ImportFrom):
            source = resolve_import(module, node)
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find_definition(source, alias.name, passed)
                if alias.name == "*":
                    stars.append(source)
    return next((found for source in stars if (found := find_definition(source, name, passed)) is not None), None)


def find_in_package(package: str, name: str) -> Definition | None:
    """Return the definition of a name that a package loads at its first use."""
    path = find_file(package)
    if path is None or path.name != "__init__.py":
        return None
    modules = [f"{package}.{each.stem}" for each in sorted(path.parent.glob("*.py")) if each.stem != "__init__"]
    found = (find_definition(module, name) for module in modules)
    return next((each for each in found if each is not None and each.summary), None)


def write_module(module: str) -> str:
    """Return the public names of a module with the first lines of their docstrings, then the site's directives."""
    from tools.docs_reference import wrap_item

    items, details = [], []
    for name in list_names(module):
        found = find_definition(module, name)
        if found is None or not found.summary:  # loaded later, or made from a table, as those of each framework are
            found = find_in_package(module, name) or find_definition("engine", name) or found
        summary = found.summary if found is not None else ""
        items.append(wrap_item(f"`{name}`: {summary}" if summary else f"`{name}`", "- ", "  "))
        if found is not None and isinstance(found.node, ast.FunctionDef | ast.ClassDef):
            details.append(f"::: {found.module}.{found.name}\n")
    return "\n" + "".join(items) + "\n## Details\n\n" + "\n".join(details) + "\n"
