"""Service discovery of an endpoint by Prometheus: one document for http_sd and file_sd."""

from __future__ import annotations

import json
from pathlib import Path

from ...host import linux
from ..errors import MetricsError
from . import atomic_file


def describe_endpoint(target: str, run: str, pid: int) -> bytes:
    """Describe the endpoint at `target` (`HOST:PORT`) in JSON for file_sd and http_sd of Prometheus.

    The run's name is a `__meta_` label, for relabelling, not a label of the target. Each series already has the label
    `run`, which Prometheus would rename `exported_run` if the target had one too. `pid` is the process that serves the
    endpoint; it distinguishes two jobs with the same name.
    """
    labels = {"__meta_engine_run": run, "__meta_engine_pid": str(pid)}
    return json.dumps([{"targets": [target], "labels": labels}]).encode() + b"\n"


def choose_file(path: Path, run: str) -> Path:
    """Choose the file to write: `path` itself if it is `*.json`, else a file named after the run in this directory.

    The directory is created if it does not exist. Raises MetricsError if the file cannot be written.
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
