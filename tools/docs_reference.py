"""Write the generated parts of docs/reference from the sources, or check that they are current.

python -m tools.docs_reference [--check]

A page marks such a part by `<!-- generated: NAME -->` and `<!-- end of generated -->`; `PARTS` maps names to functions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

from engine.config import config
from engine.metrics import definitions
from tools import docs_python

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
PART = re.compile(r"(<!-- generated: ([\w.-]+) -->\n)(.*?)(<!-- end of generated -->\n)", re.DOTALL)
WIDTH = 100
# Command, the module whose `main` parses it, and the arguments that `main` is given.
COMMANDS = {
    "enginerun": ("engine.launch.cli", ["true"]),
    "enginerun top": ("engine.metrics.report.top", []),
    "enginerun doctor": ("engine.launch.cli.doctor", []),
    "enginerun foresee": ("engine.foresee.command", []),
    "enginerun dashboards": ("engine.metrics.dashboards", []),
    "autotune": ("autotune.cli", []),
    "python -m engine.trace": ("engine.trace.__main__", []),
}


def main(check: bool) -> int:
    """Write all generated parts; with `check`, report the pages that would change instead."""
    stale = False
    for page in sorted(PAGES.glob("**/*.md")):
        text = page.read_text()
        fresh = PART.sub(lambda found: found[1] + PARTS[found[2]]() + found[4], text)
        if fresh != text and check:
            print(f"{page.relative_to(ROOT)} is not what the sources give: python -m tools.docs_reference")
            stale = True
        elif fresh != text:
            page.write_text(fresh)
    return int(stale)


def wrap_item(text: str, first: str = "", rest: str = "") -> str:
    """Return a paragraph or an item of a list in lines of at most `WIDTH` characters."""
    lines, line = [], first
    for word in re.findall(r"\S+(?: (?:[-+*#]|\d+[.)])(?!\S))*", " ".join(text.split())):  # no line begins like a list
        if line in (first, rest):
            line += word
        elif len(line) + 1 + len(word) <= WIDTH:
            line += f" {word}"
        else:
            lines.append(line)
            line = rest + word
    return "\n".join([*lines, line]) + "\n"


def read_table(table: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table in Markdown as texts by column."""
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines())
    for row in rows:
        yield dict(zip(header, row, strict=True))


def write_settings() -> str:
    """Return the settings: a heading, the meaning and the names of each."""
    parts = []
    for row in read_table(config.describe()):
        names = [f"Variable {row['variable']}", f"option {row['option']}" if row["option"] else ""]
        default = f"default {row['default']} {row['unit']}".strip()
        parts.append(f"### {row['setting']}\n\n" + wrap_item(row["meaning"]))
        parts.append(wrap_item(", ".join(filter(None, [*names, default])) + "."))
    return "\n" + "\n".join(parts) + "\n"


def write_metrics() -> str:
    """Return the metrics, grouped by whom they belong to."""
    groups: dict[str, list[str]] = {}
    for row in read_table(definitions.format_metrics_table()):
        kind = f"{row['type']}; {row['labels']}" if row["labels"] else row["type"]
        text = f"{row['metric']} ({kind}): {row['meaning']}"
        groups.setdefault(row["of"], []).append(wrap_item(text, "- ", "  "))
    return "\n" + "\n".join(f"### Of {of}\n\n{''.join(items)}" for of, items in groups.items()) + "\n"


def capture_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser by which a command reads its arguments."""
    module, arguments = COMMANDS[command]
    found: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        found.append(parser)
        raise SystemExit

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop), contextlib.suppress(SystemExit):
        importlib.import_module(module).main(arguments)
    return found[0]


def describe_action(action: argparse.Action) -> str:
    """Return an option or argument as an item of a list."""
    value = "" if action.nargs == 0 else f" {action.metavar or ''}".rstrip()
    if action.choices is not None and not action.metavar:
        value = " " + "|".join(map(str, action.choices))
    names = ", ".join(f"`{name}{value if at == 0 else ''}`" for at, name in enumerate(action.option_strings))
    names = names or f"`{action.metavar or action.dest}`"
    return wrap_item(f"{names}: {action.help}" if action.help else names, "- ", "  ")


def describe_parser(parser: argparse.ArgumentParser, level: int = 3) -> Iterator[str]:
    """Yield the description, the options by group, and the subcommands of a parser."""
    if parser.description:
        yield wrap_item(parser.description)
    for group in parser._action_groups:
        shown = [
            each
            for each in group._group_actions
            if each.help != argparse.SUPPRESS
            and not isinstance(each, argparse._HelpAction | argparse._SubParsersAction)
        ]
        if shown:
            titled = group.title not in ("options", "positional arguments")
            heading = f"{'#' * level} {str(group.title).capitalize()}\n\n" if titled else ""
            about = wrap_item(group.description) + "\n" if group.description else ""
            yield heading + about + "".join(map(describe_action, shown))
    for each in parser._actions:
        if isinstance(each, argparse._SubParsersAction):
            help_of = {choice.dest: choice.help or "" for choice in each._choices_actions}
            for name, sub in each.choices.items():
                yield f"{'#' * level} {parser.prog} {name}\n\n{wrap_item(help_of[name].capitalize() + '.')}"
                yield from describe_parser(sub, level + 1)
    if parser.epilog:
        yield wrap_item(parser.epilog)


def write_command(command: str) -> str:
    """Return the arguments and options of a command."""
    return "\n" + "\n".join(describe_parser(capture_parser(command))) + "\n"


def write_job_usage() -> str:
    """Return what `enginerun job --help` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        importlib.import_module("engine.launch.jobfile.command").main(["--help"])
    return f"\n```text\n{out.getvalue().strip()}\n```\n\n"


PARTS: dict[str, Callable[[], str]] = {
    "settings": write_settings,
    "metrics": write_metrics,
    "enginerun-job": write_job_usage,
    **{re.sub(r"\W+", "-", name): lambda name=name: write_command(name) for name in COMMANDS},  # type: ignore[misc]
    **{f"python-{name}": lambda name=name: docs_python.write_module(name) for name in docs_python.MODULES},  # type: ignore[misc]
}


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
