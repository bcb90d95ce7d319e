"""Names of runs: the label `run` of their metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

LONGEST_NAME = 80


def clean_name(name: str) -> str:
    """Convert any text to a valid label and file name.

    It has ASCII letters, digits, `.`, `_` and `-`, at most 80, without a leading dot; `run` if nothing is left.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name.strip())[:LONGEST_NAME].lstrip(".") or "run"


def default_name(command: Sequence[str], pid: int) -> str:
    """Return a name, valid as a label, after a run's program; `python [options] script` is named after the script.

    `pid` makes the name unique on the host.
    """
    name = Path(command[0]).stem
    for before, word in pairwise(("", *command)):
        if (before == "-m" and "python" in Path(command[0]).name) or word.endswith(".py"):
            script = Path(word)
            name = word if before == "-m" else script.parent.name if script.stem == "__main__" else script.stem
            break
    if name == "engine.runner.rank":
        name = "engine.run"
    return f"{clean_name(name)[:60]}-{pid}"
