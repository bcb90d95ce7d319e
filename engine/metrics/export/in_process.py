"""Metrics without our launcher: local rank 0 serves those of all ranks of its host, from a thread of its process."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ...config import Config
from ...errors import ConfigError
from ...logs import logger
from ..errors import MetricsError
from .rank_pages import Member, Stranger
from .service import Service, Wanted


class InProcess:
    """Listens from the beginning, and serves from `start` to `stop`. A forked child has nothing of it but the name.

    Parameters
    ----------
    wanted : Wanted

    Raises
    ------
    ConfigError
        It cannot be had as the settings say.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._strangers: list[Stranger] = []
        self._members: list[Member] = []
        try:
            self._service = Service(wanted, self._members, logger.warning)
        except MetricsError as error:
            raise ConfigError(str(error)) from None

    def start(self, pids: Mapping[int, int]) -> None:
        """Serve; when it serves already, the ranks of the next world from now on.

        Parameters
        ----------
        pids : mapping of int to int
            The processes of this host's ranks, by rank.
        """
        before, self._strangers = self._strangers, [Stranger(pid) for pid in pids.values()]
        self._members[:] = map(Stranger.member, self._strangers, pids)
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
        except MetricsError as error:  # the world has met: it is no reason to end it
            logger.warning("%s", error)

    def stop(self) -> None:
        """Serve no longer; takes 2 s at most."""
        self._service.stop()
        for stranger in self._strangers:
            stranger.close()


def listen(settings: Config, local_rank: int) -> InProcess | None:
    """Prepare to serve metrics, if this rank is the one that does and the settings ask for it.

    To be called before the ranks meet: what is wrong is an error while it can be mended.

    Parameters
    ----------
    settings : Config
    local_rank : int

    Returns
    -------
    InProcess or None

    Raises
    ------
    ConfigError
        It cannot be had as the settings say.
    """
    wanted = Wanted.by(settings, [sys.executable, *sys.argv])
    return InProcess(wanted) if local_rank == 0 and wanted.anything else None
