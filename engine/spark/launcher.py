"""Launcher of an elastic job in Spark, in a process beside the caller: CALLER DIRECTORY options -- command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..launch.cli.options import parse
from ..runner.job import launch_job
from .task_registry import SETTINGS


def main(arguments: Sequence[str]) -> None:
    """Run the job, and write its outcome to the directory.

    The arguments are the caller's pid, the directory of the call, and arguments of `enginerun`.
    """
    home = Path(arguments[1])
    settings = json.loads((home / SETTINGS).read_text())
    os.environ.clear()  # agents lay this process's variables over the environment of the executors
    os.environ.update(settings)
    launch_job(int(arguments[0]), home, lambda: parse(arguments[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])
