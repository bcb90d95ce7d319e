"""The switch, which reaches the processes that a command starts by a directory on PYTHONPATH.

In it lies a `sitecustomize`, which every Python imports as it starts, whatever started it: a shell script, a console
script, `python -m`, a data loader's worker. To put `-m engine.compat` into the command itself would reach none of
these but the last but one.
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


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Switch on the processes that will be started with an environment.

    Parameters
    ----------
    environ : mapping of str to str

    Returns
    -------
    dict of str to str
        A copy with our directory first in PYTHONPATH.
    """
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(STARTUP)]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(STARTUP), *paths])}


def obstacle(command: Sequence[str]) -> str | None:
    """Find what keeps the switch from the Python that a command names.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.

    Returns
    -------
    str or None
        The option of Python, and what to write; None if there is no obstacle in sight.
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
