"""Search for a file of the user's that hides the package `engine` from a script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_PYTHON = re.compile(r"python[\d.]*")
_OTHER_NAME = re.compile(r"^\s*(?:import|from)\s+enginerun\b", re.MULTILINE)
_OURS = Path(__file__).resolve().parents[2]


def find_hiding_file(command: Sequence[str], here: Path) -> str | None:
    """Return a line on a file that hides the package `engine` from the script of a rank's command, with a workaround.

    Python looks for modules in the script's own directory first, so an `engine.py` there is what `import engine` gives.
    `here` is the working directory. None: nothing is hidden, or the script uses the name `enginerun`.
    """
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    script = next((here / word for word in command[1:] if word.endswith(".py")), None)
    if script is None or not script.is_file():
        return None
    place = script.resolve().parent
    for found in (place / "engine.py", place / "engine" / "__init__.py"):
        if found.is_file() and found.parent.resolve() != _OURS and not _mentions_other_name(script):
            return (
                f"{found} hides the package 'engine' from {script.name}: if that is to use it, write 'import "
                "enginerun.torch' there, its other name, or rename the file"
            )
    return None


def _mentions_other_name(script: Path) -> bool:
    try:
        return _OTHER_NAME.search(script.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False
