"""Reduction of Keras gradients on the JAX backend, in the compiled program of `fit` and outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..frameworks.agreement import columns_of_absent, order_suffix
from ..frameworks.options import ReductionOptions
from ..jax.reduce import reduce_arrays


def reduce(
    gradients: Sequence[Any],
    names: Sequence[str],
    options: ReductionOptions,
    number: int,
    groups: Sequence[Sequence[int]] | None,
) -> list[Any]:
    """Reduce gradients over ranks, in one call of the program. Collective.

    The names are equal and in the same order on all ranks. `number` is that of the optimizer whose step this completes;
    -1: none. `groups` has no effect: XLA has all gradients before the call, and they are sent in one group.
    """
    sent = [gradient for gradient in gradients if gradient is not None]
    if absent := [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]:
        sent.append(jax.numpy.zeros((0, columns_of_absent(absent))))
    more = f" and {len(names) - 1} more{order_suffix(names)}" if len(names) > 1 else ""
    reduced = iter(reduce_arrays(sent, names[0] + more, options, number))
    return [None if gradient is None else next(reduced) for gradient in gradients]


def to_dense(gradient: Any) -> Any:
    """Return the gradient, which is always dense."""
    return gradient


def divide_gradient(gradient: Any, by: int) -> Any:
    """Return the gradient divided by a number."""
    return gradient / by


def read_value(variable: Any) -> Any:
    """Return the value of a variable as a NumPy array, even during tracing; None if its buffer was donated."""
    held = variable._value  # `value` would be the tracer of the program that is being traced
    if held is None or isinstance(held, jax.core.Tracer) or held.is_deleted():
        return None
    return np.asarray(held)
