"""The choice between cached and streaming stores: by size class, from what entries took."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engine_ext.coordinator.stores import replay_stores

CACHED, STREAMING = 0, 1
MIB = 1 << 20


def alike(nbytes: int, cached: int, streaming: int, count: int) -> list[tuple[int, int, int]]:
    """Entries that all take as long as one another."""
    return [(nbytes, cached, streaming)] * count


@pytest.mark.parametrize(("cached", "streaming"), [(7000, 1500), (1500, 7000), (8000, 1000), (1000, 1050)])
def test_trials_of_the_slower_kind_cost_little(cached: int, streaming: int) -> None:
    times = (cached, streaming)
    chosen = replay_stores(alike(16 * MIB, *times, 5000))
    lost = sum(times[kind] - min(times) for kind in chosen)
    assert 0 < lost <= 5000 * min(times) / 32
    assert 2 <= chosen[:100].count(times.index(max(times))) <= 6


def test_slower_kind_is_tried_again_for_ever() -> None:
    chosen = replay_stores(alike(16 * MIB, 100_000, 1000, 50_000))
    trials = [k for k, kind in enumerate(chosen) if kind == CACHED]
    gaps = [after - before for before, after in pairwise(trials)]
    assert max(gaps) == 4096 and len(trials) > 15


def test_other_kind_is_taken_once_it_has_become_faster() -> None:
    chosen = replay_stores([*alike(MIB, 5000, 1000, 1000), *alike(MIB, 500, 1000, 1000)])
    assert chosen[900:1000].count(STREAMING) >= 99
    assert chosen[1300:].count(CACHED) >= 650


def test_other_kind_is_taken_once_the_better_one_has_become_slow() -> None:
    chosen = replay_stores([*alike(MIB, 5000, 1000, 1000), *alike(MIB, 5000, 20_000, 500)])
    assert chosen[1030:].count(CACHED) >= 440


def test_late_ranks_do_not_make_a_kind_look_bad() -> None:
    draw = random.Random(3)
    late = [draw.choice((1, 1, 1, 1, 1, 1, 1, 3, 10, 50)) for _ in range(3000)]
    chosen = replay_stores([(16 * MIB, 2000 * by, 1500 * by) for by in late])
    assert chosen[100:].count(STREAMING) >= 0.9 * len(chosen[100:])


def test_first_entry_may_take_long() -> None:
    """It is cached, and touches memory for the first time."""
    chosen = replay_stores([(MIB, 900_000, 900_000), *alike(MIB, 1000, 3000, 500)])
    assert chosen[4:].count(STREAMING) <= 8


def test_small_entries_are_always_cached() -> None:
    assert set(replay_stores(alike((64 << 10) - 1, 5000, 1000, 200))) == {CACHED}
    assert STREAMING in replay_stores(alike(64 << 10, 5000, 1000, 200))


def test_sizes_of_one_class_share_what_is_known_and_others_do_not() -> None:
    chosen = replay_stores([*alike(16 * MIB, 7000, 1500, 300), *alike(31 * MIB, 14_000, 3000, 300)])
    assert chosen[300:].count(CACHED) <= 5
    chosen = replay_stores([*alike(16 * MIB, 7000, 1500, 300), *alike(32 * MIB, 1500, 3000, 300)])
    assert chosen[300:].count(STREAMING) <= 10
