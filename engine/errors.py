"""The exceptions a user may catch. All derive from `EngineError`.

What a collective raises is a `CollectiveError`. Those that are not fatal (`MismatchError`, `ArgumentError`,
`DuplicateNameError`, `UnsupportedTensorError`) leave the engine working.
A `WorldError` ends the world: every later call on every rank raises the first cause.
"""

from __future__ import annotations

from engine_ext.errors import BY_CAUSE as BY_CAUSE
from engine_ext.errors import (
    ArgumentError,
    CollectiveError,
    DuplicateNameError,
    EngineError,
    ForkedError,
    IncompatibleRanksError,
    MismatchError,
    NotInitializedError,
    RankDiedError,
    RankLeftError,
    RankRaisedError,
    RankStalledError,
    RendezvousError,
    UnsupportedOperationError,
    UnsupportedTensorError,
    WorldError,
)

__all__ = [
    "ArgumentError",
    "CollectiveError",
    "ConfigError",
    "DuplicateNameError",
    "EngineError",
    "ForkedError",
    "IncompatibleRanksError",
    "MismatchError",
    "NotInitializedError",
    "RankDiedError",
    "RankLeftError",
    "RankRaisedError",
    "RankStalledError",
    "RendezvousError",
    "UnsupportedOperationError",
    "UnsupportedTensorError",
    "WorldError",
]


class ConfigError(EngineError, ValueError):
    """A setting, or a variable that a launcher set, has a value that it cannot have."""
