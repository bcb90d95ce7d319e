"""Logging through the standard library: one logger, `engine`, whose records carry `rank`."""

from __future__ import annotations

import logging

logger = logging.getLogger("engine")

_FORMAT = "%(asctime)s engine rank %(rank)s %(levelname)s: %(message)s"


class _Rank(logging.Filter):
    """Adds the rank to each record; `-` before `init`."""

    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = "-" if self.rank is None else self.rank
        return True


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr as long as the program has configured no handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logger.handlers == [self]:
            super().emit(record)


_rank = _Rank()
_fallback = _Fallback()
_fallback.setFormatter(logging.Formatter(_FORMAT))
logger.addFilter(_rank)
logger.addHandler(_fallback)


def configure(level: str, rank: int) -> None:
    """Set the level of the engine's logger and the rank its records carry."""
    logger.setLevel(level)
    _rank.rank = rank
