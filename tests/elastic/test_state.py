"""States: what is copied and restored; an incomplete commit or sync must leave a complete one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from engine.elastic import state as module
from engine.elastic.state import HostsUpdatedInterrupt, ObjectState, State, elect_root

from .lockstep import PeerGoneError, Rank, together

RANKS = 3


class BrokenError(Exception):
    """Exception of a value that cannot be taken or given now."""


class Value:
    """A value with a state, which fails at a given step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.breaks = ""

    def state_dict(self) -> dict[str, int]:
        if self.breaks == "take":
            raise BrokenError
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.breaks == "give":
            raise BrokenError
        self.number = state["number"]
        if self.breaks == "given":
            raise BrokenError


def make(number: int) -> ObjectState:
    return ObjectState(Rank(), first=Value(number), epoch=number, second=Value(number), history=[number])


def change(state: ObjectState, number: int) -> None:
    state.first.number = state.epoch = state.second.number = number
    state.history.append(number)


def shown(state: ObjectState) -> tuple[Any, ...]:
    return state.first.number, state.epoch, state.second.number, tuple(state.history)


def held(state: ObjectState) -> tuple[Any, ...]:
    """Return what `restore` restores."""
    for value in (state.first, state.second):
        value.breaks = ""
    state.restore()
    return shown(state)


def call(
    states: list[ObjectState], name: str, gone: Callable[[int, int], bool] = lambda rank, number: False
) -> list[Any]:
    return together([state._peers for state in states], [getattr(state, name) for state in states], gone)


def world(*numbers: int) -> list[ObjectState]:
    """Return the states of a world after its first sync, with commits of these numbers."""
    states = [make(0) for _ in range(RANKS)]
    assert call(states, "sync") == [None] * RANKS
    for state in states:
        for number in numbers:
            change(state, number)
    assert call(states, "commit") == [None] * RANKS
    return states


@pytest.mark.parametrize(
    ("commits", "root"),
    [([None, None], 0), ([None, 0], 1), ([3, 4, 4], 1), ([4, 3, 4], 0), ([0], 0), ([None, 7, None], 1)],
)
def test_the_newest_commit_is_elected_and_of_equal_ones_the_lowest_rank(commits: list[int | None], root: int) -> None:
    assert elect_root(commits) == root


def test_before_any_commit_all_get_what_rank_0_has_now() -> None:
    """The state includes what rank 0's program has loaded since it made the state."""
    states = [make(number) for number in range(RANKS)]
    change(states[0], 9)
    assert call(states, "sync") == [None] * RANKS
    assert [shown(state) for state in states] == [(9, 9, 9, (0, 9))] * RANKS
    assert [state.committed for state in states] == [0] * RANKS
    for state in states:
        change(state, 5)
    assert [held(state) for state in states] == [(9, 9, 9, (0, 9))] * RANKS  # from now on a newcomer may be the root


def test_a_list_comes_back_as_it_was() -> None:
    state = world(1)[0]
    state.history.append(2)
    state.restore()
    assert state.history == [0, 1]
    state.history.append(3)
    state.restore()
    assert state.history == [0, 1]


def test_without_a_commit_the_beginning_comes_back() -> None:
    state = make(4)
    change(state, 5)
    assert held(state) == (4, 4, 4, (4,))


def test_a_newcomer_gets_the_commit_and_survivors_go_back_to_it() -> None:
    states = world(1)
    for state in states:
        change(state, 2)
        state.restore()
    states = [make(77), *states[1:]]
    assert call(states, "sync") == [None] * RANKS
    assert [shown(state) for state in states] == [(1, 1, 1, (0, 1))] * RANKS
    assert [state.committed for state in states] == [1] * RANKS


def test_nothing_but_numbers_travels_if_all_hold_the_same_commit() -> None:
    states = world(1)
    assert call(states, "sync") == [None] * RANKS
    assert [len(state._peers.answers) for state in states] == [1] * RANKS
    states[0] = make(0)
    assert call(states, "sync") == [None] * RANKS
    assert [len(state._peers.answers) for state in states] == [2] * RANKS


@pytest.mark.parametrize("breaks", ["take"])
@pytest.mark.parametrize("where", ["first", "second"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_an_exception_within_a_save_leaves_the_commit_before(breaks: str, where: str, rank: int) -> None:
    states = world(1)
    for state in states:
        change(state, 2)
    getattr(states[rank], where).breaks = breaks
    errors = call(states, "commit")
    assert [type(error) for error in errors] == [
        BrokenError if number == rank else type(None) for number in range(RANKS)
    ]
    assert states[rank].committed == 1 and held(states[rank]) == (1, 1, 1, (0, 1))
    assert call(states, "sync") == [None] * RANKS
    assert [shown(state) for state in states] == [(2, 2, 2, (0, 1, 2))] * RANKS


def test_a_signal_within_a_save_leaves_the_commit_before(monkeypatch: pytest.MonkeyPatch) -> None:
    state = world(1)[0]
    change(state, 2)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.copies.NumpyArrays, "copy_into_views", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.save()
    monkeypatch.undo()
    assert state.committed == 1 and held(state) == (1, 1, 1, (0, 1))


@pytest.mark.parametrize("breaks", ["give", "given", "take"])
@pytest.mark.parametrize("where", ["first", "second"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_an_exception_within_a_sync_leaves_each_rank_a_whole_commit(breaks: str, where: str, rank: int) -> None:
    states = [make(7), *world(1)[:2]]  # a newcomer among them
    getattr(states[rank], where).breaks = breaks
    errors = call(states, "sync")
    broken = breaks != "take"  # a sync takes values only before the first commit
    assert [type(error) for error in errors] == [
        BrokenError if broken and number == rank else type(None) for number in range(RANKS)
    ]
    old = (None, (7, 7, 7, (7,)))
    new = (1, (1, 1, 1, (0, 1)))
    assert [(state.committed, held(state)) for state in states] == [
        old if broken and number == rank == 0 else new for number in range(RANKS)
    ]
    assert call(states, "sync") == [None] * RANKS
    assert [shown(state) for state in states] == [new[1]] * RANKS


@pytest.mark.parametrize("message", range(2))
@pytest.mark.parametrize("late", list(itertools.product([False, True], repeat=RANKS)))
@pytest.mark.parametrize("victim", range(RANKS))
def test_a_death_within_a_sync_leaves_one_commit_to_all(message: int, late: tuple[bool, ...], victim: int) -> None:
    """Any rank dies at any message, which any of the others may already have."""
    states = world(1)
    for state in states[:2]:  # the third lacks the next commit
        change(state, 2)
        state.save()
    states = [make(9), states[0], states[2]] if victim != 1 else [states[2], states[0], make(9)]
    call(states, "sync", lambda rank, number: number == message and late[rank])
    survivors = [state for number, state in enumerate(states) if number != victim]
    newest = max((state.committed for state in survivors if state.committed is not None), default=None)
    for state in survivors:
        assert (state.committed, held(state)) in (
            (None, (9, 9, 9, (9,))),
            (1, (1, 1, 1, (0, 1))),
            (2, (2, 2, 2, (0, 1, 2))),
        )
    assert newest is not None
    states = [*survivors, make(5)]
    assert call(states, "sync") == [None] * RANKS
    assert [state.committed for state in states] == [newest] * RANKS
    assert len({shown(state) for state in states}) == 1 and shown(states[0])[0] == newest


@pytest.mark.parametrize("late", list(itertools.product([False, True], repeat=RANKS)))
def test_a_death_within_a_commit_leaves_it_to_some(late: tuple[bool, ...]) -> None:
    states = world(1)
    for state in states:
        change(state, 2)
    errors = call(states, "commit", lambda rank, number: late[rank])
    assert [isinstance(error, PeerGoneError) for error in errors] == list(late)
    assert [state.committed for state in states] == [1 if each else 2 for each in late]
    assert [held(state)[0] for state in states] == [1 if each else 2 for each in late]


def test_all_are_interrupted_at_the_same_check_and_once() -> None:
    states = world(1)
    assert call(states, "check_host_updates") == [None] * RANKS
    states[1].on_hosts_updated(0)
    assert [type(error) for error in call(states, "check_host_updates")] == [HostsUpdatedInterrupt] * RANKS
    for state in states:
        state.enter(1)
    assert call(states, "check_host_updates") == [None] * RANKS


def test_a_commit_is_made_before_its_interrupt() -> None:
    states = world(1)
    states[2].on_hosts_updated(0)
    assert [type(error) for error in call(states, "commit")] == [HostsUpdatedInterrupt] * RANKS
    assert [state.committed for state in states] == [2] * RANKS


def test_commits_and_interrupts_wait_for_gradients_in_hand_on_any_rank() -> None:
    states = world(1)
    in_hand = [False] * RANKS
    for rank, state in enumerate(states):
        state.register_in_hand(lambda rank=rank: in_hand[rank])
    states[0].on_hosts_updated(0)
    in_hand[2] = True
    assert call(states, "commit") == [None] * RANKS
    assert [state.committed for state in states] == [1] * RANKS
    in_hand[2] = False
    assert [type(error) for error in call(states, "check_host_updates")] == [HostsUpdatedInterrupt] * RANKS
    assert [state.committed for state in states] == [2] * RANKS


def test_callbacks_are_called_in_a_new_world() -> None:
    called: list[int] = []
    state = make(0)
    state.register_reset_callbacks([lambda: called.append(1), lambda: called.append(2)])
    state.on_reset()
    assert called == [1, 2]


def test_values_that_share_something_still_do() -> None:
    both = [1]
    state = ObjectState(Rank(), one=both, other=both)
    both.append(2)
    state.restore()
    state.one.append(3)
    assert state.other == [1, 3]


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'numbers', of type generator, cannot be kept"):
        ObjectState(Rank(), epoch=0, numbers=(number for number in range(3)))


@pytest.mark.parametrize("name", ["commit", "world", "committed", "_held"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"called '{name}'"):
        ObjectState(Rank(), **{name: 1})


def _swap_first(self: State) -> None:
    self._held = module.Commit((self._held.number or 0) + 1, self._held.values)
    self._held = module.Commit(self._held.number, self._copy_values())


def _give_held_first(self: State) -> None:
    numbers = self._peers.gather_values(self._held.number)
    root = elect_root(numbers)
    self._held = self._peers.broadcast(self._held, root)
    self._set_values(self._held.values)


@pytest.mark.parametrize(
    ("name", "replacement", "test"),
    [
        ("save", _swap_first, lambda: test_an_exception_within_a_save_leaves_the_commit_before("take", "second", 1)),
        (
            "sync",
            _give_held_first,
            lambda: test_an_exception_within_a_sync_leaves_each_rank_a_whole_commit("give", "second", 0),
        ),
        ("sync", _give_held_first, test_before_any_commit_all_get_what_rank_0_has_now),
        ("_check", lambda self, commit: self.save() if commit else None, test_a_commit_is_made_before_its_interrupt),
    ],
)
def test_a_rule_that_is_left_out_is_noticed(
    name: str, replacement: Callable[..., Any], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(State, name, replacement)
    with pytest.raises(AssertionError):
        test()


def test_a_value_may_become_an_object_and_an_object_a_value() -> None:
    state: Any = ObjectState(Rank(), best=None)
    state.best = Value(1)
    state.restore()
    assert state.best is None
    state.best = Value(1)
    state.save()
    state.best.number = 2
    state.restore()
    assert state.best.number == 1
    state.best = None
    with pytest.raises(ValueError, match="'best' is a NoneType here"):
        state.restore()
