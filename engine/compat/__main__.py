"""`python -m engine.compat train.py [arguments]`, or `-m module`: run a program with the switch on."""

from __future__ import annotations

import errno
import os
import runpy
import sys
from collections.abc import Sequence

from ..host import machine
from ..host.python_startup import HOROVOD, add_startup
from ..text import readable
from . import install

USAGE = "usage: python -m engine.compat (SCRIPT | -m MODULE) [arguments]"


def main(arguments: Sequence[str]) -> int:
    """Run a program as `__main__`, and return the exit code: 0 when it has ended, 2 if there is none.

    The arguments are the path of a script, or `-m` and a module's name, followed by those of the program.
    """
    as_module = list(arguments[:1]) == ["-m"]
    program = list(arguments[1:] if as_module else arguments)
    if not program or program[0].startswith("-"):
        wanted = program[:1] == ["--help"] or program[:1] == ["-h"]
        readable.print_plain(USAGE, file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    install()
    os.environ.update(add_startup(os.environ, HOROVOD))  # for the processes that the program starts
    sys.argv[:] = program
    if as_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return 0
    try:
        script = str(machine.absolute_path(program[0]))
        if not os.path.exists(script):
            raise FileNotFoundError(errno.ENOENT, f"there is no file {program[0]!r} in {machine.working_directory()}")
    except FileNotFoundError as error:
        readable.print_plain(f"python -m engine.compat: {error.strerror}", file=sys.stderr)
        return 2
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
