"""A rank whose page is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .page import Snapshot


@dataclass(frozen=True)
class Member:
    """A rank.

    Attributes
    ----------
    rank : int
    source : callable
        Gives the descriptor or path of its page; None as long as there is none.
    up : callable
        Tells from the page, or from None, whether the process runs.
    """

    rank: int
    source: Callable[[], int | str | None]
    up: Callable[[Snapshot | None], bool]
