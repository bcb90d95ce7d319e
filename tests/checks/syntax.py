"""Syntax trees of the project's Python files, each parsed once by the checks of a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def parse_file(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def parse_rooms(*rooms: str) -> dict[str, ast.Module]:
    """Return the syntax tree of each Python file in directories of the root, by its path below the root."""
    paths = (path for room in rooms for path in sorted((ROOT / room).rglob("*.py")))
    return {str(path.relative_to(ROOT)): parse_file(path) for path in paths}
