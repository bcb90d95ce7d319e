"""Command `autotune`: reads the logs of searches, and the results that are kept across jobs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune import horovod_csv, journal, result_cache
from autotune.decision import read_chosen_knobs
from autotune.journal import JournalError
from autotune.space import Knobs
from autotune.terminal import print_text
from autotune.trials import PolicyError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0; 1 for a log that is not reproduced; 2 for unusable files."""
    given = _build_parser().parse_args(argv)
    try:
        if given.command == "replay":
            if given.policy is not None or given.changes:
                return _run_what_if(given.log, given.policy or "tuner", given.changes)
            return _replay_log(given.log)
        if given.command == "best":
            return _print_best(given.log, given.format)
        if given.command == "known":
            return _print_known_results(given.cache, given.forget)
        return _show_log(given.log, given.picture)
    except (JournalError, PolicyError, OSError) as error:
        print_text(f"autotune: error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        missing = str(error.name).partition(".")[0]
        print_text(
            f"autotune: error: {missing} is missing: pip install '.[autotune]' in the source tree", file=sys.stderr
        )
        return 2


def _replay_log(log: Path) -> int:
    from autotune.replay import TOLERANCE, replay_log  # needs scipy, which the other commands can do without

    rows = journal.read(log)
    try:
        result = replay_log(rows)
    except JournalError as error:
        print_text(f"autotune: not reproduced: {log}, {error}", file=sys.stderr)
        return 1
    for row in rows:
        if row.get("decision") == "rest":
            print_text(row["because"])
    how = "exactly" if result.exact else f"within {TOLERANCE:g}, as numbers may differ: {'; '.join(result.differences)}"
    print_text(f"{log}: {result.proposals} proposals and {result.decisions} decisions reproduced {how}")
    return 0


def _run_what_if(log: Path, name: str, changes: Sequence[str]) -> int:
    from autotune.policies import apply_changes, make_policy
    from autotune.show import create_console, show_what_if
    from autotune.whatif import run_what_if

    rows = journal.read(log)
    row = apply_changes(rows[0], changes, name)
    found = run_what_if(rows, make_policy(name, row), name, row["seed"], row["max_trials"])
    show_what_if(found, name, row, create_console(sys.stdout))
    return 0


def _show_log(log: Path, drawn: Path | None) -> int:
    from autotune.show import create_console, show_log, show_samples

    console = create_console(sys.stdout)
    if horovod_csv.is_horovod_log(log):
        show_samples(horovod_csv.read(log), console)
        return 0
    rows = journal.read(log)
    show_log(rows, console)
    if drawn is not None:
        from autotune.picture import save_figure

        save_figure(rows, drawn)
        print_text(f"drawn: {drawn}")
    return 0


def _print_best(log: Path, form: str) -> int:
    knobs, decided = read_chosen_knobs(log)
    if not decided:
        print_text(
            f"autotune: {log} has no decision: the search had not got so far; this is its default", file=sys.stderr
        )
    print_text(_format_knobs(knobs, form))
    return 0


def _print_known_results(cache: Path | None, forget: bool) -> int:
    home = result_cache.get_default_directory() if cache is None else cache
    if forget:
        print_text(f"{result_cache.remove_results(home)} results removed from {home}")
        return 0
    from autotune.show import create_console, show_known

    results, skipped = result_cache.read(home)
    for each in skipped:
        print_text(f"autotune: not used: {each}", file=sys.stderr)
    if results:
        show_known(results, create_console(sys.stdout))
    print_text(f"{len(results)} result{'s' * (len(results) != 1)} in {home}")
    return 0


def _format_knobs(knobs: Knobs, form: str) -> str:
    """Format knobs for a shell, a job's environment, a job's settings file, or a program."""
    if form == "json":
        return json.dumps(knobs)
    if form == "environment":
        return "\n".join(f"ENGINE_{name.upper()}={value}" for name, value in knobs.items())
    if form == "config":  # JSON values are also YAML
        return "\n".join(["params:", *(f"  {name}: {json.dumps(value)}" for name, value in knobs.items())])
    return " ".join(["enginerun", *(f"--{name.replace('_', '-')} {value}" for name, value in knobs.items())])


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autotune", description="Read the tuner's logs, and the results that it keeps."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("replay", help="compute a search again; fails if proposals or decisions differ")
    again.add_argument(
        "--policy", metavar="NAME",
        help="estimate what another policy would have done: tuner, random, default, or module:factory, which is called "
        "with (space, default, seed, max_trials)",
    )  # fmt: skip
    again.add_argument(
        "--set", dest="changes", nargs="+", action="extend", default=[], metavar="NAME=VALUE",
        help="estimate what other settings would have done: seed, max_trials, or one of the tuner's, such as "
        "regret_budget. Either option gives estimates: a model of the log's trials before the first drift "
        "answers those that it does not have",
    )  # fmt: skip
    shown = commands.add_parser("show", help="summarize a search: trials, scores, decisions, cost")
    shown.add_argument("--picture", type=Path, metavar="FILE", help="also draw the search, as .png, .svg or .pdf")
    best = commands.add_parser("best", help="print the knobs that a search has chosen")
    best.add_argument(
        "--format", choices=("environment", "config", "options", "json"),
        default="environment", help="variables (the default), a file for `enginerun --config-file`, options, or JSON",
    )  # fmt: skip
    for command, more in ((again, ""), (shown, " or Horovod's CSV file"), (best, " or Horovod's CSV file")):
        command.add_argument("log", type=Path, metavar="LOG", help="log of a search" + more)
    kept = commands.add_parser("known", help="list the results of searches that are kept for later jobs")
    kept.add_argument("--cache", type=Path, metavar="DIR", help="their directory (default: the user's cache directory)")
    kept.add_argument("--forget", action="store_true", help="remove all results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
