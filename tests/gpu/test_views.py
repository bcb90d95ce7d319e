"""Gradients that are kept side by side on GPUs, which are stand-ins: `gradient_as_bucket_view`.

Problems have numbers, as in test_allreduce.py.
"""

from __future__ import annotations

import pytest

from ..standins import POLICIES
from .jobs import Start, find_hub

PROGRAMS = "views_programs"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "policy"), [(1, "eager"), (3, "drawn"), *((2, policy) for policy in POLICIES)])
def test_gradients_are_right_and_in_their_places(size: int, policy: str, start_ranks: Start) -> None:
    """Problems 5, 6, 12 and 26."""
    start_ranks(size, "kept", policy=policy).succeeds()


def test_what_is_side_by_side_is_not_packed(start_ranks: Start) -> None:
    start_ranks(2, "launches").succeeds()


@pytest.mark.slow
def test_whether_a_rank_packs_is_its_own_affair(start_ranks: Start) -> None:
    """Problem 12."""
    start_ranks(3, "apart").succeeds()


@pytest.mark.slow
def test_other_ways(start_ranks: Start) -> None:
    start_ranks(3, "ordered+sparse+joins+shared").succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_optimizer_that_goes_in_flight(policy: str, start_ranks: Start) -> None:
    """Problem 10."""
    start_ranks(2, "dropped", policy=policy).succeeds()


def test_ranks_on_several_hosts(start_ranks: Start) -> None:
    start_ranks(2, "apart", more=find_hub()).succeeds()
