"""What the coordinator's rank spends on a step more than others do, by the number of ranks.

Rank 0 and the other ranks of its host are real; the leaders of all other hosts are played by `common/leaders.c`, which
speaks their frames over TCP. Every rank submits the tensors of a step evenly over its backward pass, and then waits for
all. Tensors have one element; what it costs to submit, execute and send them is what rank 1 spends, which has as many
connections to ranks of other hosts as rank 0, and does not coordinate.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from rich.console import Console

from benchmarks.common import environment, native, paths, progress, records
from benchmarks.common.processes import RankError
from benchmarks.common.tables import Table

SHARE = 0.05
"""Of a step: the most that the coordinator's rank should spend more than another."""
FIRST = 2.0
"""Seconds: the longest that a step should take whose names are all new."""
GENERATION = 1
SLOWEST, PACES = 16, 64
"""How often a leader tells what nobody waits for, as `engine_ext/control/relay.pyx` has it."""


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    ranks: tuple[int, ...] = (8, 32, 64, 128, 256)
    host_size: int = 4
    tensors: int = 2000
    steps: int = 20
    step: float = 0.3
    backward: float = 0.2
    cycle_ms: float = 5.0
    idle: float = 10.0
    warm_up: int = 3


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setblocking(False)
    return one, other


@contextlib.contextmanager
def connections(size: int, host_size: int) -> Iterator[tuple[dict[str, Any], list[int], list[int]]]:
    """What the real ranks are told of their connections, and the descriptors of the other ends: trunks, then lanes."""
    hosts = [rank // host_size for rank in range(size)]
    lanes: dict[int, dict[int, int]] = {rank: {} for rank in range(host_size)}
    trunks: dict[int, dict[int, int]] = {rank: {} for rank in range(host_size)}
    ends: list[socket.socket] = []
    played: list[int] = []

    def join(into: dict[int, int], name: int) -> None:
        one, other = connected()
        ends.extend((one, other))
        into[name] = one.fileno()
        played.append(other.fileno())

    try:
        for host in range(1, max(hosts) + 1):
            join(trunks[0], host)
        carried = len(played)
        for host in range(1, max(hosts) + 1):
            crew = [rank for rank in range(size) if hosts[rank] == host]
            pairs = {(place, crew[place % len(crew)]) for place in range(host_size)}
            for own, other in sorted(pairs | {(place % host_size, rank) for place, rank in enumerate(crew)}):
                join(lanes[own], other)
        yield {"hosts": hosts, "lanes": lanes, "trunks": trunks}, played[:carried], played[carried:]
    finally:
        for end in ends:
            end.close()


def end(process: subprocess.Popen[str]) -> None:
    """End a process that has told all it was to tell."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def world(settings: Settings, size: int) -> dict[str, Any]:
    """Measure one world."""
    from engine.native import setup

    about: dict[str, Any] = {**asdict(settings), "size": size}
    control, arena = setup.create_segment(size, GENERATION), setup.create_arena()
    with connections(size, settings.host_size) as (links, trunks, lanes), contextlib.ExitStack() as stack:
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
            pace = round(1e3 * settings.cycle_ms * min(max(hosts + 1, SLOWEST), PACES) / PACES)
            numbers = [size, settings.host_size, settings.tensors, settings.steps, pace]
            numbers += [round(1e3 * settings.backward), round(1e3 * settings.step)]
            program = native.build("leaders.c", include=(paths.ROOT,))
            start([str(program), *map(str, [*numbers, *trunks, *lanes])], trunks + lanes)
        module = [sys.executable, "-m", "benchmarks.hub.rank"]
        ranks = [start([*module, str(rank), json.dumps(about)], inside) for rank in range(settings.host_size)]
        hub, other = (told(ranks[rank], settings.steps + bool(settings.idle)) for rank in (0, 1))
    return {
        "ranks": size,
        "first": hub[0]["seconds"],
        **{name: processor(each[settings.warm_up : settings.steps]) for name, each in (("hub", hub), ("other", other))},
        "late": statistics.median(step["seconds"] for step in hub[settings.warm_up : settings.steps])
        - settings.backward,
        "idle": hub[-1].get("idle"),
    }


def told(process: subprocess.Popen[str], count: int) -> list[dict[str, float]]:
    """What a rank says, a line for each step."""
    assert process.stdout is not None
    lines = []
    for _ in range(count):
        line = process.stdout.readline()
        if not line:
            raise RankError(f"a rank ended with {process.wait()}")
        lines.append(json.loads(line))
    return lines


def processor(steps: list[dict[str, float]]) -> float:
    """Seconds of processor time of a usual step."""
    return statistics.median(step["processor"] for step in steps)


def run(settings: Settings, console: Console) -> Path:
    """Measure, and write `out/hub.json`."""
    before = environment.record()
    begun = time.perf_counter()
    with progress.bar(console, "ranks", len(settings.ranks)) as advance:
        rows = []
        for size in settings.ranks:
            rows.append(world(settings, size))
            advance()
    seconds = round(time.perf_counter() - begun, 1)
    return records.write("hub", asdict(settings), before, {"results": rows, "seconds": seconds})


def tables(content: dict[str, Any]) -> list[Table]:
    """Return the table of `out/hub.json`."""
    settings, rows = content["settings"], content["results"]
    table = Table(
        f"Processor time in a step of {1e3 * settings['step']:.0f} ms with {settings['tensors']} tensors, "
        f"{settings['host_size']} ranks on each host",
        ["ranks", "hosts", "rank 0", "rank 1", "more", "of the step", "end after the last gradient", "first step",
         f"idle for {settings['idle']:.0f} s", "reached"],
    )  # fmt: skip
    for row in rows:
        more = row["hub"] - row["other"]
        hosts = -(-row["ranks"] // settings["host_size"])
        cells = [str(row["ranks"]), str(hosts), *map(_ms, (row["hub"], row["other"], more))]
        cells += [f"{100 * more / settings['step']:.1f} %", _ms(row["late"]), f"{row['first']:.2f} s", _ms(row["idle"])]
        reached = more <= SHARE * settings["step"] and row["first"] <= FIRST
        table.rows.append([*cells, "pass" if reached else "miss"])
    table.note = (
        f"To be reached: at most {100 * SHARE:.0f} % of the step more than rank 1, and the first step, whose names are "
        f"new, in {FIRST:g} s. {environment.describe(content['environment'])}"
    )
    return [table]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f} ms"


def picture(content: dict[str, Any]) -> Path:
    """Draw the cost of a step by the number of ranks, and return the PNG."""
    settings, rows = content["settings"], content["results"]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    ranks = [row["ranks"] for row in rows]
    for name, label in (("hub", "rank 0, which coordinates"), ("other", "rank 1")):
        axes.plot(ranks, [1e3 * row[name] for row in rows], marker="o", label=label)
    limit = [1e3 * (row["other"] + SHARE * settings["step"]) for row in rows]
    axes.plot(ranks, limit, color="C3", linestyle="--", label=f"rank 1 and {100 * SHARE:.0f} % of the step")
    axes.set_xlabel("ranks")
    axes.set_ylabel("processor time of a step (ms)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.suptitle(f"A step with {settings['tensors']} tensors, {settings['host_size']} ranks on each host")
    path = paths.out("hub.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
