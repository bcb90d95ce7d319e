"""Startup hooks of the Pythons that a command starts: directories on PYTHONPATH that contain a `sitecustomize`.

Every Python imports `sitecustomize` at its start, however it is started: by a shell script, as a console script, by
`python -m`, as a data loader's worker. Inserting `-m module` into the command would only work for the third of these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

EXIT_REPORTS = Path(__file__).parents[1] / "exit_report" / "startup"  # hook that installs the writer of exit reports
HOROVOD = Path(__file__).parents[1] / "compat" / "startup"  # hook that lets `import horovod` find the engine
_PYTHON = re.compile(r"python[\d.]*")
_TAKE_A_VALUE = "WXcm"
_ENDS_THE_OPTIONS = "cm"
_WITHOUT_STARTUP = "EIS"


def add_startup(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return a copy of an environment with the directory of a startup hook first in PYTHONPATH."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(directory)]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(directory), *paths])}


def find_startup_obstacle(command: Sequence[str]) -> str | None:
    """Find an option that keeps the hook of Horovod's names from running in the Python of a command.

    The text says what to write instead; it is None if no obstacle was found.
    """
    program, *rest = command
    if not _PYTHON.fullmatch(Path(program).name):
        return None
    option = ""
    while rest and rest[0].startswith("-") and not rest[0].startswith("--"):
        letters = rest.pop(0)[1:]
        for place, letter in enumerate(letters, start=1):
            if letter in _WITHOUT_STARTUP:
                option = letter
            elif letter in _TAKE_A_VALUE:
                value = letters[place:] or (rest.pop(0) if rest else "")
                if letter in _ENDS_THE_OPTIONS:
                    rest.clear()
                if letter == "m" and value in ("engine.compat", "enginerun.compat"):
                    option = ""
                break
    if not option:
        return None
    return f"python -{option} does not read PYTHONPATH: write 'python -{option} -m engine.compat train.py'"
