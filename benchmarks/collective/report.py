"""Tables and the plot of the collective benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmarks.collective.contenders import BEFORE
from benchmarks.common import paths, stats
from benchmarks.common.environment import describe
from benchmarks.common.tables import MISSING, Table, format_digits, format_duration, format_size

Key = tuple[str, str]
LABELS: dict[Key, str] = {
    ("engine", "private"): "engine, private",
    ("engine", "array"): "engine, NumPy",
    ("engine", "prepared"): "engine, prepared",
    ("engine", "shared"): "engine, in segment",
    ("before", "private"): "before, private",
    ("before", "shared"): "before, in segment",
    ("limits", "private_cached"): "limit, private, cached",
    ("limits", "private_streaming"): "limit, private, streaming",
    ("limits", "in_segment"): "limit, in segment",
    ("limits", "memcpy"): "memcpy, both at once",
    ("mpi", "private"): "Open MPI",
    ("mpich", "private"): "MPICH",
    ("impi", "private"): "Intel MPI",
    ("gloo", "private"): "gloo",
}
STYLES: dict[Key, dict[str, Any]] = {
    ("engine", "private"): {"color": "tab:blue", "marker": "o"},
    ("engine", "array"): {"color": "tab:blue", "linestyle": ":"},
    ("engine", "prepared"): {"color": "tab:blue", "linestyle": "--"},
    ("engine", "shared"): {"color": "tab:cyan", "marker": "o"},
    ("before", "private"): {"color": "tab:purple", "marker": "o"},
    ("before", "shared"): {"color": "tab:pink", "marker": "o"},
    ("limits", "private_cached"): {"color": "0.55", "linestyle": "--"},
    ("limits", "private_streaming"): {"color": "0.55", "linestyle": ":"},
    ("limits", "in_segment"): {"color": "0.25", "linestyle": "--"},
    ("limits", "memcpy"): {"color": "0.25", "linestyle": ":"},
    ("mpi", "private"): {"color": "tab:orange", "marker": "s"},
    ("mpich", "private"): {"color": "tab:brown", "marker": "s"},
    ("impi", "private"): {"color": "tab:green", "marker": "s"},
    ("gloo", "private"): {"color": "tab:red", "marker": "^"},
}
WHAT = {
    "hook": "gradient hook",
    "call": "allreduce_async_",
    "call_new": "allreduce_async",
    "call_alone": "allreduce_async_, one rank after another",
}
PEERS = {"gloo": "gloo", "mpi": "Open MPI", "mpich": "MPICH", "impi": "Intel MPI"}


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return every table of `out/collective.json`."""
    found: list[Table] = []
    for ranks, busy in _list_settings(content):
        rows = _select_rows(content, ranks, busy)
        where = f"{ranks} ranks{', every core busy computing' if busy else ''}"
        found.append(_build_size_table(rows, f"Allreduce of float32, {where}: median (p99)", _format_median))
        found.append(
            _build_peer_table(rows, f"Allreduce of float32, {where}: the engine's share of the others' medians")
        )
        if any(row["contender"] == BEFORE for row in rows):
            found.append(_build_ratio_table(rows, f"Allreduce of float32, {where}: ratios of medians"))
        if not busy:
            found.append(
                _build_size_table(rows, f"Allreduce of float32, {where}: first call at each size", _format_first_call)
            )
            found.append(
                _build_size_table(rows, f"Allreduce of float32, {where}: bus bandwidth in GB/s", _format_bandwidth)
            )
    found += [
        _build_operation_table(content, ranks) for ranks in sorted({row["ranks"] for row in content["operations"]})
    ]
    if content["calls"]:
        found.append(_build_call_table(content))
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


def draw_figure(content: dict[str, Any]) -> Path | None:
    """Draw time by message size, one panel per number of ranks and load, and the other operations; return the PNG."""
    settings = _list_settings(content)
    others = sorted({row["ranks"] for row in content["operations"]})
    count = len(settings) + len(others)
    if not count:
        return None
    columns = min(2, count)
    lines = -(-count // columns)
    size_in_inches = (7.5 * columns, 5.5 * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size_in_inches, squeeze=False, layout="constrained")
    panels = list(grid.flat)
    for axes, (ranks, busy) in zip(panels, settings, strict=False):
        _draw_panel(axes, _select_rows(content, ranks, busy))
        axes.set_title(f"Allreduce, {ranks} ranks{', every core busy computing' if busy else ''}")
    if settings:
        panels[0].legend(fontsize="small")
    for axes, ranks in zip(panels[len(settings) :], others, strict=False):
        _draw_operation_panel(axes, [row for row in content["operations"] if row["ranks"] == ranks])
        axes.set_title(f"Other operations, {ranks} ranks")
    for axes in panels[count:]:
        axes.set_axis_off()
    cores, processor = content["environment"]["usable_processors"], content["environment"]["processor"]
    figure.suptitle(
        f"Collectives of float32 in one host: median, shaded to the 99th percentile ({processor}, {cores} cores)"
    )
    path = paths.get_output_path("collective.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _list_settings(content: dict[str, Any]) -> list[tuple[int, bool]]:
    return sorted({(row["ranks"], row["busy"]) for row in content["sizes"]}, key=lambda s: (s[1], s[0]))


def _select_rows(content: dict[str, Any], ranks: int, busy: bool) -> list[dict[str, Any]]:
    return [row for row in content["sizes"] if row["ranks"] == ranks and row["busy"] == busy]


def _build_size_table(rows: Sequence[dict[str, Any]], title: str, cell: Any) -> Table:
    present = {(row["contender"], row["case"]) for row in rows}
    keys = [key for key in LABELS if key in present]
    cells = {(row["bytes"], row["contender"], row["case"]): cell(row) for row in rows}
    table = Table(title, ["size", *(LABELS[key] for key in keys)])
    for nbytes in sorted({row["bytes"] for row in rows}):
        table.rows.append([format_size(nbytes), *(cells.get((nbytes, *key), MISSING) for key in keys)])
    return table


def _build_peer_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the engine's median, of tensors in private memory, as a share of each peer's."""
    found = {(row["bytes"], row["contender"]): row for row in rows if row["case"] == "private"}
    peers = [peer for peer in PEERS if any(contender == peer for _, contender in found)]
    table = Table(title, ["size", *(f"of {PEERS[peer]}'s" for peer in peers)])
    for nbytes in sorted({nbytes for nbytes, _ in found}):
        own = found.get((nbytes, "engine"))
        table.rows.append([format_size(nbytes), *(format_ratio(own, found.get((nbytes, peer))) for peer in peers)])
    return table


def _build_ratio_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return ratios of this build to the one before and to Open MPI, and of the one before to Open MPI."""
    pairs = {
        "engine / before, private": (("engine", "private"), (BEFORE, "private")),
        "engine / before, in segment": (("engine", "shared"), (BEFORE, "shared")),
        "engine, private / Open MPI": (("engine", "private"), ("mpi", "private")),
        "before, private / Open MPI": ((BEFORE, "private"), ("mpi", "private")),
    }
    found = {(row["bytes"], row["contender"], row["case"]): row for row in rows}
    table = Table(title, ["size", *pairs])
    for nbytes in sorted({row["bytes"] for row in rows}):
        cells = [format_ratio(found.get((nbytes, *own)), found.get((nbytes, *other))) for own, other in pairs.values()]
        table.rows.append([format_size(nbytes), *cells])
    return table


def _format_median(row: dict[str, Any]) -> str:
    return f"{format_duration(row['median'])} ({format_duration(row['p99'])})"


def _format_first_call(row: dict[str, Any]) -> str:
    return format_duration(row["first"])


def _format_bandwidth(row: dict[str, Any]) -> str:
    """Format 2 (n - 1) / n times the algorithm bandwidth; for memcpy, the copied bytes per second."""
    factor = 1.0 if row["case"] == "memcpy" else 2 * (row["ranks"] - 1) / row["ranks"]
    return format_digits(row["bytes"] * factor / row["median"] / 1e9)


def _build_operation_table(content: dict[str, Any], ranks: int) -> Table:
    rows = {
        (row["case"], row["bytes"], row["contender"]): row for row in content["operations"] if row["ranks"] == ranks
    }
    present = {contender for _, _, contender in rows}
    titles = {peer: title for peer, title in PEERS.items() if peer in present}
    table = Table(
        f"Other operations on float32, {ranks} ranks: median (p99), and the engine's share of the others' medians",
        ["operation, size", "engine", *titles.values(), *(f"of {title}'s" for title in titles.values())],
    )
    for case, nbytes in dict.fromkeys((case, nbytes) for case, nbytes, _ in rows):
        own = rows.get((case, nbytes, "engine"))
        peers = [rows.get((case, nbytes, peer)) for peer in titles]
        times = [_format_median(row) if row else MISSING for row in (own, *peers)]
        shares = [format_ratio(own, row) for row in peers]
        table.rows.append([f"{case}, {format_size(nbytes)}", *times, *shares])
    return table


def format_ratio(own: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """Format the ratio of the medians of two rows, with its interval."""
    if own is None or other is None:
        return MISSING
    found = stats.estimate_ratio(own["round_medians"], other["round_medians"])
    return f"{format_digits(found.value)} [{format_digits(found.low)}, {format_digits(found.high)}]"


def _build_call_table(content: dict[str, Any]) -> Table:
    table = Table(
        f"Caller's time per tensor, mean over {content['calls'][0]['tensors']} tensors of 1 KiB",
        ["call", "rank", "median of rounds", "p99 of steps", "steps"],
    )
    for row in content["calls"]:
        median = stats.estimate_median(row["round_medians"])
        cells = [WHAT[row["what"]], f"{row['rank']} of {row['ranks']}"]
        cells += [
            f"{format_duration(median.value)} [{format_duration(median.low)}, {format_duration(median.high)}]",
            format_duration(row["p99"]),
        ]
        table.rows.append([*cells, str(row["samples"])])
    return table


def _draw_operation_panel(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the engine's median as a share of each other contender's, by size, one line per operation."""
    own = {(row["case"], row["bytes"]): row["median"] for row in rows if row["contender"] == "engine"}
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for k, case in enumerate(cases):
        for peer, line in (("gloo", "-"), ("mpi", ":")):
            theirs = [row for row in rows if row["contender"] == peer and (row["case"], row["bytes"]) in own]
            theirs = sorted((row for row in theirs if row["case"] == case), key=lambda row: int(row["bytes"]))
            if theirs:
                sizes = [row["bytes"] for row in theirs]
                shares = [own[case, row["bytes"]] / row["median"] for row in theirs]
                label = f"{case}, of {PEERS[peer]}'s"
                axes.plot(sizes, shares, color=f"C{k}", linestyle=line, marker="o", markersize=4, label=label)
    axes.axhline(1.0, color="0.5", linewidth=1)
    axes.set_ylabel("engine's median / the other's")
    if axes.lines[1:]:
        axes.legend(fontsize="xx-small", ncols=2)
    set_scales(axes)


def _draw_panel(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for key, label in LABELS.items():
        own = sorted((row for row in rows if (row["contender"], row["case"]) == key), key=lambda row: int(row["bytes"]))
        if not own:
            continue
        sizes = [row["bytes"] for row in own]
        axes.plot(sizes, [row["median"] * 1e6 for row in own], label=label, markersize=4, **STYLES[key])
        if key[0] != "limits":
            low, high = [row["median"] * 1e6 for row in own], [row["p99"] * 1e6 for row in own]
            axes.fill_between(sizes, low, high, color=STYLES[key]["color"], alpha=0.12, linewidth=0)
    axes.set_ylabel("time of one call, the slowest rank (us)")
    set_scales(axes)


def set_scales(axes: Axes) -> None:
    """Make both axes logarithmic, with message sizes on the horizontal one."""
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(round(value))))
    axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("message size per rank")
    axes.grid(visible=True, which="major", alpha=0.3)
