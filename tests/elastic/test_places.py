"""Places: every pattern of holes on two hosts with three slots, and the properties that programs rely on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from engine.elastic.places import Slot, WorldPlace, assign_ranks

SLOTS = [Slot(host, number) for host in "ab" for number in range(3)]
PATTERNS = [pattern for pattern in itertools.product([False, True], repeat=6) if any(pattern)]
AGES = {"a": 1, "b": 2}


def filled(pattern: tuple[bool, ...]) -> dict[int, Slot]:
    """Return a worker in each slot of the pattern; workers' numbers descend as slots ascend."""
    return {10 - index: slot for index, slot in enumerate(SLOTS) if pattern[index]}


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: "".join("-x"[each] for each in pattern))
def test_every_pattern_of_holes(pattern: tuple[bool, ...]) -> None:
    places = list(assign_ranks(7, filled(pattern), AGES.__getitem__).values())
    assert [place.rank for place in places] == list(range(sum(pattern)))
    assert [place.slot for place in places] == [slot for index, slot in enumerate(SLOTS) if pattern[index]]
    assert {(place.world, place.size) for place in places} == {(7, sum(pattern))}
    for host in "ab":
        here = [place for place in places if place.slot.host == host]
        assert [place.local_rank for place in here] == list(range(len(here)))
        assert {place.local_size for place in here} <= {len(here)}
        if len(here) == 3:
            assert [place.local_rank for place in here] == [place.slot.number for place in here]
    for local_rank in range(3):
        across = [place for place in places if place.local_rank == local_rank]
        assert [place.cross_rank for place in across] == list(range(len(across)))
        assert {place.cross_size for place in across} <= {len(across)}


def find_moved_workers(before: Mapping[int, WorldPlace], after: Mapping[int, WorldPlace]) -> list[int]:
    """Return workers of both worlds whose local rank has changed: a program may have chosen its GPU by it."""
    return [worker for worker in after if worker in before and before[worker].local_rank != after[worker].local_rank]


@pytest.mark.parametrize("gone", range(6))
def test_a_slot_that_is_filled_again_gives_everybody_their_place_back(gone: int) -> None:
    whole = filled((True,) * 6)
    before = assign_ranks(1, whole, AGES.__getitem__)
    dead = list(whole)[gone]
    hole = assign_ranks(2, {worker: slot for worker, slot in whole.items() if worker != dead}, AGES.__getitem__)
    after = assign_ranks(
        3, {99 if worker == dead else worker: slot for worker, slot in whole.items()}, AGES.__getitem__
    )
    assert after[99].local_rank == before[dead].local_rank
    assert find_moved_workers(before, after) == []
    behind = [worker for worker, slot in whole.items() if slot.host == whole[dead].host and slot > whole[dead]]
    assert find_moved_workers(before, hole) == behind


def test_hosts_stand_by_age() -> None:
    places = assign_ranks(1, {0: Slot("new", 0), 1: Slot("old", 1)}, {"new": 5, "old": 4}.__getitem__)
    assert list(places) == [1, 0]
    assert places[1].local_rank == 0 and places[1].slot.number == 1


def test_two_workers_in_one_slot_are_refused() -> None:
    with pytest.raises(ValueError, match="workers 3 and 5 are both in slot 1 of a"):
        assign_ranks(1, {3: Slot("a", 1), 5: Slot("a", 1)}, AGES.__getitem__)
