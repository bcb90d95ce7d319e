"""Tables and the picture of the collective benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmarks.common import paths
from benchmarks.common.environment import describe
from benchmarks.common.tables import MISSING, Table, digits, duration, size

Key = tuple[str, str]
LABELS: dict[Key, str] = {
    ("engine", "private"): "engine, private",
    ("engine", "shared"): "engine, in segment",
    ("limits", "private_cached"): "limit, private, cached",
    ("limits", "private_streaming"): "limit, private, streaming",
    ("limits", "in_segment"): "limit, in segment",
    ("limits", "memcpy"): "memcpy, both at once",
    ("mpi", "private"): "Open MPI",
    ("gloo", "private"): "gloo",
}
STYLES: dict[Key, dict[str, Any]] = {
    ("engine", "private"): {"color": "tab:blue", "marker": "o"},
    ("engine", "shared"): {"color": "tab:cyan", "marker": "o"},
    ("limits", "private_cached"): {"color": "0.55", "linestyle": "--"},
    ("limits", "private_streaming"): {"color": "0.55", "linestyle": ":"},
    ("limits", "in_segment"): {"color": "0.25", "linestyle": "--"},
    ("limits", "memcpy"): {"color": "0.25", "linestyle": ":"},
    ("mpi", "private"): {"color": "tab:orange", "marker": "s"},
    ("gloo", "private"): {"color": "tab:red", "marker": "^"},
}
WHAT = {"hook": "gradient hook", "call": "allreduce_async_"}


def tables(content: dict[str, Any]) -> list[Table]:
    """Return every table of `out/collective.json`."""
    found: list[Table] = []
    for ranks, busy in _settings(content):
        rows = _rows(content, ranks, busy)
        where = f"{ranks} ranks{', every core busy computing' if busy else ''}"
        found.append(_by_size(rows, f"Allreduce of float32, {where}: median (p99)", _median_p99))
        if not busy:
            found.append(_by_size(rows, f"Allreduce of float32, {where}: first call at each size", _first))
            found.append(_by_size(rows, f"Allreduce of float32, {where}: bus bandwidth in GB/s", _bus_bandwidth))
    if content["calls"]:
        found.append(_calls(content))
    if content["idle"]:
        table = Table("A process with nothing to do", ["after init of", "rank", "CPU, % of a core"])
        table.rows = [
            [row["contender"], f"{row['rank']} of {row['ranks']}", f"{row['cores'] * 100:.4f}"]
            for row in content["idle"]
        ]
        found.append(table)
    if found:
        found[-1].note = describe(content["environment"])
    return found


def picture(content: dict[str, Any]) -> Path | None:
    """Draw time by message size, one panel per number of ranks and load, and return the PNG."""
    settings = _settings(content)
    if not settings:
        return None
    columns = min(2, len(settings))
    lines = -(-len(settings) // columns)
    size_in_inches = (7.5 * columns, 5.5 * lines)
    figure, panels = plt.subplots(lines, columns, figsize=size_in_inches, squeeze=False, layout="constrained")
    for axes, (ranks, busy) in zip(panels.flat, settings, strict=False):
        _panel(axes, _rows(content, ranks, busy))
        axes.set_title(f"{ranks} ranks{', every core busy computing' if busy else ''}")
    for axes in panels.flat[len(settings) :]:
        axes.set_axis_off()
    panels[0][0].legend(fontsize="small")
    cores, processor = content["environment"]["usable_processors"], content["environment"]["processor"]
    figure.suptitle(
        f"Allreduce of float32 in one host: median, shaded to the 99th percentile ({processor}, {cores} cores)"
    )
    path = paths.out("collective.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _settings(content: dict[str, Any]) -> list[tuple[int, bool]]:
    return sorted({(row["ranks"], row["busy"]) for row in content["sizes"]}, key=lambda s: (s[1], s[0]))


def _rows(content: dict[str, Any], ranks: int, busy: bool) -> list[dict[str, Any]]:
    return [row for row in content["sizes"] if row["ranks"] == ranks and row["busy"] == busy]


def _by_size(rows: Sequence[dict[str, Any]], title: str, cell: Any) -> Table:
    present = {(row["contender"], row["case"]) for row in rows}
    keys = [key for key in LABELS if key in present]
    cells = {(row["bytes"], row["contender"], row["case"]): cell(row) for row in rows}
    table = Table(title, ["size", *(LABELS[key] for key in keys)])
    for nbytes in sorted({row["bytes"] for row in rows}):
        table.rows.append([size(nbytes), *(cells.get((nbytes, *key), MISSING) for key in keys)])
    return table


def _median_p99(row: dict[str, Any]) -> str:
    return f"{duration(row['median'])} ({duration(row['p99'])})"


def _first(row: dict[str, Any]) -> str:
    return duration(row["first"])


def _bus_bandwidth(row: dict[str, Any]) -> str:
    """2 (n - 1) / n times the algorithm bandwidth; for the copy, what it copies."""
    factor = 1.0 if row["case"] == "memcpy" else 2 * (row["ranks"] - 1) / row["ranks"]
    return digits(row["bytes"] * factor / row["median"] / 1e9)


def _calls(content: dict[str, Any]) -> Table:
    table = Table(
        f"Caller's time per tensor, mean over {content['calls'][0]['tensors']} tensors of 1 KiB",
        ["call", "rank", "median of steps", "p99 of steps", "steps"],
    )
    for row in content["calls"]:
        cells = [WHAT[row["what"]], f"{row['rank']} of {row['ranks']}", duration(row["median"]), duration(row["p99"])]
        table.rows.append([*cells, str(row["samples"])])
    return table


def _panel(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for key, label in LABELS.items():
        own = sorted((row for row in rows if (row["contender"], row["case"]) == key), key=lambda row: int(row["bytes"]))
        if not own:
            continue
        sizes = [row["bytes"] for row in own]
        axes.plot(sizes, [row["median"] * 1e6 for row in own], label=label, markersize=4, **STYLES[key])
        if key[0] != "limits":
            low, high = [row["median"] * 1e6 for row in own], [row["p99"] * 1e6 for row in own]
            axes.fill_between(sizes, low, high, color=STYLES[key]["color"], alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(round(value))))
    axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("message size per rank")
    axes.set_ylabel("time of one call, the slowest rank (us)")
    axes.grid(visible=True, which="major", alpha=0.3)
