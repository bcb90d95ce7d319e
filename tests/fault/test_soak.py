"""The soak for a few seconds; `make soak` runs it for longer."""

from __future__ import annotations

import pytest

from . import soak, soak_program


@pytest.mark.slow
def test_late_ranks_and_ranks_that_go() -> None:
    tally = soak.soak(12.0, 1, show=False, late_seconds=4.0)
    assert tally.ends >= len(soak.ERRORS) and tally.stops > 0 and tally.steps >= soak_program.STOP_EVERY, tally
