"""The state that a training keeps over resets: each rank commits for itself, and who has the newest gives it to all.

A state speaks with the other ranks through `Peers` alone, and needs no engine. A commit is a copy that is complete
before it takes the place of the one before, in one assignment; so an exception or a signal in the middle of `save` or
`sync` leaves the old one whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from . import copies
from .copies import Copy, Memory


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed. `run` catches it, and the ranks meet again."""


class Peers(Protocol):
    """The ranks of the present world. Each method is a collective."""

    @property
    def rank(self) -> int:
        """This process's rank. No collective."""
        ...

    def gather(self, value: Any) -> Sequence[Any]:
        """The values of all ranks, by rank."""
        ...

    def broadcast(self, value: Any, root: int) -> Any:
        """The value of one rank."""
        ...

    def fill(self, memory: Memory, root: int) -> None:
        """Give memory the bytes that it has on one rank; as many on all ranks."""
        ...

    def maximum(self, values: Sequence[int]) -> Sequence[int]:
        """Of each of some numbers, the largest of all ranks."""
        ...


@dataclass(frozen=True)
class Commit:
    """A copy of all values.

    Attributes
    ----------
    number : int or None
        Counts up over the job. None: what the program began with, which no other rank need have.
    values : Copy
        Nobody changes it.
    """

    number: int | None
    values: Copy


def elect(commits: Sequence[int | None]) -> int:
    """The rank whose commit is given to all: the newest that there is, of the lowest rank that holds it.

    Parameters
    ----------
    commits : sequence of int or None
        By rank, the number of its newest commit.

    Returns
    -------
    int
    """
    return max(range(len(commits)), key=lambda rank: (-1 if (number := commits[rank]) is None else number, -rank))


class State:
    """What a training goes on from after a reset. `ObjectState` is the one to use.

    Parameters
    ----------
    peers : Peers, optional
        Not given: the ranks of the engine's world.

    Attributes
    ----------
    world : int
        The number of the world that this process is in.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        if peers is None:
            from .worker.peers import WorldPeers  # what decides needs no engine

            peers = WorldPeers()
        self.world = 0
        self._peers = peers
        self._callbacks: list[Callable[[], None]] = []
        self._in_hand: list[Callable[[], bool]] = []
        self._updated: int | None = None
        self._owed = False
        self._held = Commit(None, copies.NOTHING)
        self._ask: Callable[[], bool] = lambda: False
        self._tell: Callable[[int], None] = lambda number: None

    @property
    def owed(self) -> bool:
        """Whether a commit was put off, as gradients were in hand: the same on all ranks. A later check makes it."""
        return self._owed

    @property
    def committed(self) -> int | None:
        """The number of the commit that this rank holds; None before the first `sync`."""
        return self._held.number

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have functions called in each new world, before the state is made equal on all ranks."""
        self._callbacks.extend(callbacks)

    def register_in_hand(self, ask: Callable[[], bool]) -> None:
        """Let something say whether it has gradients in hand that no step has applied, as an optimizer may that takes
        several backward passes for one. Until it has none on any rank, commits are put off, and so are interrupts:
        the samples of these gradients count as trained, and parameters that do not have them would be restored."""
        self._in_hand.append(ask)

    def enter(
        self, world: int, updated: Callable[[], bool] = lambda: False, tell: Callable[[int], None] = lambda number: None
    ) -> None:
        """Note that this process is in a world, for which earlier news of hosts mean nothing.

        Parameters
        ----------
        world : int
        updated : callable
            Asked in each check whether the members of this world shall come to the gate.
        tell : callable
            Given the number of each commit that is made in this world.
        """
        self.world, self._ask, self._tell = world, updated, tell

    def on_hosts_updated(self, world: int) -> None:
        """Note that the members of a world shall come to the gate. May be called from a signal handler."""
        self._updated = world

    def on_reset(self) -> None:
        """Call what was registered for a new world."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def reset(self) -> None:
        """What a kind of state has to do in a new world."""

    def commit(self) -> None:
        """Save a copy, and see whether hosts have changed. Collective: all ranks commit in the same step.

        Raises
        ------
        HostsUpdatedInterrupt
            They have; on all ranks alike. The commit is made.
        """
        self._check(commit=True)

    def check_host_updates(self) -> None:
        """See whether hosts have changed. Collective.

        Raises
        ------
        HostsUpdatedInterrupt
            They have; on all ranks alike.
        """
        self._check(commit=False)

    def _check(self, commit: bool) -> None:
        """Ask first, and save then: whether there is a commit, and so its number, is the same on all ranks."""
        told = int(self._updated == self.world or self._ask())
        in_hand = int(any(ask() for ask in self._in_hand))
        told, in_hand = self._peers.maximum((told, in_hand))
        self._owed = self._owed or commit
        if in_hand:
            return
        if self._owed:
            self.save()
        if told:
            raise HostsUpdatedInterrupt("the hosts have changed: the ranks meet again")

    def save(self) -> None:
        """Make a copy of all values the newest commit. Touches no other rank; all ranks do it in the same step."""
        number = 0 if self._held.number is None else self._held.number + 1
        self._held = Commit(number, self._take())
        self._owed = False
        self._tell(number)

    def restore(self) -> None:
        """Give all values back as they were at the newest commit, or without one as the program began with them."""
        self._give(self._held.values)
        self._owed = False

    def sync(self) -> None:
        """Give all ranks the newest commit that one of them holds, or what rank 0 has if there is none. Collective.

        After it every rank holds that commit. If all do already, and so nobody is new, only their numbers travel.
        """
        numbers = self._peers.gather(self._held.number)
        root = elect(numbers)
        commit = self._held
        if numbers[root] is None or any(number != numbers[root] for number in numbers):
            if self._peers.rank == root and commit.number is None:
                commit = Commit(0, self._take())
            commit = self._send(commit, root)
        self._give(commit.values)
        self._held = commit
        self._owed = False

    def _send(self, commit: Commit, root: int) -> Commit:
        """The commit of one rank, on all. Collective. What each holds stays as it is until this has ended."""
        mine = commit if self._peers.rank == root else None
        told = mine and (mine.number, mine.values.names, mine.values.pickled, mine.values.places)
        number, names, pickled, places = self._peers.broadcast(told, root)
        nbytes = copies.extent(places)
        memory = mine.values.memory if mine else self._find_memory(nbytes)
        if nbytes:
            self._peers.fill(memory[:nbytes], root)
        return mine or Commit(number, Copy(names, pickled, places, memory))

    def _find_memory(self, nbytes: int) -> Memory:
        """Memory for a copy, other than that of the commit that is held."""
        raise NotImplementedError

    def _take(self) -> Copy:
        """A copy of all values, which shares nothing with them."""
        raise NotImplementedError

    def _give(self, values: Copy) -> None:
        """Make these the values; they share nothing with what was given."""
        raise NotImplementedError


@dataclass(frozen=True)
class Parts:
    """What is kept of a value that stays the object that it is, and takes it over; other values are replaced.

    Attributes
    ----------
    parts : object
    """

    parts: Any


@dataclass
class Progress:
    """How far a loop over epochs is.

    Attributes
    ----------
    epoch : int
        The one that is under way, from 0.
    done : int
        Samples of it that were trained, on all ranks together.
    """

    epoch: int = 0
    done: int = 0


class ObjectState(State):
    """Values under names, as attributes.

    Of a value with `state_dict` and `load_state_dict`, such as a sampler or a scheduler, that is kept which these give
    and take; every other one is pickled, so that a list that a program changes comes back as it was. Arrays are copied
    in turn into one of two memories, so that a commit allocates nothing once there are both.

    Parameters
    ----------
    peers : Peers, optional
        By position only; not given: the ranks of the engine's world.
    **values
        What is kept. An attribute that is added later is not.

    Attributes
    ----------
    progress : Progress
        How far `engine.elastic.loop` is; kept with the values.

    Raises
    ------
    TypeError
        A value that cannot be pickled, by name.
    ValueError
        A name that the state has for something else.

    Examples
    --------
    >>> state = ObjectState(epoch=0, best=[], sampler=sampler)
    >>> state.epoch += 1
    >>> state.commit()
    """

    arrays: copies.Arrays = copies.NUMPY

    def __init__(self, peers: Peers | None = None, /, **values: Any) -> None:
        super().__init__(peers)
        for name in values:
            if hasattr(self, name):
                raise ValueError(
                    f"a state cannot have a value that is called {name!r}: it has something else of that name"
                )
        self.progress = Progress()
        values = {"progress": self.progress, **values}
        self._names = tuple(values)
        self._memories = [copies.NOTHING.memory] * 2
        self.__dict__.update(values)
        self._held = Commit(None, self._take())

    def _find_memory(self, nbytes: int) -> Memory:
        free = int(self._memories[0] is self._held.values.memory)
        if len(self._memories[free]) < nbytes:
            self._memories[free] = self.arrays.memory(nbytes)
        return self._memories[free]

    def _take(self) -> Copy:
        present = {name: self._kept(getattr(self, name)) for name in self._names}
        return copies.take(present, self.arrays, self._find_memory)

    def _give(self, values: Copy) -> None:
        expect_names("the state", self._names, values.names, "values")
        given = copies.give(values, self.arrays, lambda name: self._lent(getattr(self, name)))
        for name, value in given.items():
            present = getattr(self, name)
            if not isinstance(value, Parts):
                setattr(self, name, copy.deepcopy(value) if self._lent(present) else value)
                continue
            try:
                self._load(name, present, value.parts)
            except Exception as error:
                error.add_note(f"{name!r} of this worker's state was to go on from what is committed of it.")
                raise

    def _kept(self, value: Any) -> Any:
        """What is kept of a value: itself, or `Parts` for `_load`."""
        return Parts(value.state_dict()) if _has_state(value) else value

    def _lent(self, present: Any) -> bool:
        """Whether `_load` copies what it is given at once, so that it may be given what is kept."""
        return False

    def _load(self, name: str, present: Any, kept: Any) -> None:
        """Have the value of a name take over the parts that were kept."""
        if not _has_state(present):
            raise ValueError(
                f"{name!r} is a {type(present).__qualname__} here, and what is committed of it is the state of an "
                "object: give the state an object of that kind when you make it, and leave it there"
            )
        present.load_state_dict(kept)


def expect_names(value: str, present: Iterable[str], kept: Iterable[str], what: str = "arrays") -> None:
    """Raise ValueError, which names them, if a value of a state has other parts than what was kept of it."""
    here, there = list(present), list(kept)
    missing, odd = [each for each in there if each not in set(here)], [each for each in here if each not in set(there)]
    if missing or odd:
        told = [
            f"{text} {', '.join(map(repr, names[:5]))}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for text, names in (("only what was kept has", missing), ("only this worker has", odd))
            if names
        ]
        raise ValueError(
            f"{value!r} of this worker has other {what} than what was kept of it: {'; '.join(told)}. All ranks, and a "
            "state over time, have the same ones"
        )


def expect_alike(name: str, present: tuple[str, Sequence[int]], kept: tuple[str, Sequence[int]]) -> None:
    """Raise ValueError unless the dtype and shape of an array that was kept are those of the present one."""
    (dtype, shape), (old_dtype, old_shape) = present, kept
    if dtype != old_dtype or list(shape) != list(old_shape):
        raise ValueError(
            f"{name!r} is {dtype}{list(shape)} here, and was kept as {old_dtype}{list(old_shape)}: all ranks, and a "
            "state over time, have one model"
        )


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
