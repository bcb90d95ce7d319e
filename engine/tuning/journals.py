"""Tuner logs named in the settings: the one to write, and the one whose knobs are used."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from ..errors import ConfigError
from ..host import private_files
from .knobs import KNOBS, Knobs, clamp_knobs, describe_misfit
from .process import make_command

READING = 60.0  # seconds that reading the knobs of a log may take


def check_log(path: Path) -> None:
    """Create the directory of a log, and check that the log can be written; ConfigError if not."""
    try:
        private_files.make_missing(path.parent)
        if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError("it is a directory" if path.is_dir() else "permission denied")
    except OSError as error:
        raise ConfigError(f"autotune_log is {str(path)!r}, where rank 0 cannot write: {error}") from None


def knobs_of(log: Path) -> Knobs:
    """Return the knobs that a search has chosen, from its log; numbers are clamped to the ranges of a search.

    A file that is not a log, or cannot be read, is a ConfigError.
    """
    command, environ = make_command("autotune.decision", str(log))
    try:
        read = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=READING
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"autotune_from is {str(log)!r}, which cannot be read: {error}") from None
    if read.returncode != 0:
        said = (read.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"autotune_from is {str(log)!r}, which cannot be used: {said}")
    knobs = {name: value for name, value in json.loads(read.stdout).items() if name in KNOBS}
    for name, value in knobs.items():
        if expected := describe_misfit(name, value):
            raise ConfigError(
                f"autotune_from is {str(log)!r}, which cannot be used: it has {name}={value!r}; {expected} is expected"
            )
    return clamp_knobs(knobs, KNOBS)
