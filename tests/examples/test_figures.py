"""Figures of the pages: each is drawn from its recording, is current, and is shown with a text beside it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")
from benchmarks.figures import draw, tables
from benchmarks.figures.dashboards import Picture
from grafana.preview import recording

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Panels that are newer than the recorded run: empty again after `make dashboards-seen`.
NEWER_PANELS = {"Lost to late steps by rank and cause"}
GPU_PANELS = {
    "A collective on the GPU",
    "Exposed on the GPU",
    "Collectives not done by the GPU",
    "Speed in NCCL",
}
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


def read_texts(path: Path) -> list[str]:
    """Return the texts of an image, in their order."""
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter() if element.tag.endswith("}text")]


@pytest.mark.parametrize("name", draw.NAMES)
def test_figure_is_what_its_recording_gives(name: str, tmp_path: Path) -> None:
    (path,) = draw.draw_figures([name], tmp_path)
    texts = read_texts(path)
    assert len(texts) > 5 and texts == read_texts(draw.IMAGES / path.name)
    assert "prefers-color-scheme: dark" in path.read_text()


def test_every_panel_of_the_dashboards_is_recorded_with_data() -> None:
    """The pictures are of the panels that the dashboards have now, but for newer ones; each has data, but for GPUs'."""
    recorded = tables.read_recording("dashboards.json")
    for name in recording.NAMES:
        panels = json.loads(recording.find_file(name).read_text())["panels"]
        titles = [panel["title"] for panel in panels if panel["type"] != "row" and panel["title"] not in NEWER_PANELS]
        assert [panel["title"] for panel in recorded["boards"][name]["panels"]] == titles
        drawn = " ".join(read_texts(draw.IMAGES / f"dashboard-{name}.svg"))
        assert {title for title in titles if title not in drawn} <= GPU_PANELS
    assert list(recording.find_unanswered(recorded["boards"])) == []


def test_a_panel_without_series_says_so() -> None:
    kinds = ("stat", "table", "heatmap", "state-timeline", "timeseries")
    full = {"row": "A", "title": "full", "kind": "stat", "unit": "s", "series": [{"name": "", "values": [1.0, 1.0]}]}
    empty = [{"row": "A", "title": kind, "kind": kind, "unit": "s", "width": 12, "series": []} for kind in kinds]
    board = {
        "title": "Board",
        "marks": {},
        "panels": [{**full, "series": [{**full["series"][0], "moment": 1.0}]}, *empty],
    }
    drawn = Picture({"about": [], "seconds": 60, "step": 60, "boards": {"a": board}}, "a").draw_svg()
    assert drawn.count(">no data<") == len(kinds)


def test_one_command_draws_a_figure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "draw", "--out", str(tmp_path)]
    done = subprocess.run([*command, "training"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ResNet-50" in read_texts(tmp_path / "training.svg")
    unknown = subprocess.run([*command, "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert unknown.returncode == 1 and "no such figure: nothing" in unknown.stderr


def test_every_image_exists_is_shown_and_has_a_text() -> None:
    shown = {
        (page, text, (page.parent / target).resolve())
        for page in PAGES
        for text, target in IMAGE.findall(page.read_text())
    }
    assert {path for _, _, path in shown} == set(draw.IMAGES.iterdir())
    assert {f"{name}.svg" for name in draw.NAMES} == {path.name for path in draw.IMAGES.iterdir()}
    assert all(len(text.split()) >= 5 for _, text, _ in shown), shown


def test_cells_are_read_as_numbers_in_seconds() -> None:
    assert tables.parse_interval("2.06 ms [-554 us, 3.80 ms]") == (0.00206, -0.000554, 0.0038)
    assert tables.parse_numbers("9.6 %") == [0.096]
    with pytest.raises(ValueError, match="no table 'nothing'"):
        tables.read_table("training.md", "nothing")
