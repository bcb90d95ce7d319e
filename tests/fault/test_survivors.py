"""A rank fails in the middle of a training: the others keep the last step's state, save it and train on with it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch")

from ..ranks import run_ranks
from . import survivor_programs
from .faults import others


@pytest.mark.slow
@pytest.mark.parametrize(("manner", "views"), [("dies", True), ("raises", False)])
def test_survivors_keep_their_state(manner: str, views: bool) -> None:
    victim = 1
    finished = run_ranks(3, survivor_programs.train, victim, manner, views, check=False)
    found = [finished.values[rank] for rank in others(finished, victim)]
    assert finished.code != 0 and len(found) == 2 and finished.values[victim] is None
    for each in found:
        assert each is not None, finished
        assert each["step"] == survivor_programs.FAILS_AT
        assert "rank 1" in each["error"], each["error"]
        assert each["before"] == each["after"] == each["loaded"] == found[0]["before"]
        assert each["trained"] and each["moved"]
