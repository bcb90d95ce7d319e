"""How Prometheus finds an endpoint: http_sd and file_sd, one document for both."""

from __future__ import annotations

import json
import re
from pathlib import Path

from . import files
from .errors import MetricsError

LONGEST_NAME = 80


def clean_name(name: str) -> str:
    """Make the name of a run fit for a label and a file name.

    Parameters
    ----------
    name : str
        Any text.

    Returns
    -------
    str
        Letters, digits, `.`, `_` and `-` of ASCII, at most 80, and no dot in front; `run` where nothing is left.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name.strip())[:LONGEST_NAME].lstrip(".") or "run"


def document(target: str, run: str, pid: int) -> bytes:
    """Describe an endpoint.

    The run's name is a `__meta_` label, for relabelling, and no label of the target: each series has the label `run`,
    and Prometheus would call that `exported_run`, did the target have one too.

    Parameters
    ----------
    target : str
        `HOST:PORT`.
    run : str
    pid : int
        Of the process that serves: two jobs of one name have different documents.

    Returns
    -------
    bytes
        JSON, as file_sd and http_sd of Prometheus take it.
    """
    labels = {"__meta_engine_run": run, "__meta_engine_pid": str(pid)}
    return json.dumps([{"targets": [target], "labels": labels}]).encode() + b"\n"


def place(path: Path, run: str) -> Path:
    """Find the file to write.

    Parameters
    ----------
    path : Path
        A file `*.json`, or a directory, which is made if it is not there.
    run : str
        Names the file in a directory.

    Returns
    -------
    Path

    Raises
    ------
    MetricsError
        It cannot be written there.
    """
    if path.suffix == ".json" and not path.is_dir():
        found = path
    else:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MetricsError(
                f"no file for Prometheus's file_sd in {str(path)!r}: {error.strerror}; name a directory or a *.json"
            ) from error
        found = path / f"{run}.json"
    if problem := files.check_directory(found):
        raise MetricsError(f"no file for Prometheus's file_sd at {str(found)!r}: {problem}")
    return found
