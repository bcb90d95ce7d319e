"""The launcher of an elastic job in Spark, a process beside the caller: CALLER DIRECTORY options -- command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..launch.options import parse
from ..runner.job import launch
from .offers import SETTINGS


def main(arguments: Sequence[str]) -> None:
    """Run the job, and write down how it ended.

    Parameters
    ----------
    arguments : sequence of str
        The caller's pid, the directory of the call, and what `enginerun` takes.
    """
    home = Path(arguments[1])
    settings = json.loads((home / SETTINGS).read_text())
    os.environ.clear()  # ranks have their executors' environment, over which agents lay what this process has
    os.environ.update(settings)
    launch(int(arguments[0]), home, lambda: parse(arguments[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])
