"""Command `python -m benchmarks draw`: draw the figures of the pages from recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.common.paths import ROOT
from benchmarks.figures import dashboards, measured, runs
from benchmarks.figures.style import save_figure
from grafana.preview import recording

IMAGES = ROOT / "docs" / "images"
FIGURES: dict[str, Callable[[], Figure]] = {
    "training": measured.draw_training,
    "throughput": measured.draw_throughput,
    "hosts": measured.draw_hosts,
    "autotune-jobs": measured.draw_tuned_jobs,
    "autotune-policies": measured.draw_policies,
    "search": runs.draw_search,
    "timeline": runs.draw_timeline,
    "failure": runs.draw_failure,
}
WRITTEN: dict[str, Callable[[Path], None]] = {
    **{f"dashboard-{name}": partial(dashboards.write_dashboard, name) for name in recording.NAMES},
    "foresee": runs.write_prediction,
}
NAMES = (*FIGURES, *WRITTEN)


def draw_figures(names: Sequence[str] = NAMES, directory: Path = IMAGES) -> list[Path]:
    """Draw figures by their names, and return the paths of the images."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.svg" for name in names]
    for name, path in zip(names, paths, strict=True):
        if name in WRITTEN:
            WRITTEN[name](path)
        else:
            save_figure(FIGURES[name](), path)
    return paths
