"""The one door to the compiled extension, with a way out for those who have not built it."""

from __future__ import annotations

from pathlib import Path


def _how_to_build(cause: ImportError) -> str:
    root = Path(__file__).resolve().parent.parent
    lines = [f"engine's native extension cannot be imported ({cause})."]
    if (root / "pyproject.toml").exists():
        lines += [
            f"You are importing from the source tree {root}, which hides an installed package of the same name.",
            "Either build in place:      pip install -e . --no-build-isolation",
            "or install it:              pip install .      and start Python from another directory.",
        ]
    else:
        lines.append("Install it again: pip install --force-reinstall --no-cache-dir enginerun")
    return "\n".join(lines)


try:
    from engine_ext import core, setup, tracer
    from engine_ext.bindings import gradients, handles, memory
except ImportError as cause:
    raise ImportError(_how_to_build(cause)) from cause

__all__ = ["core", "gradients", "handles", "memory", "setup", "tracer"]
