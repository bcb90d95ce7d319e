"""The exceptions a user may catch. All derive from `EngineError`.

Errors that are not fatal (`MismatchError`, `DuplicateNameError`, `UnsupportedTensorError`) leave the engine working.
A `WorldError` ends the world: every later call on every rank raises the first cause.
"""

from __future__ import annotations

from engine_ext.errors import (
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
    UnsupportedTensorError,
    WorldError,
)

__all__ = [
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
    "UnsupportedTensorError",
    "WorldError",
]


class ConfigError(EngineError, ValueError):
    """A setting, or a variable that a launcher set, has a value that it cannot have."""
