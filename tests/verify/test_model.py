"""No wake-up is lost in any interleaving of the model, and every fence, look and rule is needed."""

from __future__ import annotations

import pytest

from . import model, mutate


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
