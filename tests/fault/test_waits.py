"""Reports of who waits for what and for whom: operations without a waiting caller are watched too."""

from __future__ import annotations

import pytest

from engine.text import readable

from ..ranks import run_ranks, start_ranks
from ..waiting import until
from . import wait_programs
from .faults import WITHIN, named

LIMIT = 3.0
STALL = {"ENGINE_STALL_WARNING": "1.5", "ENGINE_STALL_LIMIT": str(LIMIT)}  # all ranks have come before the only warning


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("size", "victim", "name", "among"),
    [
        (2, 1, "known", None),
        (2, 1, "new", None),
        (3, 0, "known", None),
        (4, 0, "new", None),
        (3, 2, "known", [1, 2]),
        (3, 1, "new", [1, 2]),
    ],
)
def test_what_nobody_waits_for_is_reported_and_ends_the_world(
    size: int, victim: int, name: str, among: list[int] | None
) -> None:
    finished = run_ranks(size, wait_programs.unwaited, victim, name, among, env=STALL, check=False)
    members = among or list(range(size))
    brought = [rank for rank in members if rank != victim]
    # Only the coordinator knows a new name.
    for rank in brought if name == "known" else members[:1]:
        text = finished.ranks[rank].stderr
        assert f"'{name}' (allreduce) has waited " in text, finished
        assert f" s for rank {victim}; submitted by {readable.format_ranks(brought)}" in text, finished
    begun = min(value["begun"] for value in finished.values)
    named(finished, finished.values, victim, "RankStalledError", begun, WITHIN)
    for value in finished.values:
        assert f"'{name}'" in value["text"], value


def test_a_rank_that_is_early_is_warned_and_goes_on() -> None:
    with start_ranks(3, wait_programs.early, env={"ENGINE_STALL_WARNING": "0.5"}) as job:
        warned = job.output / "rank.0" / "stderr"
        until(
            lambda: "for ranks 1, 2; submitted by rank 0" in (warned.read_text() if warned.exists() else ""),
            "the warning",
        )
        (job.directory / "warned").touch()
        finished = job.finish()
    assert finished.values == [None] * 3
