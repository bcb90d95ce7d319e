"""Ranks whose collectives meet in one thread: a call is repeated, with the answers so far, until it needs no more.

So everything that a call does before its last collective must be repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.elastic.state import Peers


class PeerGoneError(RuntimeError):
    """Exception of a collective whose world has failed."""


class _Waits(BaseException):
    """Raised when a rank needs the answer of a collective."""


class Rank(Peers):
    """Peers of one worker, whose rank may change from world to world."""

    def __init__(self, rank: int = 0) -> None:
        self.number = rank
        self.answers: list[Any] = []
        self.at = 0
        self.asks: tuple[Any, ...] = ()

    @property
    def rank(self) -> int:
        return self.number

    def gather_values(self, value: Any) -> Any:
        return self._ask("gather", value)

    def broadcast(self, value: Any, root: int) -> Any:
        return self._ask("broadcast", root, value)

    def broadcast_memory(self, memory: Any, root: int) -> None:
        memory[:] = self._ask("broadcast", root, memory.copy())

    def reduce_maximum(self, values: Sequence[int]) -> Any:
        return self._ask("maximum", *values)

    def _ask(self, *asks: Any) -> Any:
        if self.at == len(self.answers):
            self.asks = asks
            raise _Waits
        answer = self.answers[self.at]
        self.at += 1
        if isinstance(answer, PeerGoneError):
            raise answer
        return answer


def together(
    ranks: Sequence[Rank],
    calls: Sequence[Callable[[], Any]],
    gone: Callable[[int, int], bool] = lambda rank, number: False,
) -> list[Exception | None]:
    """Make each rank's call, and return the exceptions that the calls raised.

    `gone` tells by a rank and a collective's number within the call whether the collective fails on the rank.
    """
    outcomes: dict[int, Exception | None] = {}
    for number, rank in enumerate(ranks):
        rank.answers, rank.number = [], number
    while True:
        for number, call in enumerate(calls):
            if number not in outcomes:
                ranks[number].at = 0
                try:
                    call()
                    outcomes[number] = None
                except _Waits:
                    pass
                except Exception as error:
                    outcomes[number] = error
        waiting = [number for number in range(len(ranks)) if number not in outcomes]
        if not waiting:
            return [outcomes[number] for number in range(len(ranks))]
        kinds = {ranks[number].asks[0] for number in waiting}
        assert len(kinds) == 1, f"the ranks are in different collectives: {kinds}"
        asked = len(ranks[waiting[0]].answers)
        for number in waiting:
            lost = outcomes or gone(number, asked)  # a rank that has left answers no other
            ranks[number].answers.append(PeerGoneError() if lost else _answer([each.asks for each in ranks]))


def _answer(asks: Sequence[tuple[Any, ...]]) -> Any:
    match asks[0][0]:
        case "gather":
            return [value for _, value in asks]
        case "broadcast":
            assert len({root for _, root, _ in asks}) == 1, "the ranks name different roots"
            return asks[asks[0][1]][2]
        case "maximum":
            return [max(column) for column in zip(*(values for _, *values in asks), strict=True)]
    raise AssertionError(asks)
