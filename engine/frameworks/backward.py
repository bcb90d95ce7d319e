"""The gradients of collectives, Horovod's or mathematical, as far as they are the same for all frameworks.

There are two conventions, and docs/operations.md has a table of both. Horovod's, the default, is that of its
bindings: what comes back through an allgather, a broadcast or a reduce-scatter is an average over ranks. The
mathematical one takes the loss to be the sum of what the ranks compute, so that the gradient of a rank's input is the
sum over ranks of what their outputs ask of it. Which of them holds is decided in the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from .. import runtime
from ..errors import EngineError
from ..process_sets import ProcessSet
from ..types import Adasum, Average, Op, Sum

_chosen: ContextVar[bool | None] = ContextVar("mathematical_gradients", default=None)


@contextmanager
def mathematical_gradients(enabled: bool = True) -> Iterator[None]:
    """Choose the gradients of the collectives that are called inside, in this thread.

    The choice belongs to the forward pass: where `backward` is called, and by which thread, does not matter. It must be
    the same on all ranks.

    Parameters
    ----------
    enabled : bool
        True for the gradients of the sum of all ranks' losses; False for Horovod's, which are the default unless
        `init(mathematical_gradients=True)` was called. docs/operations.md has a table of both.

    Examples
    --------
    >>> with hvd.mathematical_gradients():  # hvd: the binding of a framework
    ...     everyone = hvd.allgather(embeddings)
    """
    token = _chosen.set(enabled)
    try:
        yield
    finally:
        _chosen.reset(token)


def are_mathematical() -> bool:
    """Whether a collective that is called now has mathematical gradients."""
    chosen = _chosen.get()
    return runtime.settings().mathematical_gradients if chosen is None else chosen


def combining(mathematical: bool) -> Op:
    """The operation by which the gradients of all ranks' outputs are combined."""
    return Sum if mathematical else Average


def expect_gradient(op: Op, what: str) -> None:
    """Raise EngineError unless a reduction by that operation has a gradient. `what`: the function that was called."""
    if op not in (Sum, Average, Adasum):
        raise EngineError(
            f"{what} with op={op.name.title()} has no gradient: only Sum, Average and Adasum do; detach the tensor"
        )


def backward_name(name: str | None) -> str | None:
    """The name of the collective that the gradient of a named one takes."""
    return None if name is None else f"{name}.backward"


def own_rows(rows: Sequence[int], process_set: ProcessSet) -> slice:
    """Where the rows of this rank lie in a gathered tensor that has so many of each."""
    rank = process_set.engine.rank
    start = sum(rows[:rank])
    return slice(start, start + rows[rank])


def scatter_factor(op: Op, prescale: float, postscale: float, mathematical: bool, process_set: ProcessSet) -> float:
    """By what the gradient of a reduce-scatter is multiplied. Horovod's is the mathematical one times the ranks."""
    factor = prescale * postscale
    if mathematical:
        return factor / process_set.size() if op is Average else factor
    return factor if op is Average else factor * process_set.size()
