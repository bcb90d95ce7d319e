"""Worlds that follow each other in one process: `runtime.enter`, and what goes from one into the next."""

from __future__ import annotations

from tests.elastic.worlds import Worlds


def test_survivors_and_a_newcomer_meet_in_the_next_world() -> None:
    """Problems 1 and 2: newcomers have counted other worlds, or none."""
    with Worlds("counting") as worlds:
        members = worlds.start(3)
        worlds.place(members)
        for worker in members:
            assert worker.heard("reduced")["value"] == 3.0
        members[0].kill()
        for worker in members[1:]:
            assert worker.heard("failed")["culprit"] == 0
        members = [*worlds.start(), *members[1:]]
        worlds.place(members)
        for rank, worker in enumerate(members):
            said = worker.heard("reduced")
            assert (said["value"], said["rank"]) == (3.0, rank)
