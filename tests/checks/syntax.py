"""Syntax trees of the project's Python files, each parsed once by the checks of a process."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def parse_file(path: Path) -> ast.Module:
    """Return the syntax tree of a file.

    The garbage collector does not see it: its rounds over the millions of nodes would take longer than the checks.
    """
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.freeze()
        gc.enable()


@cache
def parse_rooms(*rooms: str) -> dict[str, ast.Module]:
    """Return the syntax tree of each Python file in directories of the root, by its path below the root."""
    paths = (path for room in rooms for path in sorted((ROOT / room).rglob("*.py")))
    return {str(path.relative_to(ROOT)): parse_file(path) for path in paths}


@cache
def list_nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree that a check keeps."""
    return tuple(ast.walk(tree))


@cache
def list_calls(tree: ast.AST) -> tuple[ast.Call, ...]:
    """Return all calls in a tree that a check keeps."""
    return tuple(node for node in list_nodes(tree) if isinstance(node, ast.Call))
