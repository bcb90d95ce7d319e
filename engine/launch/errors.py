"""Exceptions of the launcher. Control characters are removed from their texts, which quote hosts, ranks and files."""

from __future__ import annotations

from ..text import readable


class LaunchError(Exception):
    """A job cannot start. The text says why, where and how to mend it; the exit code is 2.

    The text is one line, or, if several hosts cannot take part, one more line for each.
    """

    def __init__(self, text: object = "") -> None:
        super().__init__(readable.plain_lines(str(text)))


class JobError(RuntimeError):
    """A job of `engine.run` has failed. The text names the rank that failed first, and has its traceback or a report.

    Attributes
    ----------
    rank : int or None
        Rank that failed first; None if none did, as when the job was ended by a signal.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(readable.plain_lines(text))
        self.rank = rank
