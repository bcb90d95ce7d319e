"""Where the benchmarks read and write."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent
OUT = ROOT / "benchmarks" / "out"
"""JSON, pictures, compiled programs and logs. Git ignores it."""


def out(name: str) -> Path:
    """Return a path below `OUT` whose folder exists."""
    path = OUT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
