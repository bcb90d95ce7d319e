"""Figures of what was measured, from the tables of benchmarks/history."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.common.tables import format_duration
from benchmarks.figures.style import FIRST, INK, SECOND, SERIES, draw_bars, put_legend, start_figure
from benchmarks.figures.tables import parse_interval, parse_numbers, read_table

SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
WORKLOADS = {
    "ResNet-50, batch 2 of 128x128": "ResNet-50",
    "GPT, batch 1 of 32 tokens": "GPT",
    "2000 tensors of 1 KiB": "2000 small\ntensors",
    "16 tensors of 4 MiB, paced by sleep (a stand-in)": "paced by\nsleep",
}


def draw_training() -> Figure:
    """Draw what DDP and the engine add to a step of each workload."""
    variants = {"DDP, gloo, defaults": "DDP, gloo", "engine": "engine", "engine, bucket views": "engine, bucket views"}
    titles = list(WORKLOADS)[:3]
    found = {
        title: {row["variant"]: row["over the floor"] for row in read_table("training.md", f"{title}:")}
        for title in titles
    }
    series = {
        label: [_scale_interval(parse_interval(found[title][name]), 1e3) for title in titles]
        for name, label in variants.items()
    }
    series = {name: series[name] for name in ("engine", "DDP, gloo", "engine, bucket views")}
    figure, (axes,) = start_figure(3.9)
    draw_bars(axes, [WORKLOADS[title] for title in titles], series)
    axes.set(title="Time that communication adds to a step", xlabel="ms, with 95 % intervals")
    put_legend(figure, axes, 3)
    return figure


def _scale_interval(values: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    value, low, high = (factor * each for each in values)
    return value, low, high


def draw_throughput() -> Figure:
    """Draw samples a second of 1 to 8 ranks, each on a host of its own, as multiples of one rank's."""
    rows = read_table("scaling.md", "Steps foreseen and measured")
    figure, (axes,) = start_figure(3.7)
    axes.plot([1, 8], [1, 8], color=INK, linestyle=":", linewidth=1.4, label="ideal")
    for model, link in (("Inception V3", "25 Gbit/s"), ("VGG-16", "25 Gbit/s"), ("VGG-16", "10 Gbit/s")):
        points = [(1, 1.0)]
        for row in rows:
            hosts, ranks = row["hosts x ranks"].split(" x ")
            if (row["model"], row["link"], ranks) == (model, link, "1"):
                points.append((int(hosts), int(hosts) * parse_numbers(row["efficiency"])[0]))
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{model}, {link}")
    axes.set(
        title="Throughput, by that of one rank", xlabel="ranks, one on each host", xticks=[1, 2, 4, 8], ylim=(0, 8.4)
    )
    axes.legend()
    return figure


def draw_hosts() -> Figure:
    """Draw the time of an allreduce between two hosts, by size."""
    rows = read_table("hosts.md", "Allreduce of float32, 2 hosts x 1, a plain veth pair: median")
    figure, (axes,) = start_figure(3.9)
    for name, marker in (("engine", "o"), ("gloo", "^"), ("Open MPI", "s"), ("bare sockets", "D")):
        points = [(_parse_size(row["size"]), parse_numbers(row[name])[0]) for row in rows]
        axes.plot(*zip(*points, strict=True), marker=marker, label=name)
    axes.set(title="Allreduce between two hosts, median time", xlabel="bytes per rank", xscale="log", yscale="log")
    shown = ("4 B", "4 KiB", "1 MiB", "100 MiB")
    axes.set_xticks([_parse_size(size) for size in shown], shown)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_duration(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.legend()
    return figure


def _parse_size(cell: str) -> int:
    number, unit = cell.split()
    return int(number) * SIZES[unit]


def draw_tuned_jobs() -> Figure:
    """Draw step times of the default and of each search's choice, by those of the best of a grid."""
    rows = read_table("tuner.md", "The tuner on jobs, against every setting of a grid")
    figure, (axes,) = start_figure(4.1)
    for place, title in enumerate(WORKLOADS):
        mine = [row for row in rows if row["workload"] == title]
        for row in mine:
            if row["setting"].startswith("default"):
                _draw_point(axes, place - 0.2, row, SECOND, "s")
        searches = [row for row in mine if row["setting"].startswith("search")]
        for number, row in enumerate(searches):
            _draw_point(axes, place + 0.05 + 0.35 * number / len(searches), row, FIRST, "o")
    axes.axvline(1.0, color=INK, linestyle=":", linewidth=1.4)
    axes.plot([], [], color=SECOND, marker="s", label="default")
    axes.plot([], [], color=FIRST, marker="o", label="each search's choice")
    axes.set_yticks(range(len(WORKLOADS)), list(WORKLOADS.values()))
    axes.invert_yaxis()
    axes.set(title="Step time, by the best of 80 settings", xlabel="best of the grid = 1, with 95 % intervals")
    put_legend(figure, axes, 2)
    return figure


def _draw_point(axes: Axes, place: float, row: dict[str, str], color: str, marker: str) -> None:
    value, low, high = parse_interval(row["of the best of the grid"])
    axes.errorbar(
        value, place, xerr=[[value - low], [high - value]], color=color, marker=marker, linewidth=1.6, capsize=2.5
    )


def draw_policies() -> Figure:
    """Draw the regret of four policies on synthetic surfaces."""
    rows = read_table("tuner.md", "20 trials of 30 steps, noise heavy")
    surfaces = ("valley", "narrow", "cliff", "transport")
    policies = {"autotune.Tuner": "our tuner", "Optuna TPESampler": "Optuna's TPE", "random": "random"}
    policies["Horovod's, re-stated"] = "Horovod's"
    figure, (axes,) = start_figure(4.1)
    height = 0.8 / len(policies)
    for number, (policy, label) in enumerate(policies.items()):
        (*values,) = (
            100 * parse_numbers(row["regret, median"])[0]
            for surface in surfaces
            for row in rows
            if (row["surface"], row["policy"]) == (surface, policy)
        )
        places = [place + (number - 1.5) * height for place in range(len(surfaces))]
        axes.barh(places, values, height * 0.92, color=SERIES[number], label=label)
    axes.set_yticks(range(len(surfaces)), surfaces)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(title="Regret after 20 trials, synthetic surfaces", xlabel="% above the best of a grid, median of 30")
    put_legend(figure, axes, 2)
    return figure
