"""Exceptions of the engine. They are defined here so that native code can raise them; users import `engine.errors`."""

from __future__ import annotations


class EngineError(RuntimeError):
    """Base of everything that the engine raises."""

    def get_blame(self) -> tuple[int | None, str] | None:
        """Return the rank to blame and its cause, if that is another rank; launchers are told of them."""
        return None


class NotInitializedError(EngineError, ValueError):
    """A call that needs `engine.init()` came before it, or after `engine.shutdown()`."""


class ForkedError(EngineError):
    """The engine was used in a forked child of the process that initialised it."""


class CollectiveError(EngineError):
    """A collective operation failed or was refused: what Horovod's users catch as `HorovodInternalError`."""


class ArgumentError(CollectiveError, ValueError):
    """A collective was called with what it cannot be called with; nothing has been sent."""


class UnsupportedOperationError(ArgumentError, NotImplementedError):
    """An operation that does not exist for this number of ranks, or for this collective; nothing has been sent."""


class MismatchError(CollectiveError, ValueError):
    """Ranks disagree on one operation, or one submitted what none can use. Every rank gets this; the engine goes on."""


class DuplicateNameError(CollectiveError, ValueError):
    """A name was submitted again before its operation had completed."""


class UnsupportedTensorError(CollectiveError, TypeError, ValueError):
    """A dtype, device or memory layout that the engine cannot work on. Horovod raises ValueError for some of these."""


class DeviceError(EngineError):
    """The ranks' GPUs, their drivers or NCCL cannot be used. Every rank raises it; collectives of host memory go on."""


class RendezvousError(EngineError):
    """The ranks of a job could not find each other.

    Attributes
    ----------
    absent : int or None
        A rank that did not come in time, -1 if it is not known which; None: another reason.
    """

    def __init__(self, message: str = "", absent: int | None = None) -> None:
        super().__init__(message)
        self.absent = absent

    def get_blame(self) -> tuple[int | None, str] | None:
        return None if self.absent is None else (None if self.absent < 0 else self.absent, "absent")


class IncompatibleRanksError(RendezvousError):
    """Ranks run different builds, layouts or processors' kernels."""


class WorldError(CollectiveError):
    """The world has failed and cannot be used again. Every rank raises the first cause.

    Attributes
    ----------
    rank : int
        The rank that is to blame.
    cause : str
        `died`, `raised`, `left`, `stalled` or `lost`.
    did : str
        The same, as the message says it.
    """

    cause, did = "raised", "failed"

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[WorldError], tuple[str, int]]:
        return type(self), (str(self), self.rank)

    def get_blame(self) -> tuple[int | None, str] | None:
        return (None if self.rank < 0 else self.rank), self.cause


class RankDiedError(WorldError):
    """A rank's process ended without a word: killed, crashed or out of memory."""

    cause = did = "died"


class RankRaisedError(WorldError):
    """A rank failed with an exception of its own."""


class RankLeftError(WorldError):
    """A rank finished, or shut its engine down, while others still needed it."""

    cause, did = "left", "left while others still need it"


class RankStalledError(WorldError):
    """A rank stood still, or did not submit a tensor, for longer than the stall limit."""

    cause = did = "stalled"


class RankLostError(RankDiedError):
    """A rank on another host cannot be reached any more: the host, or the network to it, is gone."""

    cause, did = "lost", "cannot be reached"


# By the name of the cause: `shared/names.h` numbers them.
BY_CAUSE: dict[str, type[WorldError]] = {
    kind.cause: kind for kind in (RankDiedError, RankRaisedError, RankLeftError, RankStalledError, RankLostError)
}
