"""`horovodrun`: the command that job scripts written for Horovod start, with the options that they give."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from ..launch import cli


def main(argv: Sequence[str] | None = None) -> Any:
    """Run `enginerun --horovod` with the same arguments; Horovod's own launcher if Horovod is installed.

    Both packages bring a command of this name, and the one that was installed last has its file. So a Horovod in the
    same environment keeps working, whichever that was.

    Parameters
    ----------
    argv : sequence of str or None
        Arguments without the program's name; None for those of this process.

    Returns
    -------
    int or None
        Exit code, as of `enginerun`.
    """
    theirs = _of_horovod()
    if theirs is not None:
        return theirs()
    return cli.main(["--horovod", *(sys.argv[1:] if argv is None else argv)])


def _of_horovod() -> Callable[[], Any] | None:
    """The launcher of an installed Horovod, which reads `sys.argv`; None if there is none."""
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
