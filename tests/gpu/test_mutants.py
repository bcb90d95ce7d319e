"""Mutants of the GPU plane: each has a test that fails with it, in the file of what it breaks (`make gpu-faults`)."""

from __future__ import annotations

import pytest

from ..parallel.test_frozen_runs import KILLERS as OF_FROZEN
from .mutants import MUTANTS, VARIANTS
from .test_allreduce import KILLERS as OF_REDUCING
from .test_freeze import KILLERS as OF_FREEZING
from .test_metrics import KILLERS as OF_METRICS
from .test_moving import KILLERS as OF_MOVING
from .test_plane import KILLERS as OF_OPENING
from .test_sets import KILLERS as OF_SETS
from .test_sums import KILLERS as OF_SUMS
from .test_views import KILLERS as OF_VIEWS


def test_every_mutant_has_a_killer() -> None:
    of = (OF_OPENING, OF_REDUCING, OF_MOVING, OF_SUMS, OF_SETS, OF_METRICS, OF_VIEWS, OF_FROZEN, OF_FREEZING)
    assert set().union(*of) == set(MUTANTS)


@pytest.mark.parametrize("name", {**MUTANTS, **VARIANTS})
def test_what_is_changed_is_there(name: str) -> None:
    path, old, new = {**MUTANTS, **VARIANTS}[name]
    assert old in path.read_text()
    assert old != new
