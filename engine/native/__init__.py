"""Import of the compiled extension, with an error that explains how to build it."""

from __future__ import annotations

import sys
from importlib.resources import as_file, files
from pathlib import Path


def _how_to_build(cause: ImportError) -> str:
    root = Path(__file__).resolve().parents[2]
    lines = [f"engine's native extension cannot be imported ({cause})."]
    if (root / "pyproject.toml").exists():
        lines += [
            f"You are importing from the source tree {root}, which hides an installed package of the same name.",
            "Either build in place:      pip install -e . --no-build-isolation",
            "or install it:              pip install .      and start Python from another directory.",
        ]
    else:
        lines.append("Install it again, in its source tree: pip install --force-reinstall --no-cache-dir .")
    return "\n".join(lines)


def _refuse_without_lock() -> None:
    """Raise an ImportError if a free-threaded Python keeps its lock off, which guards much of the engine's state."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise ImportError(
            "engine needs Python's global interpreter lock, and this process keeps it off (PYTHON_GIL=0 or -X gil=0).\n"
            "Remove that setting: a free-threaded Python then turns the lock on when it imports the engine."
        )


try:
    from engine_ext import core, setup, tracer
    from engine_ext.bindings import calls, gradients, handles, memory, prepared
except ImportError as cause:
    raise ImportError(_how_to_build(cause)) from cause
_refuse_without_lock()

__all__ = ["calls", "core", "gradients", "handles", "library", "memory", "prepared", "setup", "tracer"]


def find_library(name: str) -> str:
    """Return the path of a shared library of `engine_ext.bindings` that a framework loads: it is no Python module."""
    with as_file(files("engine_ext.bindings") / f"{name}.so") as path:
        return str(path)
