"""Gradients that are kept side by side on GPUs, which are stand-ins: `gradient_as_bucket_view`.

Problems have numbers, as in test_allreduce.py.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ..standins import POLICIES
from .jobs import Job
from .mutants import MUTANTS, changed
from .test_plane import EVERY_CALL

Start = Callable[..., Job]


@pytest.fixture
def ranks(libraries: Path, registered: Path, tmp_path: Path) -> Start:
    """Function that starts programs of views_programs.py on ranks."""

    def begin(size: int, programs: str, *rest: str, **settings: object) -> Job:
        told = (programs, str(registered), *rest)
        return Job(libraries, tmp_path, size, *told, module="views_programs", **{"one_thread": 1, **settings})

    return begin


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "policy"), [(1, "eager"), (3, "drawn"), *((2, policy) for policy in POLICIES)])
def test_gradients_are_right_and_in_their_places(size: int, policy: str, ranks: Start) -> None:
    """Problems 5, 6, 12 and 26."""
    ranks(size, "kept", policy=policy).succeeds()


def test_what_is_side_by_side_is_not_packed(ranks: Start) -> None:
    ranks(2, "launches").succeeds()


@pytest.mark.slow
def test_whether_a_rank_packs_is_its_own_affair(ranks: Start) -> None:
    """Problem 12."""
    ranks(3, "apart").succeeds()


@pytest.mark.slow
def test_other_ways(ranks: Start) -> None:
    ranks(3, "ordered+sparse+joins+shared").succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_optimizer_that_goes_in_flight(policy: str, ranks: Start) -> None:
    """Problem 10."""
    ranks(2, "dropped", policy=policy).succeeds()


def test_ranks_on_several_hosts(ranks: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        hub = f"127.0.0.1:{free.getsockname()[1]}"
    ranks(2, "apart", more={"ENGINE_HUB": hub, "ENGINE_SECRET": "a secret of tests"}).succeeds()


# ---- mutants ---------------------------------------------------------------------------------------------------------

KILLERS: dict[str, tuple[str, ...]] = {
    "neighbours_not_compared": ("apart",),
    "every_piece_in_the_first_place": ("apart",),
    "places_where_sums_are_ordered": ("ordered",),
    "factor_not_applied_in_place": ("kept",),
    "places_freed_in_flight": ("dropped",),
    "places_left_to_the_collector": ("dropped",),
}


@pytest.mark.skipif(not EVERY_CALL, reason="takes minutes: make gpu-faults")
@pytest.mark.parametrize("mutant", KILLERS)
def test_mutant_is_killed(mutant: str, ranks: Start, tmp_path: Path) -> None:
    ranks(2, *KILLERS[mutant], more=changed(mutant, tmp_path / "mutant"), linger=1).goes_wrong(40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "source"), sorted({(KILLERS[mutant], MUTANTS[mutant][0]) for mutant in KILLERS}), ids=str
)
def test_what_kills_mutants_lets_the_source_live(
    program: tuple[str, ...], source: Path, ranks: Start, tmp_path: Path
) -> None:
    ranks(2, *program, more=changed("none", tmp_path / "none", source), linger=1).succeeds()
