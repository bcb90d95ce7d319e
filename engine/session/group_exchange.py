"""Exchange of texts among ranks that form a group by themselves, by which all of them succeed or fail."""

from __future__ import annotations

import json
from typing import Any

from ..errors import EngineError
from ..net.rendezvous.set_connections import Exchange
from ..text.bounded_reader import ReadError, get_text, get_whole, parse_json


class GroupExchange:
    """Exchange among the ranks of a group that is being formed.

    `exchange` takes this rank's bytes, and returns those of each of `ranks`, in the order of their numbers in the
    group.
    """

    def __init__(self, ranks: tuple[int, ...], exchange: Exchange) -> None:
        self.ranks = ranks
        self.broken = False  # whether an exchange has failed: nobody is to wait for another
        self._exchange = exchange

    def exchange_texts(self, text: bytes) -> list[bytes]:
        """Return what each rank has said. Collective."""
        self.broken = True
        texts = self._exchange(text)
        self.broken = False
        return texts

    def agree_on_place(self, leader: int, offset: int, failure: str) -> int:
        """Return the offset that `leader` has said. Collective.

        It raises an EngineError if a rank has failed, or forms a group of other ranks.
        """
        told = self._share_texts({"ranks": self.ranks, "offset": offset, "failure": failure})
        for rank, each in zip(self.ranks, told, strict=True):
            if each.get("ranks") != list(self.ranks):
                raise self.make_error(
                    f"rank {rank}, or one in its place, forms one of the ranks {each.get('ranks')}. Do all ranks make "
                    "the same groups in the same order?"
                )
        try:
            return get_whole(told[self.ranks.index(leader)], "offset")
        except ReadError as error:
            raise self.make_error(f"rank {leader} has said that {error}") from None

    def agree_on_success(self, failure: str) -> None:
        """Raise EngineError on all ranks if one of them has failed. Collective."""
        self._share_texts({"failure": failure})

    def make_error(self, reason: str) -> EngineError:
        """Return the error by which forming the group ends."""
        return EngineError(f"a group of the ranks {list(self.ranks)} cannot be formed: {reason}")

    def _share_texts(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what each rank has said; raise EngineError if one says that it has failed."""
        found = []
        for rank, text in zip(self.ranks, self.exchange_texts(json.dumps(said).encode()), strict=True):
            try:
                told = parse_json(text)
                failure = get_text(told, "failure")
            except ReadError as error:
                raise self.make_error(f"rank {rank} has sent what no rank sends: {error}") from None
            if failure:
                raise self.make_error(f"rank {rank} has failed: {failure}")
            found.append(told)
        return found
