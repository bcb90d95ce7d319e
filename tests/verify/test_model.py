"""No wake-up is lost in any interleaving of the model, and every fence, look and rule is needed.

Functions and code that the model and the mutants name exist in the sources.
"""

from __future__ import annotations

import re

import pytest

from ..ranks import ROOT
from . import interleave, model, mutate, stress


@pytest.mark.parametrize("memory", model.MODELS, ids=lambda memory: memory.name)
@pytest.mark.parametrize("scenario", model.SCENARIOS)
def test_no_interleaving_loses_a_wake_up(scenario: str, memory: model.Memory) -> None:
    found = model.explore(scenario, memory)
    assert not found.flaw, "\n".join((found.flaw, *found.trace))
    assert found.states > 50  # something was explored


@pytest.mark.parametrize("mutant", [*model.FENCES, *model.RULES])
def test_the_model_misses_what_a_mutant_leaves_out(mutant: str) -> None:
    assert next(model.finders(mutant), None)


def test_every_fence_of_the_engine_has_a_mutant() -> None:
    assert set(mutate.fences()) == set(model.FENCES)


def test_every_fence_of_the_engine_has_a_name() -> None:
    """All fences are in fences.h, each is used, and their numbers differ."""
    used, nameless = set(), []
    for path in sorted((ROOT / "engine_ext").rglob("*.*")):
        if path.suffix in (".pyx", ".pxd", ".h", ".c") and path.name != "fences.h":
            text = path.read_text()
            used |= set(re.findall(r"_fence\(FENCE_(\w+)\)", text))
            made = re.findall(r"\w*fence\((?!FENCE_|int name)|\b[lms]fence\b|__sync_synchronize|\bd[ms]b\b", text)
            nameless += [f"{path.relative_to(ROOT)}: {fence}" for fence in made]
    assert nameless == []
    assert used == set(mutate.fences())
    assert len(set(mutate.fences().values())) == len(mutate.fences())


def test_every_mutant_of_the_orders_fits_its_source() -> None:
    """`make interleave` takes minutes, so that it is not run after every change of the sources."""
    fits = {mutant.name: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in interleave.MUTANTS}
    assert fits == dict.fromkeys(fits, 1)


def test_what_is_hammered_is_there() -> None:
    assert set(mutate.FOCUS) <= set(mutate.fences())
    assert set(mutate.FOCUS.values()) <= set(stress.BLOCKS)


def test_the_model_writes_the_steps_of_functions_that_the_engine_has() -> None:
    files = re.findall(r"[\w/]+\.p[xy][xd]\b", model.__doc__ or "")
    text = "\n".join((ROOT / "engine_ext" / file).read_text() for file in files)
    written = {name for name in vars(model.Thread) if not name.startswith("_")} - model.WITHOUT_COUNTERPART
    assert written
    assert {name for name in written if not re.search(rf"^cdef [^=\n]*\b{name}\(", text, re.MULTILINE)} == set()
