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

from ..config.forms import MOST, Bytes, Number, Whole, bit_rate, make_argument_type, short_time
from ..text.readable import format_count, format_seconds, format_share, format_size, print_plain
from ..trace.reading import TraceError, read
from .model import Network, Prediction, Rules, Step, fuse_tensors, predict
from .picture import draw_picture
from .recorded import Recorded, choose_steps
from .variants import (
    COMPRESSIONS,
    LocalSteps,
    average_steps,
    compress_step,
    find_gradients,
    predict_local_steps,
)

MOST_HOSTS = 1 << 16
MOST_RANKS = 256  # maximum ranks of a job, limited by the control segment (engine_ext/shared/layout.h)
BAR = 30  # columns of the longest row's bar
ASSUMPTIONS = (
    "assumed: H hosts like the recorded one, of L ranks and one link each; S bytes summed by a direct exchange",
    "((L+1) S (H-1)/H each way, two trips), or along a chain of hosts (2 S, two hosts S, 2 H - 2 trips), as the engine",
    "chooses; overlapped with computation; each rank keeps its batch, and the job's grows (weak scaling);",
    "no loss, no other traffic, no late hosts.",
)
ASSUMED_OF_FP8 = (
    "fp8: hosts exchange their sums, 65/64 bytes an element, 2 (H-1)/H of it each way; coding takes no time."
)
ASSUMED_OF_LOCAL_STEPS = (
    "local steps: ranks of a host average gradients in each step, as recorded; every rank gives its changes of all",
    "parameters to the averaging; the outer optimizer takes no time.",
)


@dataclass(frozen=True)
class Variant:
    """Job to foresee, where it differs from the recorded one."""

    compression: str | None = None  # of what travels between hosts; None: as recorded, or none with local steps
    local: LocalSteps | None = None


AS_RECORDED = Variant()


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
    parser = _make_parser()
    given = parser.parse_args(arguments)
    variant = _read_variant(parser, given)
    notes: list[str] = []
    try:
        told = choose_steps(read(given.files, notes))
        _expect_possible(told, variant)
        changes = {name: getattr(given, name) for name in ("fusion_threshold", "chunk_bytes", "between_hosts")}
        changes["cycle_time"] = None if given.cycle_time_ms is None else given.cycle_time_ms / 1e3
        rules = replace(told.rules, **{name: value for name, value in changes.items() if value is not None})
        network = Network(given.bandwidth, given.latency)
        rows = compute_table(told, rules, given.hosts, network, variant)
        shown = _to_json if given.json else format_table
        print_plain(shown(told, rules, network, rows, variant))
        if given.picture is not None:
            line = "; ".join([describe_network(rules, network), *describe_variant(variant)])
            given.picture.write_text(draw_picture(_make_title(told), rows, line), encoding="utf-8")
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


def compute_table(
    told: Recorded, rules: Rules, hosts: Sequence[int], network: Network, variant: Variant = AS_RECORDED
) -> list[Row]:
    """Compute the table: a row for the recorded host, then one for each other number of hosts.

    `rules`, by which tensors fuse, are those of the recording, or others.
    """
    rows = []
    before = fmean(step.seconds for step in told.steps)
    for count in dict.fromkeys((1, *hosts)):
        steps = predict_steps(told, rules, count, network, variant)
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


def predict_steps(told: Recorded, rules: Rules, hosts: int, network: Network, variant: Variant) -> list[Prediction]:
    """Predict each recorded step; of a job with local steps, the mean one."""
    if variant.local is not None:
        mean, wire = average_steps(told.steps), variant.compression or "none"
        return [predict_local_steps(mean, variant.local, wire, rules, hosts, network, told.ranks)]
    return [predict(step, rules, hosts, network, told.ranks) for step in _choose_wire(told, variant)]


def _choose_wire(told: Recorded, variant: Variant) -> list[Step]:
    wire = variant.compression
    return list(told.steps) if wire is None else [compress_step(step, wire) for step in told.steps]


def describe_variant(variant: Variant) -> list[str]:
    """Describe in one line, or none, what is not as recorded."""
    wire = [] if variant.compression is None else [f"compression {variant.compression}"]
    if variant.local is None:
        return wire
    local = variant.local
    fragments = f"{format_count(local.fragments, 'fragment')}, applied {format_count(local.delay, 'step')} later"
    return [", ".join([f"{format_count(local.every, 'local step')} between averagings, {fragments}", *wire])]


def describe_network(rules: Rules, network: Network) -> str:
    """Describe the network and the knobs in one line."""
    return (
        f"{network.bandwidth / 1e9:g} Gbit/s, {format_seconds(network.latency)} one way, fusion threshold "
        f"{format_size(rules.fusion_threshold)}, cycle time {1e3 * rules.cycle_time:g} ms"
    )


def format_table(
    told: Recorded, rules: Rules, network: Network, rows: Sequence[Row], variant: Variant = AS_RECORDED
) -> str:
    """Format the table, at most 120 columns wide."""
    step = fmean(each.seconds for each in told.steps)
    waited = fmean(sum(ended - begun for begun, ended in each.waits) for each in told.steps)
    entries = fmean(len(fuse_tensors(each, rules)) for each in _choose_wire(told, variant))
    share = f"{len(told.steps)} of {format_count(told.of, 'step')} in full"
    lines = [
        f"recorded: {format_count(told.ranks, 'rank')} on one host, {share}, {1e3 * step:.2f} ms each, "
        f"of which the program of rank {told.rank} waited {1e3 * waited:.2f} ms",
        f"network: {describe_network(rules, network)}: {entries:.1f} entries a step, recorded {told.entries:.1f}",
        *(f"variant: {line}" for line in describe_variant(variant)),
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
    return "\n".join([*lines, "", "#: the recorded step; +: what the network adds", *list_assumptions(variant)])


def list_assumptions(variant: Variant) -> list[str]:
    """Return lines for the user that say what is assumed."""
    lines = list(ASSUMPTIONS)
    if variant.compression == "fp8":
        lines.append(ASSUMED_OF_FP8)
    if variant.local is not None:
        lines += ASSUMED_OF_LOCAL_STEPS
    return lines


def notes_on(told: Recorded, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return notes for the user about the recording and the rows."""
    if max(row.ranks for row in rows) <= MOST_RANKS:
        return told.notes
    return (*told.notes, f"rows with more than {MOST_RANKS} ranks are what the model gives: no job has so many")


def _make_title(told: Recorded) -> str:
    return f"A step on more hosts, foreseen from {format_count(len(told.steps), 'step')} of one"


def _to_json(told: Recorded, rules: Rules, network: Network, rows: Sequence[Row], variant: Variant) -> str:
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
        "compression": variant.compression,
        "local_steps": None if variant.local is None else vars(variant.local),
        "hosts": [vars(row) for row in rows],
        "assumptions": " ".join(list_assumptions(variant)),
    }
    return json.dumps(parts, indent=1)


def _read_variant(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Variant:
    """Return the variant that the options ask for; exit with an error if they contradict each other."""
    every, fragments, delay = given.local_steps, given.fragments, given.delay
    if every is None:
        for option, value in (("--fragments", fragments), ("--delay", delay)):
            if value is not None:
                parser.error(f"{option} is one of local steps: give --local-steps N, too")
        return Variant(given.compression)
    if (delay or 0) >= every:
        parser.error(f"--delay {delay}: a synchronisation is applied before the next one, so at most {every - 1} later")
    if (fragments or 1) > every:
        parser.error(
            f"--fragments {fragments}: each has a step of its own, so at most {every} with --local-steps {every}"
        )
    return Variant(given.compression, LocalSteps(every, fragments or 1, delay or 0))


def _expect_possible(told: Recorded, variant: Variant) -> None:
    """Raise TraceError if the recorded job could not run as the variant."""
    kinds = {tensor.kind for tensor in told.steps[0].tensors}
    if variant.compression == "fp8" and told.on_gpu:
        raise TraceError("--compression fp8: the recorded tensors are on a GPU, where the engine has no fp8: give bf16")
    if variant.local is None:
        if variant.compression == "fp8" and "reducescatter" in kinds:
            raise TraceError("--compression fp8: the recorded reduce-scatters cannot travel as fp8: give bf16")
        return
    gradients = len(find_gradients(told.steps[0]))
    if not gradients:
        raise TraceError(
            f"--local-steps: the recorded steps have no allreduce of floating numbers: "
            f"they have {', '.join(sorted(kinds))}. Record a job that averages gradients with a DistributedOptimizer"
        )
    if variant.local.fragments > gradients:
        raise TraceError(f"--fragments {variant.local.fragments}: the recorded steps have {gradients} gradients")


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
    add("--compression", choices=COMPRESSIONS, help="of what travels between hosts, if not as in the recording")
    add(
        "--local-steps",
        type=make_argument_type(Whole(1, MOST)),
        metavar="N",
        help="no averaging of gradients between hosts: an OuterOptimizer averages parameters after N steps",
    )
    add("--fragments", type=make_argument_type(Whole(1, MOST)), metavar="N", help="of the OuterOptimizer (1)")
    add("--delay", type=make_argument_type(Whole(0, MOST)), metavar="STEPS", help="of the OuterOptimizer (0)")
    add("--picture", type=Path, metavar="FILE.svg", help="draw the table too")
    add("--json", action="store_true", help="print JSON: seconds, bytes, shares from 0 to 1")
    return parser
