"""Meetings of ranks in torch's store: how they find their places in a world, and how a group is formed."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from ..config.world import World
from ..errors import RendezvousError
from ..host.machine import identify_host
from ..host.patience import LONGEST, Patience
from ..net.rendezvous.invitation import exchange_invitation, open_hub
from ..session import runtime
from ..text import readable
from ..text.bounded_reader import parse_natural

SOURCE = "torch.distributed"
_FIRST_PAUSE, _USUAL_PAUSE, _LONGEST_PAUSE = 0.0005, 0.03, 0.5  # seconds between two looks into the store
_SHARE = 16  # of the time waited so far that a pause may last: pairs of many ranks wait long, all in one store


class StoreMeeting:
    """Exchange of short texts among the ranks of a group, in the store that torch gives to it.

    Ranks may meet several times in one store: a group that is formed anew finds the keys of the former one.

    `key` differs between meetings in one store, if the ranks know such a text. `world` is the key of the world that the
    ranks are in, equal on all of them: a later world may use the same store.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        seconds: float,
        is_over: Callable[[], bool] | None = None,
        key: str | None = None,
        world: str = "",
    ) -> None:
        self.rank, self.size = rank, size
        self._is_over = is_over  # tells that nobody wants the meeting any more
        self._store = store
        self._seconds = seconds  # longest time to wait for the others
        self._exchanges = 0
        self.key = self._count_meetings(world) if key is None else key

    def _count_meetings(self, world: str) -> str:
        """Return a text that differs between meetings of all worlds and numbers of ranks in the store."""
        place = f"{world} {self.size}"
        return f"{place} {(self._store.add(f'engine/arrivals {place}', 1) - 1) // self.size}"

    def exchange_texts(self, said: bytes, seconds: float | None = None) -> list[bytes]:
        """Return what each rank has said. Collective. `seconds` replaces the longest wait of this meeting.

        Raises RendezvousError with the names of ranks that did not come in time.
        """
        self._exchanges += 1
        keys = [f"engine/{self.key}/{self._exchanges}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], said)
        self._await_keys(keys, self._seconds if seconds is None else seconds)
        return _read_all(self._store, keys)

    def meet_aside(self, name: str, rank: int, size: int, is_over: Callable[[], bool]) -> StoreMeeting:
        """Return a meeting of some of the ranks, as which this one has another number, for a thread of its own.

        It waits for the others until `is_over`.
        """
        store = PrefixStore(f"engine/{self.key}/{name}", self._store)
        return StoreMeeting(store, rank, size, LONGEST, is_over)

    def agree_on_number(self, name: str, proposed: int) -> int:
        """Return the first number that any rank has proposed under a name. Not collective: it waits for nobody."""
        key = f"engine/{self.key}/{name}"
        return parse_number(self._store.compare_set(key, "", str(proposed)))

    def find_number(self, name: str) -> int | None:
        """Return the number that was proposed under a name, or None."""
        key = f"engine/{self.key}/{name}"
        return parse_number(self._store.get(key)) if self._store.check([key]) else None

    def _await_keys(self, keys: list[str], seconds: float) -> None:
        """Wait until keys are there.

        The store's own wait would take neither signals nor the world's failure, and keep other threads from the store.
        """
        patience, pause, begun = Patience(seconds), _FIRST_PAUSE, time.monotonic()
        while not self._store.check(keys) and (left := patience.seconds_left()):
            if self._is_over is not None and self._is_over():
                break
            if (failure := self._find_failure()) is not None:
                raise failure
            time.sleep(min(pause, left))
            pause = min(2 * pause, max(_USUAL_PAUSE, min((time.monotonic() - begun) / _SHARE, _LONGEST_PAUSE)))
        if missing := [rank for rank, key in enumerate(keys) if not self._store.check([key])]:
            raise RendezvousError(self._describe_absence(missing, seconds))

    def _find_failure(self) -> BaseException | None:
        """Return the failure by which a wait ends."""
        return runtime.current_engine().failure if runtime.is_initialized() else None

    def _describe_absence(self, missing: list[int], seconds: float) -> str:
        return (
            f"rank {self.rank} of the group has waited {seconds:g} s, the time-out of init_process_group, "
            f"new_group or monitored_barrier, for {readable.format_ranks(missing)}: does each make the same groups "
            "in the same order?"
        )


class SurvivorMeeting(StoreMeeting):
    """Meeting of the ranks of a group that are left, which may be held after the failure of their world.

    A rank that has waited in vain may come again, with others: what it has said in vain is not heard then. `rank` is
    this process's rank in the group that shrinks.
    """

    def __init__(self, store: Any, rank: int, left: Sequence[int], seconds: float) -> None:
        self._left = left  # ranks of that group that are left, ascending
        names = "-".join(map(str, left))
        super().__init__(store, left.index(rank), len(left), seconds, key=f"left {names}")
        self._names = self.key
        self._given_up = [f"engine/{self.key}/given up/{place}" for place in range(self.size)]
        store.delete_key(self._given_up[self.rank])
        with self._given_up_on_error():
            self._come_together(secrets.token_bytes(16))

    def exchange_texts(self, said: bytes, seconds: float | None = None) -> list[bytes]:
        """Return what each rank has said. Collective. A rank that waits in vain has left the meeting."""
        with self._given_up_on_error():
            return super().exchange_texts(said, seconds)

    def _come_together(self, token: bytes) -> None:
        """Find the key that stands for this attempt of every rank: one that was given up makes another necessary."""
        patience, agreed = Patience(self._seconds), False
        while not agreed:
            self.key, self._exchanges, self._is_over = self._names, 0, None
            before = self._count_retreats()
            told = super().exchange_texts(token, patience.seconds_left())
            self.key = f"{self._names} {hashlib.sha256(b''.join(told)).hexdigest()[:16]}"
            self._is_over = partial(self._has_changed, before)
            try:
                super().exchange_texts(b"", patience.seconds_left())
                agreed = True
            except RendezvousError:
                if not patience.seconds_left() or not self._has_changed(before):
                    raise
        self._is_over = None

    @contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        """Have what this rank has said not heard if an error ends its attempt."""
        try:
            yield
        except BaseException:
            self._store.set(self._given_up[self.rank], "")
            self._store.delete_key(f"engine/{self._names}/1/{self.rank}")
            self._store.add(self._retreats, 1)  # behind the above: who sees this sees that, too
            raise

    @property
    def _retreats(self) -> str:
        return f"engine/{self._names}/retreats"

    def _count_retreats(self) -> int:
        return int(self._store.add(self._retreats, 0))

    def _has_changed(self, before: int) -> bool:
        """Return whether a rank has given up since then; so another may have heard what it had said in vain."""
        return self._count_retreats() != before

    def _find_failure(self) -> BaseException | None:
        return None

    def _describe_absence(self, missing: list[int], _seconds: float) -> str:
        came = [place for place in missing if self._store.check([self._given_up[place]])]  # and left before this rank
        others = [self._left[place] for place in missing if place not in came or len(came) == len(missing)]
        return (
            f"rank {self._left[self.rank]} of the group has waited {self._seconds:g} s, the time-out of its group, for "
            f"{readable.format_ranks(others)} to shrink the group to {readable.format_ranks(self._left)}: every rank "
            "that is left calls shrink_group and excludes the same ranks, those that have died among them"
        )


def _read_all(store: Any, keys: list[str]) -> list[bytes]:
    """Read keys that are there, in one request if the store can do so."""
    if getattr(store, "has_extended_api", bool)():
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]


def parse_number(text: bytes) -> int:
    """Return a number that a rank has put into the store."""
    number = parse_natural(text.decode("utf-8", "replace"), most=(1 << 62) - 1)
    if number is None:
        raise RendezvousError(f"torch's store has {text[:40]!r} where a rank has put a number")
    return number


def find_world(meeting: StoreMeeting, interface: str | None) -> World:
    """Find this process's place in the world of the default group. Collective.

    Rank 0 makes the job's key and secret, and opens the port at which ranks of other hosts call it.
    """
    hosts = [text.decode() for text in meeting.exchange_texts(_describe_host().encode())]
    rank, own = meeting.rank, hosts[meeting.rank]
    found = exchange_invitation(
        rank,
        None,
        (lambda: open_hub(0, interface)) if len(set(hosts)) > 1 else None,
        lambda said: meeting.exchange_texts(said)[0],
        "what rank 0 has put into the store",
    )
    return World(
        rank,
        meeting.size,
        local_rank=hosts[:rank].count(own),
        local_size=hosts.count(own),
        job=f"torch={found.job}",
        secret=found.secret,
        source=SOURCE,
        hub=found.hub,
        host=own,
    )


def _describe_host() -> str:
    """Return a text that is equal for processes that can share memory, and open descriptors of each other."""
    return f"{identify_host()} {os.stat('/proc/self/ns/pid').st_ino}"
