"""Additional cost of a step for ranks of the coordinator's host, by the number of ranks.

Rank 0 and the other ranks of its host are real. `common/leaders.c` plays the leaders of all other hosts, and speaks
their protocol over TCP. Every rank submits the tensors of a step evenly over its backward pass, and then waits for all.
Tensors have one element. The cost to submit, execute and send them is that of rank 1 without a trunk, which has as many
lanes as rank 0 and does not coordinate. If the other ranks of the host share the trunks, this cost comes from a second
world of the same size, in which rank 0 has all trunks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from rich.console import Console

from benchmarks.common import environment, native, paths, progress, records
from benchmarks.common.processes import RankError
from benchmarks.common.tables import Table
from engine.net.rendezvous.layout import Layout

SHARE = 0.05
"""Target: largest additional cost of a rank of the coordinator's host, as a share of the step."""
FIRST = 2.0
"""Target: largest seconds of a step in which all names are new."""
GENERATION = 1
SLOWEST, PACES, LONGEST = 16, 64, 2.0
"""Intervals of a leader's messages for which nobody waits, as in `engine_ext/hosts/relay.pyx`."""


@dataclass(frozen=True)
class HubSettings:
    """Worlds and steps to measure."""

    ranks: tuple[int, ...] = (8, 32, 64, 128, 256)
    host_size: int = 4
    tensors: int = 2000
    steps: int = 20
    step: float = 0.3
    backward: float = 0.2
    cycle_ms: float = 5.0
    idle: float = 10.0
    warm_up: int = 3


def connect_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new TCP connection of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setblocking(False)
    return one, other


@contextlib.contextmanager
def open_connections(size: int, host_size: int, shared: bool) -> Iterator[tuple[dict[str, Any], list[int], list[int]]]:
    """Yield the real ranks' descriptors of their connections, and those of the other ends: trunks, then lanes.

    Rank 0 has all trunks, unless they may be `shared`.
    """
    hosts = [rank // host_size for rank in range(size)]
    layout = Layout(tuple(hosts))
    lanes: dict[int, dict[int, int]] = {rank: {} for rank in range(host_size)}
    trunks: dict[int, dict[int, int]] = {rank: {} for rank in range(host_size)}
    ends: list[socket.socket] = []
    played: list[int] = []

    def join(into: dict[int, int], name: int) -> None:
        one, other = connect_pair()
        ends.extend((one, other))
        into[name] = one.fileno()
        played.append(other.fileno())

    try:
        for leader, *_ in layout.crews[1:]:
            join(trunks[layout.trunk_ranks(leader)[0] if shared else 0], leader)
        carried = len(played)
        for host in range(1, max(hosts) + 1):
            crew = layout.crews[host]
            pairs = {(place, crew[place % len(crew)]) for place in range(host_size)}
            for own, other in sorted(pairs | {(place % host_size, rank) for place, rank in enumerate(crew)}):
                join(lanes[own], other)
        yield {"hosts": hosts, "lanes": lanes, "trunks": trunks}, played[:carried], played[carried:]
    finally:
        for end in ends:
            end.close()


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that has printed all its results."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def compute_pace(settings: HubSettings, hosts: int) -> float:
    """Return the milliseconds between two of a leader's messages for which nobody waits."""
    slow = max(hosts, SLOWEST)
    return min(settings.cycle_ms * min(slow, PACES) / PACES, LONGEST * slow / SLOWEST)


def measure_world(settings: HubSettings, size: int, shared: bool = True) -> dict[str, Any]:
    """Measure one world."""
    from engine.native import setup

    about: dict[str, Any] = {**asdict(settings), "size": size}
    control, arena = setup.create_segment(size, GENERATION), setup.create_arena()
    with open_connections(size, settings.host_size, shared) as (links, trunks, lanes), contextlib.ExitStack() as stack:
        for descriptor in (control, arena):
            stack.callback(os.close, descriptor)
        about |= links | {"control": control, "arena": arena}
        inside = [control, arena]
        inside += [fd for kind in ("lanes", "trunks") for each in links[kind].values() for fd in each.values()]

        def start(command: list[str], descriptors: list[int]) -> subprocess.Popen[str]:
            process = subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.PIPE, pass_fds=descriptors, text=True)
            stack.callback(end, process)
            return process

        hosts = (size - 1) // settings.host_size
        if hosts:
            numbers = [size, settings.host_size, settings.tensors, settings.steps]
            numbers += [round(1e3 * compute_pace(settings, hosts + 1))]
            numbers += [round(1e3 * settings.backward), round(1e3 * settings.step)]
            program = native.compile_source("leaders.c", include=(paths.ROOT,))
            start([str(program), *map(str, [*numbers, *trunks, *lanes])], trunks + lanes)
        module = [sys.executable, "-m", "benchmarks.hub.rank"]
        ranks = [start([*module, str(rank), json.dumps(about)], inside) for rank in range(settings.host_size)]
        hub, other = (read_output(ranks[rank], settings.steps + bool(settings.idle)) for rank in (0, 1))
    return {
        "ranks": size,
        "first": hub[0]["seconds"],
        **{
            name: compute_processor_time(each[settings.warm_up : settings.steps])
            for name, each in (("hub", hub), ("other", other))
        },
        "late": statistics.median(step["seconds"] for step in hub[settings.warm_up : settings.steps])
        - settings.backward,
        "idle": hub[-1].get("idle"),
    }


def read_output(process: subprocess.Popen[str], count: int) -> list[dict[str, float]]:
    """Read the output of a rank, a line for each step."""
    assert process.stdout is not None
    lines = []
    for _ in range(count):
        line = process.stdout.readline()
        if not line:
            raise RankError(f"a rank ended with {process.wait()}")
        lines.append(json.loads(line))
    return lines


def compute_processor_time(steps: list[dict[str, float]]) -> float:
    """Return the median seconds of processor time of a step."""
    return statistics.median(step["processor"] for step in steps)


def shares_trunks(settings: HubSettings, size: int) -> bool:
    """Return whether ranks other than 0 have the trunks."""
    return (
        not Layout(tuple(rank // settings.host_size for rank in range(size))).trunk_ranks(0)
        and size > settings.host_size
    )


def run(settings: HubSettings, console: Console) -> Path:
    """Measure, and write `out/hub.json`."""
    before = environment.record()
    begun = time.perf_counter()
    with progress.show_progress(console, "ranks", len(settings.ranks)) as advance:
        rows = []
        for size in settings.ranks:
            row = measure_world(settings, size)
            if shares_trunks(settings, size):
                alone = measure_world(replace(settings, idle=0.0), size, shared=False)
                row |= {"keeper": row["other"], "other": alone["other"], "alone": alone["hub"]}
            rows.append(row)
            advance(f"{size} done")
    seconds = round(time.perf_counter() - begun, 1)
    return records.write("hub", asdict(settings), before, {"results": rows, "seconds": seconds})


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the table of `out/hub.json`."""
    settings, rows = content["settings"], content["results"]
    table = Table(
        f"Processor time in a step of {1e3 * settings['step']:.0f} ms with {settings['tensors']} tensors, "
        f"{settings['host_size']} ranks on each host",
        ["ranks", "hosts", "no trunk", "rank 0", "rank 1 with trunks", "rank 0 with all trunks", "most more",
         "of the step", "end after the last gradient", "first step", f"idle for {settings['idle']:.0f} s", "reached"],
    )  # fmt: skip
    for row in rows:
        more = max(row["hub"], row.get("keeper", 0.0)) - row["other"]
        hosts = -(-row["ranks"] // settings["host_size"])
        spent = row["other"], row["hub"], row.get("keeper"), row.get("alone", row["hub"])
        cells = [str(row["ranks"]), str(hosts), *map(_format_ms, (*spent, more))]
        cells += [
            f"{100 * more / settings['step']:.1f} %",
            _format_ms(row["late"]),
            f"{row['first']:.2f} s",
            _format_ms(row["idle"]),
        ]
        reached = more <= SHARE * settings["step"] and row["first"] <= FIRST
        table.rows.append([*cells, "pass" if reached else "miss"])
    table.note = (
        f"To be reached: on ranks 0 and 1, at most {100 * SHARE:.0f} % of the step more than a rank without trunks; "
        f"the first step, whose names are new, in {FIRST:g} s. {environment.describe(content['environment'])}"
    )
    return [table]


def _format_ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f} ms"


def draw_figure(content: dict[str, Any]) -> Path:
    """Draw the cost of a step by the number of ranks, and return the PNG."""
    settings, rows = content["settings"], content["results"]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    ranks = [row["ranks"] for row in rows]
    lines = {
        "rank 0, had it all trunks": [row.get("alone", row["hub"]) for row in rows],
        "rank 0, which coordinates": [row["hub"] for row in rows],
        "rank 1, which has trunks beyond 9 hosts": [row.get("keeper", row["other"]) for row in rows],
        "a rank without trunks": [row["other"] for row in rows],
    }
    for label, seconds in lines.items():
        axes.plot(ranks, [1e3 * each for each in seconds], marker="o", label=label)
    limit = [1e3 * (row["other"] + SHARE * settings["step"]) for row in rows]
    axes.plot(ranks, limit, color="C3", linestyle="--", label=f"that and {100 * SHARE:.0f} % of the step")
    axes.set_xlabel("ranks")
    axes.set_ylabel("processor time of a step (ms)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.suptitle(f"A step with {settings['tensors']} tensors, {settings['host_size']} ranks on each host")
    path = paths.get_output_path("hub.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
