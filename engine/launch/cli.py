"""`enginerun`: the entry point."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from engine.launch.errors import LaunchError
from engine.launch.job import JobRun
from engine.launch.options import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run `enginerun`.

    Parameters
    ----------
    argv : sequence of str or None
        Arguments without the program's name; None for those of this process.

    Returns
    -------
    int
        Exit code: 0; 2 for a job that cannot start; otherwise as `JobRun.run` says.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if list(arguments[:1]) == [
            "dashboards"
        ]:  # a program of that name comes after options: there is no job without -np
            return _dashboards(arguments[1:])
        return JobRun(parse(arguments)).run()
    except LaunchError as error:
        print(f"enginerun: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the ranks are started, or while their last output waits for its reader
        return 128 + signal.SIGINT


def _dashboards(arguments: Sequence[str]) -> int:
    from engine.metrics.dashboards import ExportError, main

    try:
        return main(arguments)
    except ExportError as error:
        raise LaunchError(str(error)) from error
