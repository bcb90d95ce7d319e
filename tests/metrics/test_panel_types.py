"""Each panel matches Grafana's own types of its kind, as checked by the TypeScript compiler."""

from __future__ import annotations

import json

import pytest

from grafana.types import Unavailable, compile_strictly, make_program

from .prometheus_server import ROOT

pytestmark = pytest.mark.timeout(700)  # npm fetches at the first time


def boards() -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((ROOT / "grafana/dashboards").glob("*.json"))]


def compiled(program: str) -> str:
    try:
        return compile_strictly(program)
    except Unavailable as error:
        pytest.skip(f"needs node, and npm with its registry: {error}")


@pytest.mark.slow
def test_panels_are_of_their_types() -> None:
    assert compiled(make_program(boards())) == ""


@pytest.mark.slow
def test_panels_of_other_types_are_refused() -> None:
    program = make_program(boards())
    changes = {
        '"graphMode": "area"': '"graphMode": "arena"',
        '"showHeader"': '"showHeaders"',
        '"lineWidth"': '"lineWidths"',
        '"color": "green"': '"colour": "green"',
        '"description"': '"descriptions"',
    }
    for old, new in changes.items():
        assert old in program
        program = program.replace(old, new)
    said = compiled(program)
    for word in ("arena", "showHeaders", "lineWidths", "colour", "descriptions"):
        assert f'"{word}"' in said
