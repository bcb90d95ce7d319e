"""The launcher of `engine.run`, a process beside the caller. Its arguments: CALLER DIRECTORY options -- command."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..host import linux, private_files, processes
from ..launch.cli.options import Options, parse
from ..launch.errors import LaunchError
from ..launch.job import JobRun
from ..launch.process.leftovers import ERROR, RESULT
from .function import CALL, OUTCOME


def main(arguments: Sequence[str]) -> None:
    """Run the job, and write its outcome into the directory of the call.

    `arguments` are the caller's pid, the directory of the call, and the arguments of `enginerun`.
    """
    launch_job(int(arguments[0]), Path(arguments[1]), lambda: parse(arguments[2:]))


def launch_job(caller: int, home: Path, options: Callable[[], Options]) -> None:
    """Run a job for a caller, move its results into the caller's directory, and write its outcome there.

    This process is terminated when the caller, given by its process id, dies. `home` is the caller's directory, which
    holds the pickled call. `options` returns the options of the job, or raises a `LaunchError`.
    """
    processes.call_prctl(processes.PR_SET_PDEATHSIG, signal.SIGTERM)  # sent when the caller dies
    incomplete: dict[str, str] = {}  # file name in `home` -> why the file is incomplete
    outcome: dict[str, Any] = {"error": None, "code": 0, "directories": [], "rank": None, "host": None, "report": []}
    if os.getppid() == caller:  # else it died before the call of prctl
        try:
            chosen = replace(options(), enclosed=(home / CALL).read_bytes())
            job = JobRun(chosen, lambda directory: _collect(directory, home, incomplete))
            outcome |= {"code": job.run(), "directories": job.directories, "report": job.report}
            for path, problem in job.problems.items():
                incomplete.setdefault(_name_collected(Path(path)), linux.explain_briefly(problem))
            if job.failure_cause is not None:
                outcome["rank"] = job.failure_cause.culprit
                outcome["host"] = (job.hosts or {}).get(job.failure_cause.culprit)
        except LaunchError as error:
            outcome["error"] = str(error)
    if os.getppid() == caller:
        private_files.write(home / OUTCOME, json.dumps(outcome | {"incomplete": incomplete}).encode())
    else:
        shutil.rmtree(home, ignore_errors=True)  # the caller cannot do it any more


def _collect(directory: Path, home: Path, incomplete: dict[str, str]) -> None:
    """Move the ranks' results and errors from the job's directory to `home`; note which failed to move, and why."""
    for name in (RESULT, ERROR):
        for path in directory.glob(f"rank.*/{name}"):
            try:
                if not private_files.is_own(path):
                    raise PermissionError(errno.EPERM, "it is no file of this user")
                shutil.move(path, home / _name_collected(path))
            except OSError as error:
                incomplete[_name_collected(path)] = linux.explain_briefly(error)


def _name_collected(path: Path) -> str:
    """Return the name that a file of a rank's directory gets in the caller's directory."""
    return f"{path.parent.name}.{path.name}"


if __name__ == "__main__":
    main(sys.argv[1:])
