"""The names of `horovod.common.exceptions`, for `except` clauses."""

from __future__ import annotations

from ..errors import CollectiveError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed. There are none yet, so nothing raises it."""


class HorovodVersionMismatchError(ImportError):
    """The native part is of another version. Ours refuses such ranks with `IncompatibleRanksError` instead."""
