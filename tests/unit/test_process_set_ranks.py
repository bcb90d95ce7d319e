"""Ranks of a process set: what `ProcessSet` and `init` take, and what they say of anything else."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from engine.collectives.process_sets import ProcessSet
from engine.errors import ConfigError
from engine.session import arguments


@pytest.mark.parametrize(
    "ranks",
    [
        [2, 0],
        (0, 2),
        {0, 2},
        range(0, 3, 2),
        iter([0, 2]),
        np.array([2, 0]),
        np.array([2, 0], np.uint8),
        [np.int64(2), np.int32(0)],
    ],
)
def test_integers_of_any_kind_are_ranks(ranks: Any) -> None:
    found = ProcessSet(ranks).ranks
    assert found == [0, 2] and all(type(rank) is int for rank in found)


NO_LISTS = [5, None, "01", b"01", {0: 1}, np.int64(3), np.array(3), object, 0.5]
NO_RANKS = ["a", None, 1.0, np.float32(1), True, False, np.True_, -1, np.int64(-1), 1 << 70, Fraction(1), [0], 1j]


@pytest.mark.parametrize("ranks", NO_LISTS, ids=repr)
def test_a_set_that_is_no_list_is_refused(ranks: Any) -> None:
    with pytest.raises(ValueError, match=r"a process set is given as a list of ranks, such as \[0, 1\]"):
        ProcessSet(ranks)


@pytest.mark.parametrize("rank", NO_RANKS, ids=repr)
def test_what_is_no_rank_is_refused_by_name(rank: Any) -> None:
    with pytest.raises(ValueError, match=r"is no rank of a process set: ranks .* from 0 to size\(\) - 1") as caught:
        ProcessSet([0, rank])
    assert str(caught.value).startswith((repr(rank), str(rank)))


def test_ranks_that_are_given_twice_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"each rank once, and not ranks 1, 3 several times, as in \[0, 1, 1, 3, 3, 3\]"
    ):
        ProcessSet([3, 1, 3, 1, 0, 3])


@pytest.mark.parametrize("given", [None, "dynamic", [], (), np.empty((0, 2), int)], ids=repr)
def test_init_takes_no_sets_in_several_forms(given: Any) -> None:
    assert arguments.make_process_sets(given) == []


def test_init_takes_sets_and_ranks_together() -> None:
    own = ProcessSet([1])
    found = arguments.make_process_sets([own, [0, 1], np.array([2, 1])])
    assert found[0] is own and [each.ranks for each in found] == [[1], [0, 1], [1, 2]]
    assert [each.ranks for each in arguments.make_process_sets(np.array([[0, 1], [2, 3]]))] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("given", [5, "static", b"dynamic", {0: [1]}, ProcessSet([0]), True, object], ids=repr)
def test_init_says_that_it_takes_a_list_of_sets(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"process_sets is a list of sets, such as \[\[0, 1\], \[2, 3\]\], or 'dynamic'"
    ):
        arguments.make_process_sets(given)


@pytest.mark.parametrize("wrong", [*NO_LISTS, *([0, rank] for rank in NO_RANKS), [1, 1]], ids=repr)
def test_init_says_which_set_is_wrong(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^process_sets\[1\]: .*a process set"):
        arguments.make_process_sets([[0, 1], wrong])
