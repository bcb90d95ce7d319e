"""This process's own page of counters.

Successive worlds count into the same page, and so do successive processes of a rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config.config import Config
from ..host.processes import is_running, read_process
from ..text.logs import logger
from . import page
from .names import STATES
from .page import PageError

VARIABLE = "ENGINE_COUNTERS"  # the path of the page that the launcher has made for this rank

_own: tuple[int, int] | None = None  # descriptor of the page, and the process that opened it


def should_count(settings: Config) -> bool:
    """Return whether this process has been asked to count."""
    served = settings.metrics_port, settings.metrics_textfile, settings.metrics_file_sd, settings.metrics_otlp
    return settings.metrics or any(each is not None for each in served)


def open_page(environ: Mapping[str, str]) -> int:
    """Open the launcher's page, which the environment names, or create one.

    Returns the same descriptor at each call. It stays open, so that others find the page in /proc. Raises OSError if no
    memory can be created.
    """
    global _own
    if _own is not None and _own[1] == os.getpid():
        return _own[0]
    _own = (_open(environ.get(VARIABLE)), os.getpid())
    return _own[0]


def _open(path: str | None) -> int:
    if path:
        try:
            if not Path(os.readlink(path)).name.startswith(f"memfd:{page.NAME}"):
                raise PageError("is no page of counters")
            snapshot = page.read(path)
            if snapshot is None or snapshot.state in ("ended", "failed") or not _is_other_running(snapshot["pid"]):
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
            logger.debug("metrics: %s is the page of process %d, which runs", path, snapshot["pid"])
        except OSError as error:
            logger.warning("metrics: cannot open %s: %s; the launcher will not see this rank's", path, error.strerror)
        except PageError as error:
            logger.warning("metrics: %s %s; the launcher will not see this rank's", path, error)
    return page.make()


def _is_other_running(pid: int) -> bool:
    """Return whether the process is another one than this, and runs."""
    process = read_process(pid)
    return pid != os.getpid() and process is not None and is_running(process)


def make_start_fields(
    descriptor: int, rank: int, local_rank: int, hosts: Sequence[int], host_name: str
) -> dict[str, int | str]:
    """Return the fields of the page that a rank sets when it starts, by name.

    An earlier world of this process may have used the page. `rank` and `local_rank` are those of the new world; `hosts`
    has the host number of each rank.
    """
    before = page.read(descriptor)
    return {
        "pid": os.getpid(),
        "rank": rank,
        "size": len(hosts),
        "local_rank": local_rank,
        "host": hosts[rank],
        "hosts": max(hosts) + 1,
        "host_name": host_name,
        "worlds": 1 + (before["worlds"] if before else 0),
        "started_ns": (before["started_ns"] if before else 0) or time.time_ns(),
        "cause": 0,
        "culprit": 0,
        "tuner_phase": 0,
        "state": STATES.index("running"),
    }
