"""`enginerun`: the entry point, and what its command line says."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from ...metrics.errors import MetricsError
from ...text import readable
from ..errors import LaunchError

# Subcommands: the first argument, and the module whose `main` takes the others and returns the exit code. A program of
# such a name can be run all the same, because a job needs options such as -np before it.
COMMANDS = {
    "dashboards": "...metrics.dashboards",
    "doctor": ".doctor",
    "foresee": "...foresee.command",
    "job": "..jobfile.command",
    "top": "...metrics.report.top",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `enginerun` with arguments without the program's name; None: those of this process.

    The exit code is 0; 2 for a job that cannot start; otherwise that of `JobRun.run` or of the subcommand.
    """
    arguments = sys.argv[1:] if argv is None else argv
    with _reader_may_leave():
        return _main(arguments)


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Exit quietly with code 0 if the reader of stdout closes it early, as in `enginerun --check-build | head`."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # else it was closed when this process was started
                sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # the interpreter flushes the rest at exit
        os.close(null)
        raise SystemExit(0) from None


def _refuse_misspelled_command(arguments: Sequence[str]) -> None:
    """Refuse a first argument that resembles a subcommand; a job must begin with an option such as `-np`."""
    if arguments and not arguments[0].startswith("-"):
        near = difflib.get_close_matches(arguments[0], COMMANDS, 1)
        if near:
            raise LaunchError(
                f"{readable.quote_value(arguments[0])} is no command of enginerun; did you mean {near[0]!r}? "
                "To run a program give -np N before it, as in 'enginerun -np 4 python train.py'"
            )


def _main(arguments: Sequence[str]) -> int:
    try:
        if arguments and arguments[0] in COMMANDS:
            return int(importlib.import_module(COMMANDS[arguments[0]], __package__).main(arguments[1:]))
        _refuse_misspelled_command(arguments)
        from ..job import JobRun  # it imports this package, for the options
        from .options import parse

        return JobRun(parse(arguments)).run()
    except (LaunchError, MetricsError) as error:
        readable.print_plain(f"enginerun: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the ranks are started, or while their last output waits for its reader
        return 128 + signal.SIGINT
