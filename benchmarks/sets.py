"""Comparison of process sets (two halves of the world at once, and one alone) with the world and other libraries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console

from benchmarks.collective import run as collective
from benchmarks.collective.contenders import GroupContender
from benchmarks.collective.report import PEERS, format_ratio, set_scales
from benchmarks.common import binding, environment, paths, progress, records
from benchmarks.common.tables import MISSING, Table, format_duration, format_size

KIB, MIB = 1 << 10, 1 << 20
NAMES = ("engine", *PEERS)
TITLES = {"engine": "engine", **PEERS}
CASES = {"world": "the world", "halves": "two sets at once", "half": "one set alone"}
SMALLER = "smaller"
"""World of the engine with as many ranks as a set, placed on the processors like those of the larger world."""


@dataclass(frozen=True)
class ProcessSetSettings:
    """Measurements to make, and their duration."""

    ranks: int = 4
    sizes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
    contenders: tuple[str, ...] = NAMES
    rounds: int = 10
    block_seconds: float = 0.1

    def check(self) -> None:
        """Raise ValueError if there are no two halves, or a message is not an array of float32."""
        if self.ranks < 4 or self.ranks % 2:
            raise ValueError(f"two sets of two ranks or more need an even number of ranks from 4 on, not {self.ranks}")
        for nbytes in self.sizes:
            if nbytes < 4 or nbytes % 4:
                raise ValueError(f"sizes are multiples of 4 bytes, the size of a float32, not {nbytes}")


def run(settings: ProcessSetSettings, console: Console) -> Path:
    """Measure, and write `out/sets.json`."""
    settings.check()
    before = environment.record()
    begun = time.perf_counter()
    processors, largest = binding.list_processors(), max(settings.sizes)
    how = collective.CollectiveSettings(rounds=settings.rounds, block_seconds=settings.block_seconds)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        pairs: list[collective.Pair] = []
        for name in settings.contenders:
            contender = GroupContender(f"{name}-sets", settings.ranks, largest, processors)
            stack.callback(contender.close)
            pairs += [(contender, case) for case in contender.cases]
        if "engine" in settings.contenders:
            smaller = GroupContender("engine", settings.ranks // 2, largest, processors, crowd=settings.ranks)
            stack.callback(smaller.close)
            pairs.append((smaller, "private"))
        steps = len(settings.sizes) * len(pairs) * (settings.rounds + 1)
        with progress.show_progress(console, f"{settings.ranks} ranks", steps) as advance:
            for nbytes in settings.sizes:
                rows += collective.measure_size(how, pairs, settings.ranks, nbytes, False, advance)
    for row in rows:
        row["contender"] = row["contender"].removesuffix("-sets")
        if row["case"] == "private":
            row |= {"case": SMALLER, "ranks": settings.ranks // 2}
    seconds = round(time.perf_counter() - begun, 1)
    return records.write("sets", asdict(settings), before, {"results": rows, "seconds": seconds})


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return the tables of `out/sets.json`: the times, and the ratios."""
    ranks = content["settings"]["ranks"]
    rows = {(row["contender"], row["case"], row["bytes"]): row for row in content["results"]}
    keys = list(dict.fromkeys((contender, case) for contender, case, _ in rows))
    what = f"Allreduce of float32, {ranks} ranks and sets of {ranks // 2}"
    times = Table(f"{what}: median (p99)", ["size", *(_format_label(*key, ranks) for key in keys)])
    shares = Table(f"{what}: ratios of medians", ["size", *_list_ratios(ranks)])
    for nbytes in content["settings"]["sizes"]:
        own = [rows[*key, nbytes] for key in keys]
        times.rows.append(
            [format_size(nbytes), *(f"{format_duration(row['median'])} ({format_duration(row['p99'])})" for row in own)]
        )
        pairs = _list_ratios(ranks).values()
        shares.rows.append(
            [format_size(nbytes), *(format_ratio(rows.get((*a, nbytes)), rows.get((*b, nbytes))) for a, b in pairs)]
        )
    kept = [i for i in range(len(shares.columns)) if any(row[i] != MISSING for row in shares.rows)]
    shares.columns = [shares.columns[i] for i in kept]
    shares.rows = [[row[i] for i in kept] for row in shares.rows]
    shares.note = f"Brackets: 95 % bootstrap interval over rounds. {environment.describe(content['environment'])}"
    return [times, shares]


def draw_figure(content: dict[str, Any]) -> Path:
    """Draw time by message size, one panel for each way to reduce, and return the PNG."""
    ranks = content["settings"]["ranks"]
    figure, panels = plt.subplots(1, len(CASES), figsize=(5 * len(CASES), 5), sharey=True, layout="constrained")
    for axes, case in zip(panels, CASES, strict=True):
        _draw_panel(axes, content["results"], case, ranks)
    panels[0].set_ylabel("time of one call, the slowest rank (us)")
    figure.suptitle(f"Allreduce of float32 in one host: {ranks} ranks, and sets of {ranks // 2} of them")
    path = paths.get_output_path("sets.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _draw_panel(axes: Axes, results: Sequence[dict[str, Any]], case: str, ranks: int) -> None:
    lines = [(name, case) for name in NAMES] + ([("engine", SMALLER)] if case == "half" else [])
    for k, key in enumerate(lines):
        rows = sorted((row for row in results if (row["contender"], row["case"]) == key), key=lambda row: row["bytes"])
        if rows:
            sizes = [row["bytes"] for row in rows]
            axes.plot(
                sizes,
                [row["median"] * 1e6 for row in rows],
                color=f"C{k}",
                marker="o",
                label=_format_label(*key, ranks),
            )
            low, high = [row["median"] * 1e6 for row in rows], [row["p99"] * 1e6 for row in rows]
            axes.fill_between(sizes, low, high, color=f"C{k}", alpha=0.12, linewidth=0)
    axes.set_title(CASES[case])
    axes.legend(fontsize="small")
    set_scales(axes)


def _format_label(contender: str, case: str, ranks: int) -> str:
    return f"{TITLES[contender]}, {CASES.get(case, f'a world of {ranks // 2}')}"


def _list_ratios(ranks: int) -> dict[str, tuple[tuple[str, str], tuple[str, str]]]:
    """Return the columns of the table of ratios: numerator and denominator."""
    engine = "engine"
    found = {
        f"{CASES['halves']}, of the world's": ((engine, "halves"), (engine, "world")),
        f"{CASES['half']}, of the world's": ((engine, "half"), (engine, "world")),
        f"{CASES['half']}, of a world of {ranks // 2}'s": ((engine, "half"), (engine, SMALLER)),
    }
    for peer, title in PEERS.items():
        found |= {f"{CASES[case]}, of {title}'s": ((engine, case), (peer, case)) for case in CASES}
    return found
