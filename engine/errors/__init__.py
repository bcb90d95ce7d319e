"""Exceptions that a user may catch. All derive from `EngineError`.

Collectives raise a `CollectiveError`. Errors that are not fatal (`MismatchError`, `ArgumentError`,
`DuplicateNameError`, `UnsupportedTensorError`) leave the engine working.
A `WorldError` ends the world: every later call on every rank raises the first cause.

Compiled code of TensorFlow and JAX raises exceptions of its own classes that contain the engine's text; `of` returns
the engine's exception for them.
"""

from __future__ import annotations

import re

from engine_ext.errors import BY_CAUSE as BY_CAUSE
from engine_ext.errors import (
    ArgumentError,
    CollectiveError,
    DeviceError,
    DuplicateNameError,
    EngineError,
    ForkedError,
    IncompatibleRanksError,
    MismatchError,
    NotInitializedError,
    RankDiedError,
    RankLeftError,
    RankLostError,
    RankRaisedError,
    RankStalledError,
    RendezvousError,
    UnsupportedOperationError,
    UnsupportedTensorError,
    WorldError,
)

from .formatting import exception_text

__all__ = [
    "ArgumentError",
    "CalledOff",
    "CollectiveError",
    "ConfigError",
    "DeviceError",
    "DuplicateNameError",
    "EngineError",
    "ForkedError",
    "IncompatibleRanksError",
    "MismatchError",
    "NotInitializedError",
    "RankDiedError",
    "RankLeftError",
    "RankLostError",
    "RankRaisedError",
    "RankStalledError",
    "RendezvousError",
    "UnsupportedOperationError",
    "UnsupportedTensorError",
    "WorldError",
    "of",
]


class ConfigError(EngineError, ValueError):
    """A setting, or a variable of a launcher, has an invalid value."""


class CalledOff(RendezvousError):
    """The rendezvous of the next world was cancelled, because a process of it will not come."""


_BY_NAME: dict[str, type[EngineError]] = {
    name: kind for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, EngineError)
}
_TOLD = re.compile(rf"\b({'|'.join(_BY_NAME)}): (.*)", re.DOTALL)
_RANK = re.compile(r"\brank ([0-9]{1,9})\b")


def of(exception: BaseException | None) -> EngineError | None:
    """Return the engine's exception that a framework's exception stands for.

    Parameters
    ----------
    exception : BaseException or None
        Exception of a framework, such as `tf.errors.AbortedError` or `jax.errors.JaxRuntimeError`.

    Returns
    -------
    EngineError or None
        `exception` itself if it is the engine's. Otherwise an exception of the engine's class, if the class and its
        message are found in the text of `exception`, or of its cause or context. None if there is no such text.

    Examples
    --------
    >>> try:
    ...     step(parameters, batch)
    ... except jax.errors.JaxRuntimeError as error:
    ...     if isinstance(engine.errors.of(error), engine.errors.RankDiedError):
    ...         save(parameters)
    ...     raise
    """
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        seen.add(id(exception))
        if isinstance(exception, EngineError):
            return exception
        told = _TOLD.search(exception_text(exception))
        if told is not None:
            return _make_exception(_BY_NAME[told[1]], told[2])
        exception = exception.__cause__ or exception.__context__
    return None


def _make_exception(kind: type[EngineError], text: str) -> EngineError:
    """Make an exception of a class from its message, in which a `WorldError` names the rank to blame."""
    if not issubclass(kind, WorldError):
        return kind(text)
    blamed = _RANK.search(text)
    return kind(text, int(blamed[1]) if blamed is not None else -1)
