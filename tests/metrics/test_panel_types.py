"""Each panel is what Grafana's own types of its kind ask for, says the TypeScript compiler."""

from __future__ import annotations

import json

import pytest
from prometheus_server import ROOT

from grafana.types import Unavailable, compile_strictly, source

pytestmark = pytest.mark.timeout(700)  # npm fetches at the first time


def boards() -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((ROOT / "grafana/dashboards").glob("*.json"))]


def compiled(program: str) -> str:
    try:
        return compile_strictly(program)
    except Unavailable as error:
        pytest.skip(f"needs node, and npm with its registry: {error}")


def test_panels_are_of_their_types() -> None:
    assert compiled(source(boards())) == ""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"graphMode": "area"', '"graphMode": "arena"', "arena"),
        ('"showHeader"', '"showHeaders"', "showHeaders"),
        ('"lineWidth"', '"lineWidths"', "lineWidths"),
        ('"color": "green"', '"colour": "green"', "colour"),
    ],
)
def test_a_panel_of_another_type_is_refused(old: str, new: str, problem: str) -> None:
    program = source(boards())
    said = compiled(program.replace(old, new, 1))
    assert "error TS" in said and problem in said
