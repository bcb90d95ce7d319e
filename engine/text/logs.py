"""Logging through the standard library: one logger, `engine`, whose records have the attribute `rank`."""

from __future__ import annotations

import logging

from . import readable

logger = logging.getLogger("engine")

_FORMAT = "%(asctime)s engine rank %(rank)s %(levelname)s: %(message)s"


class _Rank(logging.Filter):
    """Filter that adds the rank to each record; `-` before `init`."""

    rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = "-" if self.rank is None else self.rank
        return True


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that writes to stderr as long as the program has configured no handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logger.handlers == [self]:
            super().emit(record)


class _Plain(logging.Formatter):
    """Formatter that removes control characters, so that texts of peers and files cannot control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return readable.plain_lines(super().format(record))


_rank = _Rank()
_fallback = _Fallback()
_fallback.setFormatter(_Plain(_FORMAT))
logger.addFilter(_rank)
logger.addHandler(_fallback)


def configure_logger(level: str, rank: int) -> None:
    """Set the level of the engine's logger, and the rank of its records."""
    logger.setLevel(level)
    _rank.rank = rank
