"""Texts of the engine and of Python format lists of ranks alike."""

from __future__ import annotations

import numpy as np

import engine
from engine.errors import MismatchError
from engine.exit_report.report import ExitReport, Raised
from engine.launch.report.failure_report import odd_one_out
from engine.text import readable

from .arrays import refused
from .thread_world import ThreadWorld

SIZE = 20
SHOWN = 8  # parts of a list that the engine shows at most
CHOSEN = [
    {3},
    {0, 1},
    {0, 1, 2, 5},
    set(range(4, SIZE)),
    set(range(0, SIZE, 2)),
    {0, 1, 2, 4, 6, 7, 8, 9, 11, 13, 14, 16, 18},
    {0, 2, 4, 6, 8, 10, 12, 17, 18, 19},
    set(range(0, 2 * SHOWN, 2)),
]


def disagree(rank: int, name: str, chosen: set[int]) -> str:
    """Error of this rank when the chosen ranks submit another shape than the others."""
    return refused(lambda: engine.allreduce(np.ones(1 + (rank in chosen)), name=name), "sent", MismatchError)


def test_ranks_that_disagree_are_listed_as_python_lists_them() -> None:
    with ThreadWorld(SIZE) as world:
        for number, chosen in enumerate(CHOSEN):
            heard = world.run(disagree, f"odd.{number}", chosen)
            others = set(range(SIZE)) - chosen
            assert heard == heard[:1] * SIZE
            assert f"{readable.format_ranks(chosen, SHOWN)} sent allreduce average float64[2]" in heard[0]
            assert f"{readable.format_ranks(others, SHOWN)} sent allreduce average float64[1]" in heard[0]
            odd = odd_one_out(ExitReport(Raised("MismatchError", heard[0])))
            assert odd == (min(chosen) if len(chosen) == 1 else None)  # the launcher's reading
