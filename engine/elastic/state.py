"""State of a training that survives resets: each rank commits for itself, and one sends the newest commit to all.

A state communicates with other ranks only through `Peers`, and needs no engine. A commit is a copy that is complete
before one assignment replaces the previous one. So an exception or a signal in the middle of `save` or `sync` leaves
the old commit intact.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..text.deprecation import find_former_name
from . import copies
from .copies import Copy, Memory


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed. `run` catches it, and the ranks meet again."""


class Peers(Protocol):
    """Ranks of the present world. Each method is a collective."""

    @property
    def rank(self) -> int:
        """This process's rank. Not a collective."""
        ...

    def gather_values(self, value: Any) -> Sequence[Any]:
        """Return the values of all ranks, by rank."""
        ...

    def broadcast(self, value: Any, root: int) -> Any:
        """Return the value of rank `root`."""
        ...

    def broadcast_memory(self, memory: Memory, root: int) -> None:
        """Overwrite memory with the bytes that it has on rank `root`; it has the same size on all ranks."""
        ...

    def reduce_maximum(self, values: Sequence[int]) -> Sequence[int]:
        """Return the elementwise maximum over all ranks."""
        ...


@dataclass(frozen=True)
class Commit:
    """Copy of all values of a state."""

    # Number of the commit, counted over the job; None: initial values of the program, which may differ by rank
    number: int | None
    values: Copy  # never changed


def elect_root(commits: Sequence[int | None]) -> int:
    """Return the rank whose commit all ranks take over: the lowest of those with the newest commit.

    `commits` has the number of each rank's newest commit, by rank; None: it has none.
    """
    return max(range(len(commits)), key=lambda rank: (-1 if (number := commits[rank]) is None else number, -rank))


class State:
    """Base class of the state from which a training goes on after a reset. Use `ObjectState`.

    Parameters
    ----------
    peers : Peers, optional
        Default: the ranks of the engine's world.

    Attributes
    ----------
    world : int
        Number of the world that this process is in.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        if peers is None:
            from .worker.peers import WorldPeers  # imported here, as the driver's modules need no engine

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
        """True if a commit was postponed because of unapplied gradients; equal on all ranks. A later check makes it."""
        return self._owed

    @property
    def committed(self) -> int | None:
        """Number of the commit that this rank holds; None before the first `sync`."""
        return self._held.number

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to be called in each new world, before the state is made equal on all ranks."""
        self._callbacks.extend(callbacks)

    def register_in_hand(self, ask: Callable[[], bool]) -> None:
        """Register a function that returns whether there are gradients that no step has applied yet.

        An optimizer has such gradients if it takes several backward passes for one step. Commits and interrupts are
        postponed until no rank has any: their samples count as trained, but restored parameters would not include them.
        """
        self._in_hand.append(ask)

    def enter(
        self, world: int, updated: Callable[[], bool] = lambda: False, tell: Callable[[int], None] = lambda number: None
    ) -> None:
        """Set the world that this process is in; earlier news of hosts does not apply to it.

        Parameters
        ----------
        world : int
        updated : callable
            Returns whether the members of this world shall come to the gate; called in each check.
        tell : callable
            Called with the number of each commit that is made in this world.
        """
        self.world, self._ask, self._tell = world, updated, tell

    def on_hosts_updated(self, world: int) -> None:
        """Record that the members of a world shall come to the gate. A signal handler may call this."""
        self._updated = world

    def on_reset(self) -> None:
        """Call `reset` and the registered callbacks in a new world."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def reset(self) -> None:
        """Prepare for a new world; subclasses override this."""

    def commit(self) -> None:
        """Save a copy, and check whether hosts have changed. Collective: all ranks commit in the same step.

        Raises
        ------
        HostsUpdatedInterrupt
            Hosts have changed. It is raised on all ranks, after the commit.
        """
        self._check(commit=True)

    def check_host_updates(self) -> None:
        """Check whether hosts have changed. Collective.

        Raises
        ------
        HostsUpdatedInterrupt
            Hosts have changed. It is raised on all ranks.
        """
        self._check(commit=False)

    def _check(self, commit: bool) -> None:
        """Ask all ranks first, and save then: so all ranks make the same commits, with the same numbers."""
        told = int(self._updated == self.world or self._ask())
        in_hand = int(any(ask() for ask in self._in_hand))
        told, in_hand = self._peers.reduce_maximum((told, in_hand))
        self._owed = self._owed or commit
        if in_hand:
            return
        if self._owed:
            self.save()
        if told:
            raise HostsUpdatedInterrupt("the hosts have changed: the ranks meet again")

    def save(self) -> None:
        """Make a copy of all values the newest commit. Not a collective, but all ranks must do it in the same step."""
        number = 0 if self._held.number is None else self._held.number + 1
        self._held = Commit(number, self._copy_values())
        self._owed = False
        self._tell(number)

    def restore(self) -> None:
        """Reset all values to those of the newest commit, or to the program's initial values if there is none."""
        self._set_values(self._held.values)
        self._owed = False

    def sync(self) -> None:
        """Give all ranks the newest commit that one of them holds, or else the values of rank 0. Collective.

        Afterwards every rank holds that commit. If all hold it already, and so no rank is new, only commit numbers
        travel.
        """
        numbers = self._peers.gather_values(self._held.number)
        root = elect_root(numbers)
        commit = self._held
        if numbers[root] is None or any(number != numbers[root] for number in numbers):
            if self._peers.rank == root and commit.number is None:
                commit = Commit(0, self._copy_values())
            commit = self._send(commit, root)
        self._set_values(commit.values)
        self._held = commit
        self._owed = False

    def _send(self, commit: Commit, root: int) -> Commit:
        """Return the commit of rank `root` on all ranks. Collective. Held commits stay unchanged until it completes."""
        mine = commit if self._peers.rank == root else None
        told = mine and (mine.number, mine.values.names, mine.values.pickled, mine.values.places)
        number, names, pickled, places = self._peers.broadcast(told, root)
        nbytes = copies.count_bytes(places)
        memory = mine.values.memory if mine else self._find_memory(nbytes)
        if nbytes:
            self._peers.broadcast_memory(memory[:nbytes], root)
        return mine or Commit(number, Copy(names, pickled, places, memory))

    def _find_memory(self, nbytes: int) -> Memory:
        """Return memory for a copy, distinct from that of the held commit."""
        raise NotImplementedError

    def _copy_values(self) -> Copy:
        """Return a copy of all values, which shares nothing with them."""
        raise NotImplementedError

    def _set_values(self, values: Copy) -> None:
        """Set the values from a copy; they share nothing with it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Parts:
    """State of a value that stays the same object and loads its state; other values are replaced."""

    parts: Any


@dataclass
class LoopProgress:
    """Position of a loop over epochs."""

    epoch: int = 0  # number of the present epoch, from 0
    done: int = 0  # number of its samples that were trained, on all ranks together


class ObjectState(State):
    """State of named values, which are its attributes.

    For a value with `state_dict` and `load_state_dict`, such as a sampler or a scheduler, its state dict is kept. Every
    other value is pickled, so that changes within a list are restored, too. Arrays are copied alternately into one of
    two memories, so that a commit allocates nothing once both exist.

    Parameters
    ----------
    peers : Peers, optional
        Positional-only. Default: the ranks of the engine's world.
    **values
        Values to keep. Attributes that are added later are not kept.

    Attributes
    ----------
    progress : LoopProgress
        Position of `engine.elastic.loop`; kept with the values.

    Raises
    ------
    TypeError
        A value cannot be pickled; the text names it.
    ValueError
        A name is reserved by the state.

    Examples
    --------
    >>> state = ObjectState(epoch=0, best=[], sampler=sampler)
    >>> state.epoch += 1
    >>> state.commit()
    """

    arrays = copies.NUMPY

    def __init__(self, peers: Peers | None = None, /, **values: Any) -> None:
        super().__init__(peers)
        for name in values:
            if hasattr(self, name):
                raise ValueError(
                    f"a state cannot have a value that is called {name!r}: it has something else of that name"
                )
        self.progress = LoopProgress()
        values = {"progress": self.progress, **values}
        self._names = tuple(values)
        self._memories = [copies.NOTHING.memory] * 2
        self.__dict__.update(values)
        self._held = Commit(None, self._copy_values())

    def _find_memory(self, nbytes: int) -> Memory:
        free = int(self._memories[0] is self._held.values.memory)
        if len(self._memories[free]) < nbytes:
            self._memories[free] = self.arrays.allocate_memory(nbytes)
        return self._memories[free]

    def _copy_values(self) -> Copy:
        present = {name: self._extract_state(getattr(self, name)) for name in self._names}
        return copies.copy_values(present, self.arrays, self._find_memory)

    def _set_values(self, values: Copy) -> None:
        """Give the attributes the values of a copy, in place where a program may hold views of them."""
        expect_names("the state", self._names, values.names, "values")
        given = copies.restore_values(values, self.arrays, lambda name: self._accepts_views(getattr(self, name)))
        for name, value in given.items():
            present = getattr(self, name)
            if not isinstance(value, Parts):
                setattr(self, name, copy.deepcopy(value) if self._accepts_views(present) else value)
                continue
            try:
                self._load(name, present, value.parts)
            except Exception as error:
                error.add_note(f"{name!r} of this worker's state was to go on from what is committed of it.")
                raise

    def _extract_state(self, value: Any) -> Any:
        """Return what is kept of a value: the value itself, or `Parts` for `_load`."""
        return Parts(value.state_dict()) if _has_state(value) else value

    def _accepts_views(self, present: Any) -> bool:
        """Return whether `_load` copies its argument at once, so that it may get views of the held commit."""
        return False

    def _load(self, name: str, present: Any, kept: Any) -> None:
        """Load the parts that were kept into the present value of a name."""
        if not _has_state(present):
            raise ValueError(
                f"{name!r} is a {type(present).__qualname__} here, and what is committed of it is the state of an "
                "object: give the state an object of that kind when you make it, and leave it there"
            )
        present.load_state_dict(kept)


def expect_names(value: str, present: Iterable[str], kept: Iterable[str], what: str = "arrays") -> None:
    """Raise ValueError if a value of a state has other parts than were kept of it; the text names them."""
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
    """Raise ValueError unless a kept array has the dtype and shape of the present one."""
    (dtype, shape), (old_dtype, old_shape) = present, kept
    if dtype != old_dtype or list(shape) != list(old_shape):
        raise ValueError(
            f"{name!r} is {dtype}{list(shape)} here, and was kept as {old_dtype}{list(old_shape)}: all ranks, and a "
            "state over time, have one model"
        )


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def __getattr__(name: str) -> Any:
    return find_former_name(__name__, name, {"Progress": LoopProgress})
