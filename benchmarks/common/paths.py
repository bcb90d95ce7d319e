"""Paths that the benchmarks read and write."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent
OUT = ROOT / "benchmarks" / "out"
"""Folder of JSON, plots, compiled programs and logs, ignored by Git."""


def get_output_path(name: str) -> Path:
    """Return a path below `OUT`, and create its folder if missing."""
    path = OUT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
