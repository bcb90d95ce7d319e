"""Tables and the plot of the benchmark of several hosts, and its requirements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.acceptance import Requirement, compare_rows
from benchmarks.collective.report import format_ratio, set_scales
from benchmarks.common import paths, stats
from benchmarks.common.environment import describe
from benchmarks.common.tables import MISSING, Table, format_digits, format_duration, format_size
from benchmarks.hosts.places import CABLES
from benchmarks.hosts.run import HOSTS
from benchmarks.training.report import TITLES, compute_ratio_to_peer

Row = dict[str, Any]
KIB, MIB = 1 << 10, 1 << 20
LABELS = {"engine": "engine", "gloo": "gloo", "mpi": "Open MPI", "sockets": "bare sockets"}
COLORS = {"engine": "tab:blue", "gloo": "tab:red", "mpi": "tab:orange", "sockets": "0.4"}
FP8_LIMITS = {
    ("gigabit", 1, 100 * MIB): {"none": 0.30, "fp16": 0.60},
    ("gigabit", 1, 16 * MIB): {"none": 0.35, "fp16": 0.68},
    ("gigabit", 2, 100 * MIB): {"none": 0.30, "fp16": 0.50},
    ("plain", 1, 100 * MIB): {"none": 1.0},
    ("distant", 1, 16 * MIB): {"none": 0.33, "fp16": 0.65},
    ("distant", 2, 16 * MIB): {"none": 0.33, "fp16": 0.50},
}
"""Largest time of an allreduce with fp8 in multiples of another's, by cable, ranks on a host and bytes of float32."""
IDLE_LIMIT = 1e-3
"""Cores up to which a job counts as idle."""


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the tables of `out/hosts.json`."""
    rows = content["results"]
    found = [_build_acceptance_table(rows)]
    for cable, per_host in _list_worlds(rows):
        own = [row for row in _select_part(rows, "sizes") if (row["cable"], row["per_host"]) == (cable, per_host)]
        found += [_build_time_table(own, cable, per_host), _build_ratio_table(own, cable, per_host)]
    found += [_build_compression_table(_select_part(rows, "compression"))] if _select_part(rows, "compression") else []
    found += [_build_training_table(_select_part(rows, "training"))] if _select_part(rows, "training") else []
    found += [_build_idle_table(_select_part(rows, "idle"))] if _select_part(rows, "idle") else []
    loads = [row["load"] for row in rows]
    found[-1].note = (
        "Hosts are namespaces of one machine, so all their ranks and the kernel's work for the network share its "
        "processors. Brackets: 95 % bootstrap interval over rounds. Load of the machine before parts were measured: "
        f"{min(loads):.1f} to {max(loads):.1f}; revisions: {', '.join(sorted({row['revision'] for row in rows}))}. "
        f"{describe(content['environment'])}"
    )
    return found


def draw_figure(content: dict[str, Any]) -> Path | None:
    """Draw time by message size, a panel for each cable and number of ranks, and return the PNG."""
    worlds = _list_worlds(content["results"])
    if not worlds:
        return None
    figure, panels = plt.subplots(
        1, len(worlds), figsize=(5 * len(worlds), 5), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, (cable, per_host) in zip(panels[0], worlds, strict=True):
        rows = _select_part(content["results"], "sizes")
        _draw_panel(axes, [row for row in rows if (row["cable"], row["per_host"]) == (cable, per_host)])
        axes.set_title(_describe_world(cable, per_host))
    panels[0][0].set_ylabel("time of one call, the slowest rank (us)")
    panels[0][0].legend(fontsize="small")
    figure.suptitle(f"Allreduce of float32 between {HOSTS} hosts (namespaces of one machine): median, shaded to p99")
    path = paths.get_output_path("hosts.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _select_part(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["part"] == name]


def _list_worlds(rows: Sequence[Row]) -> list[tuple[str, int]]:
    found = {(row["cable"], row["per_host"]) for row in _select_part(rows, "sizes")}
    return sorted(found, key=lambda world: (list(CABLES).index(world[0]), world[1]))


def _describe_world(cable: str, per_host: int) -> str:
    return f"{HOSTS} hosts x {per_host}, {CABLES[cable].title}"


def _list_contenders(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["contender"] for row in rows))


def _build_size_table(rows: Sequence[Row], title: str, columns: dict[str, Callable[[dict[str, Row]], str]]) -> Table:
    """Return a table with a row for each size; `columns` format cells from the rows of all contenders."""
    table = Table(title, ["size", *columns])
    for nbytes in sorted({row["bytes"] for row in rows}):
        of = {row["contender"]: row for row in rows if row["bytes"] == nbytes}
        table.rows.append([format_size(nbytes), *(cell(of) for cell in columns.values())])
    return table


def _build_time_table(rows: Sequence[Row], cable: str, per_host: int) -> Table:
    def make_cell(name: str) -> Callable[[dict[str, Row]], str]:
        return lambda of: (
            f"{format_duration(of[name]['median'])} ({format_duration(of[name]['p99'])})" if name in of else MISSING
        )

    columns = {LABELS.get(name, name): make_cell(name) for name in _list_contenders(rows)}
    return _build_size_table(rows, f"Allreduce of float32, {_describe_world(cable, per_host)}: median (p99)", columns)


def _build_ratio_table(rows: Sequence[Row], cable: str, per_host: int) -> Table:
    def make_cell(own: str, other: str) -> Callable[[dict[str, Row]], str]:
        return lambda of: format_ratio(of.get(own), of.get(other))

    names = _list_contenders(rows)
    columns = {
        f"{own} / {LABELS[other]}": make_cell(own, other)
        for own in names
        if own == "engine" or own not in LABELS
        for other in names
        if other != own and other in LABELS
    }
    return _build_size_table(
        rows, f"Allreduce of float32, {_describe_world(cable, per_host)}: ratios of medians", columns
    )


def _make_compression_key(row: Row) -> tuple[str, int, int]:
    """Return what rows have in common that differ in compression alone."""
    return row["cable"], row["per_host"], row["bytes"]


def _build_compression_table(rows: Sequence[Row]) -> Table:
    plain = {_make_compression_key(row): row for row in rows if row["case"] == "none"}
    title = f"Compression, {HOSTS} hosts"
    table = Table(title, ["hosts, size", "compression", "median (p99)", "times as fast"], left=("compression",))
    for row in rows:
        faster = stats.estimate_ratio(plain[_make_compression_key(row)]["round_medians"], row["round_medians"])
        cells = [f"{_describe_world(row['cable'], row['per_host'])}, {format_size(row['bytes'])}", row["case"]]
        cells += [f"{format_duration(row['median'])} ({format_duration(row['p99'])})", _format_interval(faster)]
        table.rows.append(cells)
    return table


def _build_training_table(rows: Sequence[Row]) -> Table:
    table = Table(
        f"Training, {HOSTS} hosts x 1, a plain veth pair",
        ["model", "no communication", "DDP, gloo, adds", "the engine adds", "of DDP's overhead"],
    )
    for row in rows:
        variants = row["variants"]
        floor = variants["floor"]
        over = [stats.estimate_overhead(variants[name]["rounds"], floor["rounds"]) for name in ("ddp", "engine")]
        cells = [TITLES[row["workload"]], format_duration(floor["median"])]
        cells += [
            f"{format_duration(each.value)} [{format_duration(each.low)}, {format_duration(each.high)}]"
            for each in over
        ]
        ratio = compute_ratio_to_peer(row, "engine")
        table.rows.append([*cells, _format_interval(ratio) if ratio else MISSING])
    return table


def _build_idle_table(rows: Sequence[Row]) -> Table:
    table = Table("A job that does nothing, 2 hosts x 1, started by enginerun", ["where", "CPU, % of a core"])
    for row in rows:
        where = "the launcher" if row["where"] == "launcher" else f"host {row['where']}: its rank and its agent"
        table.rows.append([where, f"{100 * row['cores']:.3f}"])
    return table


def _format_interval(of: stats.Interval) -> str:
    return f"{format_digits(of.value)} [{format_digits(of.low)}, {format_digits(of.high)}]"


def _build_acceptance_table(rows: Sequence[Row]) -> Table:
    found = Table(
        "What it must reach between hosts",
        ["work", "measured", "at most", "measured / allowed", "95 % interval", "result"],
        left=("result",),
    )
    found.rows = [line.format_cells() for line in _check_requirements(rows)]
    return found


def _check_requirements(rows: Sequence[Row]) -> Iterator[Requirement]:
    of = {(row["cable"], row["per_host"], row["bytes"], row["contender"]): row for row in _select_part(rows, "sizes")}
    for cable, per_host in _list_worlds(rows):
        for nbytes, other, factor in (
            (4 * KIB, "gloo", 0.5),
            (100 * MIB, "gloo", 0.5),
            (100 * MIB, "sockets", 1.25),
        ):
            ours, base = (of.get((cable, per_host, nbytes, name)) for name in ("engine", other))
            work = f"allreduce, {format_size(nbytes)}, {_describe_world(cable, per_host)}"
            yield from compare_rows(work, ours, base, factor, LABELS[other])
    compressed = _select_part(rows, "compression")
    for cable, per_host, nbytes in dict.fromkeys(map(_make_compression_key, compressed)):
        own = {row["case"]: row for row in compressed if _make_compression_key(row) == (cable, per_host, nbytes)}
        work = f"{format_size(nbytes)}, {_describe_world(cable, per_host)}"
        if cable == "gigabit" and (per_host, nbytes) == (1, 16 * MIB) and {"none", "fp16"} <= own.keys():
            yield from compare_rows(f"fp16, {work}", own["fp16"], own["none"], 1 / 1.7, "none")
        for base, factor in FP8_LIMITS.get((cable, per_host, nbytes), {}).items():
            if {base, "fp8"} <= own.keys():
                yield from compare_rows(f"fp8, {work}", own["fp8"], own[base], factor, base)
    for row in _select_part(rows, "training"):
        ratio = compute_ratio_to_peer(row, "engine")
        if ratio:
            yield Requirement(
                f"training overhead, {TITLES[row['workload']]}, {HOSTS} hosts x 1",
                f"{format_digits(ratio.value)} of DDP's",
                "0.5 of DDP's",
                ratio.value / 0.5,
                f"[{format_digits(ratio.low / 0.5)}, {format_digits(ratio.high / 0.5)}]",
            )
    hosts = [row["cores"] for row in _select_part(rows, "idle") if row["where"] != "launcher"]
    if hosts:
        most = max(hosts)
        measured, allowed = f"{100 * most:.3f} % of a core", f"{100 * IDLE_LIMIT:g} % of a core"
        yield Requirement("idle job, the busier host", measured, allowed, most / IDLE_LIMIT)


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
    for name in _list_contenders(rows):
        own = sorted((row for row in rows if row["contender"] == name), key=lambda row: int(row["bytes"]))
        sizes, medians = [row["bytes"] for row in own], [row["median"] * 1e6 for row in own]
        (line,) = axes.plot(sizes, medians, marker="o", markersize=4, label=LABELS.get(name, name))
        line.set_color(COLORS.get(name, line.get_color()))
        line.set_linestyle("--" if name == "sockets" else "-")
        axes.fill_between(sizes, medians, [row["p99"] * 1e6 for row in own], color=line.get_color(), alpha=0.12)
    set_scales(axes)
