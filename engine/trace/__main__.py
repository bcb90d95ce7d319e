"""`python -m engine.trace`: read timelines and flight records. Needs no compiled extension."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..text import readable
from .merging import merge
from .postmortem import make_report
from .reading import TraceError, read
from .summary import format_summary, summarize_recordings
from .torch_dumps import convert_records


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 for files that cannot be used."""
    given = _make_parser().parse_args(argv)
    notes: list[str] = []
    try:
        if given.command == "flight":
            shown, data = make_report(given.directory)
            readable.print_plain(json.dumps(data, indent=1) if given.json else shown)
        elif given.command == "torch-dumps":
            dumps = convert_records(given.directory)
            notes += dumps.notes
            output = given.output or given.directory / "torch-dumps"
            dumps.write_files(output)
            shown = readable.format_ranks(dumps.content)
            readable.print_plain(f"{output}: dumps of {shown}; read them by: torchfrtrace {output}")
        elif given.command == "summary":
            figures = summarize_recordings(read(given.files, notes))
            readable.print_plain(json.dumps(figures, indent=1) if given.json else format_summary(figures))
        else:
            count = merge(given.files, given.output, notes)
            readable.print_plain(
                f"{given.output}: {count} events; open it at https://ui.perfetto.dev or chrome://tracing"
            )
    except BrokenPipeError:  # as with `| head`; otherwise the interpreter would try to write the rest again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (TraceError, OSError) as error:
        readable.print_plain(f"engine.trace: error: {error}", file=sys.stderr)
        return 2
    finally:
        for note in notes:
            readable.print_plain(f"engine.trace: {note}", file=sys.stderr)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.trace", description="Read timelines and flight records.")
    commands = parser.add_subparsers(dest="command", required=True)
    summary = commands.add_parser("summary", help="show overlap, waiting, the slowest rank and the slowest tensors")
    summary.add_argument("files", nargs="+", metavar="FILE", help="timelines, or a directory of them")
    summary.add_argument("--json", action="store_true", help="print JSON: seconds, bytes, shares from 0 to 1")
    merged = commands.add_parser("merge", help="merge the timelines of several ranks into one file")
    merged.add_argument("files", nargs="+", metavar="FILE", help="timelines, or a directory of them")
    merged.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write")
    flight = commands.add_parser("flight", help="show what each rank did last, from the flight records of a job")
    flight.add_argument("directory", type=Path, metavar="DIR", help="directory that holds rank.N/flight.json")
    flight.add_argument("--json", action="store_true", help="print JSON")
    dumps = commands.add_parser(
        "torch-dumps", help="convert the flight records of a job to dumps that PyTorch's torchfrtrace reads"
    )
    dumps.add_argument("directory", type=Path, metavar="DIR", help="directory that holds rank.N/flight.json")
    dumps.add_argument("-o", "--output", type=Path, metavar="DIR", help="directory to write (default: DIR/torch-dumps)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
