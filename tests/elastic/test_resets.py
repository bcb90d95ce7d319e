"""Training over many resets equals a run that is started again from each commit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from .worlds import Nursery, Worlds

PROGRAM = "tests.elastic.reset_programs"
WORLDS = 20


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery(PROGRAM) as begun:
        yield begun


def trained(nursery: Nursery, restarted: bool, **environ: str) -> list[tuple[int, str, float]]:
    """Return steps, digest and learning rate after each world; ranks agree, and no member holds duplicates.

    After each world a member is killed, the two in turn, or both.
    """
    found = []
    with Worlds(nursery, f"{PROGRAM}:everything", **environ) as worlds:
        members = worlds.start(2)
        for world in range(WORLDS):
            worlds.place(members)
            told = [worker.heard("trained") for worker in members]
            assert told[0]["digest"] == told[1]["digest"], f"the ranks of world {world + 1} differ"
            for each in told:
                assert each["held"] == {"Engine": 1, "GradientGroup": 3, "TorchReducer": 3, "Deltas": 1}, world
            found.append((told[0]["steps"], told[0]["digest"], told[0]["rate"]))
            victims = members if restarted else [members[world // 2 % 2]]
            for worker in victims:
                worker.kill()
            for worker in members:
                if worker not in victims:
                    worker.heard("failed")
            members = [worlds.start()[0] if worker in victims else worker for worker in members]
    return found


@pytest.mark.slow
def test_a_training_over_resets_is_that_of_runs_that_are_started_again(nursery: Nursery, tmp_path: Path) -> None:
    """Views, sparse gradients, Adasum, PowerSGD, a freezing layer, scheduler and scaler; newcomers in each world."""
    over_resets = trained(nursery, restarted=False)
    again = trained(nursery, restarted=True, COMMITS=str(tmp_path))
    assert over_resets == again
    assert len({digest for _, digest, _ in again}) == WORLDS
