"""Command `enginerun foresee FILE... --hosts 2,8,64 --bandwidth 25G --latency 30us`; needs no compiled extension."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ..config.forms import Bytes, Number, Whole, bit_rate, make_argument_type, short_time
from ..text.readable import format_count, format_seconds, format_share, format_size, print_plain
from ..trace.reading import TraceError, read
from .model import Network, Rules, fuse_tensors, predict
from .picture import draw_picture
from .recorded import Recorded, choose_steps

MOST_HOSTS = 1 << 16
MOST_RANKS = 256  # maximum ranks of a job, limited by the control segment (engine_ext/shared/layout.h)
BAR = 30  # columns of the longest row's bar
ASSUMPTIONS = (
    "assumed: H hosts like the recorded one, of L ranks and one link each; S bytes summed by a direct exchange",
    "((L+1) S (H-1)/H each way, two trips), or along a chain of hosts (2 S, two hosts S, 2 H - 2 trips), as the engine",
    "chooses; overlapped with computation; each rank keeps its batch, and the job's grows (weak scaling);",
    "no loss, no other traffic, no late hosts.",
)


@dataclass(frozen=True)
class Row:
    """Row of the table; values are means over the steps."""

    hosts: int
    ranks: int
    step: float  # duration of a step in seconds
    efficiency: float  # duration of the recorded step divided by that of this row
    added: float  # seconds that the network adds to a step
    busy: float  # share of a step in which a host's link carries data, in each direction
    nbytes: float  # bytes that a host sends in a step


def main(arguments: Sequence[str]) -> int:
    """Run `enginerun foresee`, and return the exit code: 0, or 2 for files that cannot be used."""
    given = _make_parser().parse_args(arguments)
    notes: list[str] = []
    try:
        told = choose_steps(read(given.files, notes))
        changes = {name: getattr(given, name) for name in ("fusion_threshold", "chunk_bytes", "between_hosts")}
        changes["cycle_time"] = None if given.cycle_time_ms is None else given.cycle_time_ms / 1e3
        rules = replace(told.rules, **{name: value for name, value in changes.items() if value is not None})
        network = Network(given.bandwidth, given.latency)
        rows = compute_table(told, rules, given.hosts, network)
        print_plain(_to_json(told, rules, network, rows) if given.json else format_table(told, rules, network, rows))
        if given.picture is not None:
            given.picture.write_text(
                draw_picture(_make_title(told), rows, describe_network(rules, network)), encoding="utf-8"
            )
            print_plain(f"enginerun foresee: {given.picture} is drawn", file=sys.stderr)
    except BrokenPipeError:  # as with `| head`; otherwise the interpreter would try to write the rest again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (TraceError, OSError) as error:
        hint = "; a timeline is what 'enginerun --timeline t.json ..' writes" if "no timeline" in str(error) else ""
        print_plain(f"enginerun foresee: error: {error}{hint}", file=sys.stderr)
        return 2
    finally:
        for note in notes:
            print_plain(f"enginerun foresee: {note}", file=sys.stderr)
    return 0


def compute_table(told: Recorded, rules: Rules, hosts: Sequence[int], network: Network) -> list[Row]:
    """Compute the table: a row for the recorded host, then one for each other number of hosts.

    `rules`, by which tensors fuse, are those of the recording, or others.
    """
    rows = []
    before = fmean(step.seconds for step in told.steps)
    for count in dict.fromkeys((1, *hosts)):
        steps = [predict(step, rules, count, network, told.ranks) for step in told.steps]
        seconds = fmean(step.seconds for step in steps)
        rows.append(
            Row(
                hosts=count,
                ranks=count * told.ranks,
                step=seconds,
                efficiency=before / seconds,
                added=seconds - before,
                busy=fmean(step.busy for step in steps) / seconds,
                nbytes=fmean(step.nbytes for step in steps),
            )
        )
    return rows


def describe_network(rules: Rules, network: Network) -> str:
    """Describe the network and the knobs in one line."""
    return (
        f"{network.bandwidth / 1e9:g} Gbit/s, {format_seconds(network.latency)} one way, fusion threshold "
        f"{format_size(rules.fusion_threshold)}, cycle time {1e3 * rules.cycle_time:g} ms"
    )


def format_table(told: Recorded, rules: Rules, network: Network, rows: Sequence[Row]) -> str:
    """Format the table, at most 120 columns wide."""
    step = fmean(each.seconds for each in told.steps)
    waited = fmean(sum(ended - begun for begun, ended in each.waits) for each in told.steps)
    entries = fmean(len(fuse_tensors(each, rules)) for each in told.steps)
    share = f"{len(told.steps)} of {format_count(told.of, 'step')} in full"
    lines = [
        f"recorded: {format_count(told.ranks, 'rank')} on one host, {share}, {1e3 * step:.2f} ms each, "
        f"of which the program of rank {told.rank} waited {1e3 * waited:.2f} ms",
        f"network: {describe_network(rules, network)}: {entries:.1f} entries a step, recorded {told.entries:.1f}",
        *(f"note: {note}" for note in notes_on(told, rows)),
        "",
        "hosts   ranks        step  efficiency     added  link busy   host sends",
    ]
    longest = max(row.step for row in rows)
    for row in rows:
        bar = "#" * round(BAR * step / longest) + "+" * round(BAR * row.added / longest)
        lines.append(
            f"{row.hosts:5d} {row.ranks:7d} {1e3 * row.step:8.2f} ms {format_share(row.efficiency):>11} "
            f"{1e3 * row.added:6.2f} ms {format_share(row.busy):>10} {format_size(row.nbytes):>12}  {bar}"
        )
    return "\n".join([*lines, "", "#: the recorded step; +: what the network adds", *ASSUMPTIONS])


def notes_on(told: Recorded, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return notes for the user about the recording and the rows."""
    if max(row.ranks for row in rows) <= MOST_RANKS:
        return told.notes
    return (*told.notes, f"rows with more than {MOST_RANKS} ranks are what the model gives: no job has so many")


def _make_title(told: Recorded) -> str:
    return f"A step on more hosts, foreseen from {format_count(len(told.steps), 'step')} of one"


def _to_json(told: Recorded, rules: Rules, network: Network, rows: Sequence[Row]) -> str:
    parts: dict[str, Any] = {
        "recorded": {
            "ranks": told.ranks,
            "rank": told.rank,
            "steps": len(told.steps),
            "of": told.of,
            "step": fmean(step.seconds for step in told.steps),
            "entries": told.entries,
            "notes": notes_on(told, rows),
        },
        "rules": vars(rules),
        "network": vars(network),
        "hosts": [vars(row) for row in rows],
        "assumptions": " ".join(ASSUMPTIONS),
    }
    return json.dumps(parts, indent=1)


def _parse_hosts(given: Any) -> list[int]:
    """Parse numbers of hosts, such as `2,8,64`."""
    try:
        return [Whole(1, MOST_HOSTS)(part) for part in str(given).split(",")]
    except ValueError:
        raise ValueError(f"numbers of hosts from 1 to {MOST_HOSTS} with commas between them, such as 2,8,64") from None


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enginerun foresee",
        description="Predict a training step on more hosts from timelines that were recorded on one.",
        epilog="Record with 'enginerun -np 2 --timeline t.json python train.py'. "
        "docs/explanation/foresee.md says what is assumed.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="timelines of one job, or a directory of them")
    add(
        "--hosts",
        type=make_argument_type(_parse_hosts),
        required=True,
        metavar="N,N,..",
        help="numbers of hosts, as 2,8,64",
    )
    add(
        "--bandwidth",
        type=make_argument_type(bit_rate),
        required=True,
        metavar="RATE",
        help="of a host's link, as 25G: bit/s",
    )
    add(
        "--latency",
        type=make_argument_type(short_time),
        required=True,
        metavar="TIME",
        help="from host to host, one way, as 30us",
    )
    add("--fusion-threshold", type=make_argument_type(Bytes()), metavar="SIZE", help="not the recording's, as 64M")
    add("--cycle-time-ms", type=make_argument_type(Number(0, 10_000)), metavar="MS", help="not the recording's")
    add(
        "--chunk-bytes",
        type=make_argument_type(Bytes(4 << 10, 1 << 30, "512K")),
        metavar="SIZE",
        help="other than the recording's",
    )
    add(
        "--between-hosts", choices=("auto", "direct", "chain"), help="how allreduces travel, if not as in the recording"
    )
    add("--picture", type=Path, metavar="FILE.svg", help="draw the table too")
    add("--json", action="store_true", help="print JSON: seconds, bytes, shares from 0 to 1")
    return parser
