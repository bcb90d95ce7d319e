"""Command `python -m benchmarks gpu`: its options, and the output at the end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console

from benchmarks.common import paths, records
from benchmarks.gpu import report, run
from benchmarks.gpu.parts import PARTS

HELP = "what to run first on a machine with a GPU: its driver, results, costs, failures, and steps beside DDP's"


def add_options(add: Callable[..., Any]) -> None:
    """Declare the options; `add` is `add_argument` of the command's parser."""
    add("--quick", action="store_true", help="few samples and small sizes")
    add("--only", metavar="PART,...", default="", help=f"of {', '.join(PARTS)}")
    add("--minutes", type=float, default=run.GpuSettings.minutes, help="for all parts together (8)")
    add("--merge", action="store_true", help="keep parts of the last run that are not run now")


def run_command(options: argparse.Namespace, console: Console) -> None:
    """Measure, and show the tables; raise SystemExit for invalid options, or failed parts, which are named."""
    only = tuple(filter(None, options.only.split(",")))
    try:
        path = run.run(run.GpuSettings(only, options.minutes, options.quick), console, options.merge)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    content = records.read(path.stem) or {}
    for table in report.build_tables(content):
        table.print_to(console)
    console.print(f"written: {path}", soft_wrap=True)
    if bad := [name for name in only or PARTS if content["parts"][name]["outcome"] not in ("ok", "skipped")]:
        raise SystemExit(f"not all went well: {', '.join(bad)}; what they said is in {paths.OUT / 'logs'}/gpu-*.log")
