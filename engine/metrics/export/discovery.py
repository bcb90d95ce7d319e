"""Discovery of an endpoint by Prometheus: http_sd and file_sd, one document for both."""

from __future__ import annotations

import json
from pathlib import Path

from ...host import linux
from ..errors import MetricsError
from . import atomic_file


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
            why = linux.explain_briefly(error)
            raise MetricsError(
                f"no file for Prometheus's file_sd in {str(path)!r}: {why}; name a directory or a *.json"
            ) from error
        found = path / f"{run}.json"
    if problem := atomic_file.check_directory(found):
        raise MetricsError(f"no file for Prometheus's file_sd at {str(found)!r}: {problem}")
    return found
