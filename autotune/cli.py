"""`autotune`: read the logs of searches, and what is kept of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune import horovod_csv, journal, known
from autotune.chosen import chosen
from autotune.journal import JournalError
from autotune.space import Knobs

OPTIONS = ("fusion_threshold", "cycle_time_ms")  # that enginerun has; the others are variables


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code: 0; 1 for a log that is not reproduced; 2 for files that cannot be used."""
    given = _parser().parse_args(argv)
    try:
        if given.command == "replay":
            return _replay(given.log)
        if given.command == "best":
            return _best(given.log, given.format)
        if given.command == "known":
            return _known(given.cache, given.forget)
        return _show(given.log, given.picture)
    except (JournalError, OSError) as error:
        print(f"autotune: error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        missing = str(error.name).partition(".")[0]
        print(f"autotune: error: {missing} is missing: pip install 'enginerun[autotune]'", file=sys.stderr)
        return 2


def _replay(log: Path) -> int:
    from autotune.replay import TOLERANCE, replay  # needs scipy, which the other commands can do without

    rows = journal.read(log)
    try:
        result = replay(rows)
    except JournalError as error:
        print(f"autotune: not reproduced: {log}, {error}", file=sys.stderr)
        return 1
    how = "exactly" if result.exact else f"within {TOLERANCE:g}, as numbers may differ: {'; '.join(result.differences)}"
    print(f"{log}: {result.proposals} proposals and {result.decisions} decisions reproduced {how}")
    return 0


def _show(log: Path, drawn: Path | None) -> int:
    from rich.console import Console

    from autotune.show import picture, show, show_samples

    console = Console()
    if horovod_csv.looks_like(log):
        show_samples(horovod_csv.read(log), console)
        return 0
    rows = journal.read(log)
    show(rows, console)
    if drawn is not None:
        picture(rows, drawn)
        print(f"drawn: {drawn}")
    return 0


def _best(log: Path, form: str) -> int:
    knobs, decided = chosen(log)
    if not decided:
        print(f"autotune: {log} has no decision: the search had not got so far; this is its default", file=sys.stderr)
    print(_formatted(knobs, form))
    return 0


def _known(cache: Path | None, forget: bool) -> int:
    home = known.directory() if cache is None else cache
    if forget:
        print(f"{known.forget(home)} results removed from {home}")
        return 0
    from rich.console import Console

    from autotune.show import show_known

    results, skipped = known.read(home)
    for each in skipped:
        print(f"autotune: not used: {each}", file=sys.stderr)
    if results:
        show_known(results, Console())
    print(f"{len(results)} results in {home}")
    return 0


def _formatted(knobs: Knobs, form: str) -> str:
    """Knobs for a shell, for a job's environment, or for a program."""
    if form == "json":
        return json.dumps(knobs)
    variables = [f"ENGINE_{name.upper()}={value}" for name, value in knobs.items()]
    if form == "environment":
        return "\n".join(variables)
    options = [f"--{name.replace('_', '-')} {value}" for name, value in knobs.items() if name in OPTIONS]
    rest = [variable for name, variable in zip(knobs, variables, strict=True) if name not in OPTIONS]
    return " ".join([*(["env", *rest] if rest else []), "enginerun", *options])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autotune", description="Read the logs of the tuner, and what it keeps.")
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("replay", help="go through a search again: fails if it now goes another way")
    shown = commands.add_parser("show", help="tell the story of a search")
    shown.add_argument("--picture", type=Path, metavar="FILE", help="draw it too: .png, .svg or .pdf")
    best = commands.add_parser("best", help="print the knobs that a search has decided for")
    best.add_argument("--format", choices=("environment", "json", "options"), default="environment")
    for command, more in ((again, ""), (shown, " or Horovod's CSV file"), (best, " or Horovod's CSV file")):
        command.add_argument("log", type=Path, metavar="LOG", help="a log" + more)
    kept = commands.add_parser("known", help="list what is kept of searches, for later jobs")
    kept.add_argument("--cache", type=Path, metavar="DIR", help="where (default: the user's cache directory)")
    kept.add_argument("--forget", action="store_true", help="remove it all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
