"""Every collective but allreduce, handles, knobs and shared tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..ranks import run_ranks
from . import collective_program, group_program, scatter_program

LIMIT = {"ENGINE_STALL_LIMIT": "20"}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "program",
    [
        collective_program.broadcasts,
        collective_program.allgathers,
        scatter_program.reducescatters,
        scatter_program.alltoalls,
        scatter_program.groups,
        group_program.gathers,
        group_program.scatters,
        group_program.disagreements,
        group_program.cost,
        collective_program.waiting,
        collective_program.knobs,
        collective_program.shared_tensors,
    ],
)
def test_collectives(program: Callable[[], int], size: int) -> None:
    run_ranks(size, program, env=LIMIT)
