"""The names of `horovod.common.exceptions`, for `except` clauses."""

from __future__ import annotations

from ..elastic.state import HostsUpdatedInterrupt
from ..errors import CollectiveError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """The native part is of another version. Ours refuses such ranks with `IncompatibleRanksError` instead."""
