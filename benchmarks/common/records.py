"""JSON records: one file per benchmark, with the environment of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common import paths

SCHEMA = 2


def write(name: str, settings: dict[str, Any], before: dict[str, Any], results: dict[str, Any]) -> Path:
    """Write `out/<name>.json`. `before` is the environment, recorded before the first measurement."""
    path = paths.get_output_path(f"{name}.json")
    content = {"schema": SCHEMA, "benchmark": name, "environment": before, "settings": settings, **results}
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def read(name: str) -> dict[str, Any] | None:
    """Return the record that `write` wrote last; None if there is none."""
    path = paths.get_output_path(f"{name}.json")
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {content.get('schema')}, this program reads {SCHEMA}: run the benchmark again"
        )
    return content
