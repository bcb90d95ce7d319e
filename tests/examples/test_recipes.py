"""The recipes run as printed on two ranks, and do what their text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

from ..ranks import run_ranks
from . import recipe_program

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "recipes.md").read_text()
BEGINNING, *_ = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
RECIPES = dict(re.findall(r"^## ([^\n]*)\n+```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def done() -> Any:
    """Run all recipes in one job; run the last one, which writes a checkpoint, a second time."""
    recipes = {**RECIPES, "again": RECIPES["Checkpoints"]}
    return run_ranks(2, recipe_program.run, BEGINNING, recipes, timeout=100, env={"ENGINE_STALL_LIMIT": "60"})


def test_every_block_is_a_recipe() -> None:
    assert PAGE.count("```python\n") == 1 + len(RECIPES)
    assert PAGE.count("\n## ") == len(RECIPES)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(name: str, done: Any) -> None:
    for found in done.values:
        assert isinstance(found.get(name), dict), found.get(name, "an earlier one failed")
        assert found[name]["finite"]
        if "GAN" not in name:
            assert found[name]["after"] < 0.7 * found[name]["before"], found[name]


def test_what_the_recipes_say_about_numbers(done: Any) -> None:
    for found in done.values:
        assert found["Metrics and evaluation"]["samples"] == 600
        assert found["Learning rate: scaling and warm-up"]["lr"] == pytest.approx(0, abs=1e-9)
        assert found["Checkpoints"]["begin"] == 0
        assert found["again"]["begin"] == 3 and found["again"]["before"] > found["again"]["after"]
        assert found["again"]["after"] == found["Checkpoints"]["after"]
    assert done.ranks[0].stdout.count("over 600 samples") == 3 and done.ranks[1].stdout == ""
