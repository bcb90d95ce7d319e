"""Switch for the processes that a command starts: a directory on PYTHONPATH.

The directory contains a `sitecustomize`, which every Python imports at its start, however it is started: by a shell
script, as a console script, by `python -m`, as a data loader's worker. Inserting `-m engine.compat` into the command
would only work for the third of these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

STARTUP = Path(__file__).parent / "startup"
_PYTHON = re.compile(r"python[\d.]*")
_TAKE_A_VALUE = "WXcm"
_ENDS_THE_OPTIONS = "cm"
_WITHOUT_STARTUP = "EIS"


def make_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which started processes have the switch on.

    Parameters
    ----------
    environ : mapping of str to str

    Returns
    -------
    dict of str to str
        Copy with our directory first in PYTHONPATH.
    """
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(STARTUP)]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(STARTUP), *paths])}


def find_obstacle(command: Sequence[str]) -> str | None:
    """Find an option that keeps the switch from working in the Python of a command.

    Parameters
    ----------
    command : sequence of str
        Program and its arguments.

    Returns
    -------
    str or None
        Option of Python, and what to write instead; None if no obstacle was found.
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
