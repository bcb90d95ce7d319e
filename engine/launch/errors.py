"""Exceptions of the launcher. Their texts quote hosts, ranks and files, and control no terminal that shows them."""

from __future__ import annotations

from .. import readable


class LaunchError(Exception):
    """A job that cannot start. The text says what, where and how to mend it; the exit code is 2.

    It is one line; where several hosts cannot take part, one more for each.
    """

    def __init__(self, text: object = "") -> None:
        super().__init__(readable.plain_lines(str(text)))


class JobError(RuntimeError):
    """A job that `engine.run` started and that failed. The text begins with what the first failing rank said.

    Attributes
    ----------
    rank : int or None
        The rank that failed first; None if none did, as when the job was ended by a signal.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(readable.plain_lines(text))
        self.rank = rank
