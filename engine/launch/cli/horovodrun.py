"""Command `horovodrun`, with Horovod's options, for job scripts that were written for Horovod."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from . import main as run_enginerun


def main(argv: Sequence[str] | None = None) -> Any:
    """Run `enginerun --horovod` with the same arguments, or Horovod's own launcher if Horovod is installed.

    Both packages install a command of this name, and the last one installed has the file. So a Horovod in the same
    environment works in either order of installation. Arguments and exit code are those of `enginerun`.
    """
    theirs = _of_horovod()
    if theirs is not None:
        return theirs()
    return run_enginerun(["--horovod", *(sys.argv[1:] if argv is None else argv)])


def _of_horovod() -> Callable[[], Any] | None:
    """Return the launcher of an installed Horovod, which reads `sys.argv`; None if there is none."""
    try:
        installed = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return None
    for command in installed.entry_points.select(group="console_scripts", name="horovodrun"):
        launcher: Callable[[], Any] = command.load()
        return launcher
    return None


if __name__ == "__main__":
    sys.exit(main())
