"""Metrics without our launcher: a thread of local rank 0 serves those of all ranks of its host."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ...config.config import Config
from ...errors import ConfigError
from ...text.logs import logger
from ..errors import MetricsError
from .rank_pages import Member, Stranger
from .service import Service, Wanted


class InProcess:
    """Metrics service of local rank 0: listens from construction, serves from `start` to `stop`.

    Raises ConfigError if the service is not possible with these settings.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._strangers: list[Stranger] = []
        self._members: list[Member] = []
        try:
            self._service = Service(wanted, self._members, logger.warning)
        except MetricsError as error:
            raise ConfigError(str(error)) from None

    def start(self, pids: Mapping[int, int]) -> None:
        """Start to serve; if it serves already, switch to the ranks of the next world.

        `pids` has the process ids of this host's ranks, by rank.
        """
        before, self._strangers = self._strangers, [Stranger(pid) for pid in pids.values()]
        self._members[:] = map(Stranger.make_member, self._strangers, pids)
        for stranger in before:
            stranger.close()
        if before:
            return
        for line in self._service.warnings:
            logger.warning("%s", line)
        for line in self._service.news:
            logger.info("%s", line)
        try:
            self._service.start()
        except MetricsError as error:  # the ranks have met already: not worth ending the world
            logger.warning("%s", error)

    def stop(self) -> None:
        """Stop serving; takes at most 2 s."""
        try:
            self._service.stop()
        finally:
            for stranger in self._strangers:
                stranger.close()


def listen(settings: Config, local_rank: int) -> InProcess | None:
    """Prepare to serve metrics if this is local rank 0 and the settings ask for it; else return None.

    Call it before the ranks meet, while a wrong setting can still be corrected: it raises ConfigError.
    """
    wanted = Wanted.from_settings(settings, [sys.executable, *sys.argv])
    return InProcess(wanted) if local_rank == 0 and wanted.anything else None
