"""Names of `horovod.common.exceptions`, for `except` clauses."""

from __future__ import annotations

from ..elastic.state import HostsUpdatedInterrupt
from ..errors import CollectiveError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """Error of a native part of another version. Never raised: such ranks are refused with `IncompatibleRanksError`."""
