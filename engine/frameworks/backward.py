"""Gradients of collectives, in Horovod's or the mathematical convention, for all frameworks.

docs/explanation/collective-gradients.md has a table of both conventions. Horovod's, the default, is that of its
bindings: the gradient of an allgather, a broadcast or a reduce-scatter is an average over ranks. In the mathematical
one the loss is the sum of all ranks' losses. So the gradient of a rank's input is the sum of the gradients from all
ranks' outputs. The forward pass determines the convention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ..collectives.process_sets import ProcessSet
from ..collectives.reduce_ops import Adasum, Average, Op, Sum
from ..errors import EngineError
from ..session import runtime

_chosen: ContextVar[bool | None] = ContextVar("mathematical_gradients", default=None)


@contextmanager
def mathematical_gradients(enabled: bool = True) -> Iterator[None]:
    """Choose the gradients of the collectives that this thread calls inside the block.

    The choice is made in the forward pass; it does not matter where, and in which thread, `backward` is called. It must
    be the same on all ranks.

    Parameters
    ----------
    enabled : bool
        Whether gradients are those of the sum of all ranks' losses, or else Horovod's. Horovod's are the default unless
        `init(mathematical_gradients=True)` was called. docs/explanation/collective-gradients.md has a table of both.

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
    """Return whether a collective that is called now has mathematical gradients."""
    chosen = _chosen.get()
    return runtime.current_settings().mathematical_gradients if chosen is None else chosen


def choose_backward_op(mathematical: bool) -> Op:
    """Return the operation that combines the gradients of all ranks' outputs."""
    return Sum if mathematical else Average


def expect_gradient(op: Op, what: str) -> None:
    """Raise EngineError unless a reduction by that operation has a gradient. `what`: name of the called function."""
    if op not in (Sum, Average, Adasum):
        raise EngineError(
            f"{what} with op={op.name.title()} has no gradient: only Sum, Average and Adasum do; detach the tensor"
        )


def backward_name(name: str | None) -> str | None:
    """Return the name of the collective that computes the gradient of a named one."""
    return None if name is None else f"{name}.backward"


def own_rows(rows: Sequence[int], process_set: ProcessSet) -> slice:
    """Return the slice of this rank's rows in a gathered tensor with these numbers of rows per rank."""
    rank = process_set.engine.rank
    start = sum(rows[:rank])
    return slice(start, start + rows[rank])


def scatter_factor(op: Op, prescale: float, postscale: float, mathematical: bool, process_set: ProcessSet) -> float:
    """Return the factor of the gradient of a reduce-scatter.

    Horovod's gradient is the mathematical one times the number of ranks.
    """
    factor = prescale * postscale
    if mathematical:
        return factor / process_set.size() if op is Average else factor
    return factor if op is Average else factor * process_set.size()
