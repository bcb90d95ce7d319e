"""Transformation of optax that reduces gradients over ranks, in one grouped call for all arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax import numpy as jnp

from ..collectives.compression import Compression, Scheme
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Adasum, Average
from ..frameworks.agreement import Pairing, claim_name, order_suffix
from ..frameworks.options import ReductionOptions
from .adapter import JaxAdapter as _JaxAdapter  # noqa: F401  (registers jax.Array)
from .outermost import expect_outermost
from .reduce import reduce_arrays
from .state import flatten_tree, path_names

_REDUCES = "engine_reduces"  # marks the `update` of optimizers that `distributed` has wrapped


class DistributedState(NamedTuple):
    """State of `distributed` with an optimizer and `every` above 1."""

    passes: Any  # number of gradients accumulated since the last step, int32
    total: Any  # sum of these gradients on this rank, a pytree
    optimizer: Any  # state of the optimizer


def distributed(
    optimizer: optax.GradientTransformation | None = None,
    *,
    op: int = Average,
    every: int = 1,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that reduces gradients over all ranks, in one grouped call.

    Without an optimizer it has to be the first of a chain, `optax.chain(engine.jax.distributed(), optax.adam(1e-3))`.
    With an optimizer it is that chain. It has to enclose all transformations that use gradients, such as
    `distributed(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))`.

    Every rank makes its transformations in the same order, and calls `update` equally often. It works inside and
    outside of `jit`. In the first `update`, even while a program is traced, the ranks compare their options, and the
    arrays by their paths.

    Parameters
    ----------
    optimizer : optax.GradientTransformation, optional
        Transformation that gets the reduced gradients. With `op=Adasum` it gets this rank's own gradients, and its
        updates are combined.
    op : Op
        `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`.
    every : int
        Number of gradients that a rank accumulates before a reduction and a step of `optimizer`, which is required if
        it is above 1. In between, the updates are zeros, and the state of `optimizer` does not change.
    compression : optional
        `Compression.none`, `fp16`, `bf16`, `fp8`, `tuned` or `tuned8`, or a compressor of one's own. See
        `engine.Compressor`.
    process_set : ProcessSet
        Process set whose ranks reduce with each other. On other ranks gradients are unchanged.
    prescale_factor, postscale_factor : float
        Factors for the gradients, and for the result.
    gradient_predivide_factor : float
        Divisor of the gradients before they are added, with `op=Average`; the sum is divided by the number of ranks
        over this factor.
    average_aggregated_gradients : bool
        Whether to divide the sum of `every` gradients by their number, as `optax.MultiSteps` does.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Transformation whose `update` raises the errors of `engine.jax.grouped_allreduce`; `MismatchError` if the ranks'
        options or trees differ; `ValueError` if it follows another transformation in a chain of optax, or is called
        under a condition by an outer one.

    Raises
    ------
    ValueError
        An option is invalid, or contradicts another one.

    Examples
    --------
    >>> optimizer = engine.jax.distributed(optax.adam(1e-3))
    >>> state = optimizer.init(parameters)
    >>> updates, state = optimizer.update(gradients, state, parameters)
    >>> parameters = optax.apply_updates(parameters, updates)
    """
    options = ReductionOptions.from_arguments(
        op=op,
        backward_passes_per_step=every,
        compression=compression,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        gradient_predivide_factor=gradient_predivide_factor,
    )
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"engine.jax reduces for transformations of optax, such as optax.adam(1e-3), and was given a "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}: engine.DistributedOptimizer takes those of "
            "every framework"
        )
    if optimizer is not None and hasattr(optimizer.update, _REDUCES):
        raise ValueError("this optimizer reduces gradients already: give distributed the plain one, once")
    if isinstance(compression, Scheme):
        raise ValueError(
            f"{type(compression).__name__} is not for JAX; use Compression.fp16, bf16, fp8, tuned or tuned8"
        )
    if optimizer is None:
        if every != 1:
            raise ValueError(
                "every needs the optimizer: engine.jax.distributed(optax.adam(1e-3), every=4). What follows in a chain "
                "would take a step for each of the gradients in between"
            )
        return optax.with_extra_args_support(
            _make_reducing(options) if op == Adasum else _guard_position(_make_reducing(options))
        )
    stages = [_make_reducing(options), optimizer]
    if op == Adasum:
        stages.reverse()
    stepping = optax.with_extra_args_support(optax.chain(*stages))
    made = _guard_position(
        stepping if every == 1 else _make_accumulating(stepping, every, average_aggregated_gradients)
    )
    setattr(made.update, _REDUCES, True)
    return made


def DistributedOptimizer(
    optimizer: optax.GradientTransformation, *, backward_passes_per_step: int = 1, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Call `distributed`, under the name of the other bindings; `backward_passes_per_step` is its `every`.

    Raises
    ------
    ValueError
        Same as for `distributed`.
    """
    return distributed(optimizer, every=backward_passes_per_step, **options)


def _guard_position(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation so that it refuses positions where its input or its calls would differ by rank."""
    supported = optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        expect_outermost()
        changed: tuple[Any, Any] = supported.update(updates, state, params, **extra)
        return changed

    return optax.GradientTransformationExtraArgs(supported.init, update)


def _make_reducing(options: ReductionOptions) -> optax.GradientTransformation:
    """Make a transformation without state that reduces all arrays of a tree in one call."""
    number, prefix = claim_name(options)
    pairing = Pairing(options)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not options.process_set.included():
            return updates, state  # This rank trains by itself.
        paths, leaves, tree = flatten_tree(updates)
        names = path_names(paths)
        order = pairing.agree_on_order(names, lambda: dict(zip(names, map(_describe, leaves), strict=True)))
        sent = [k for k in order if leaves[k].dtype != jax.dtypes.float0]
        if sent:
            name = _name(prefix, [names[k] for k in sent])
            for k, result in zip(sent, reduce_arrays([leaves[k] for k in sent], name, options, number), strict=True):
                leaves[k] = result
        return jax.tree_util.tree_unflatten(tree, leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _describe(leaf: Any) -> tuple[str, int]:
    return f"{leaf.dtype.name}{list(leaf.shape)}", 0


def _name(prefix: str, names: Sequence[str]) -> str:
    """Return the name of a step's call, from the path of its first array and the number of other arrays."""
    more = f" +{len(names) - 1}{order_suffix(names)}" if len(names) > 1 else ""
    return f"{prefix}{'.' if names[0] else ''}{names[0]}{more}"


def _make_accumulating(stepping: Any, every: int, average: bool) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that accumulates `every` gradients, and passes their sum or average to `stepping`."""

    def init(params: Any) -> DistributedState:
        return DistributedState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), stepping.init(params))

    def update(updates: Any, state: DistributedState, params: Any = None, **extra: Any) -> tuple[Any, DistributedState]:
        total = jax.tree.map(jnp.add, state.total, updates)

        def step() -> tuple[Any, DistributedState]:
            given = jax.tree.map(lambda each: each / every, total) if average else total
            changes, optimizer = stepping.update(given, state.optimizer, params, **extra)
            return changes, DistributedState(
                jnp.zeros_like(state.passes), jax.tree.map(jnp.zeros_like, total), optimizer
            )

        def wait() -> tuple[Any, DistributedState]:
            shapes, _ = jax.eval_shape(step)
            nothing = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
            return nothing, DistributedState(state.passes + 1, total, state.optimizer)

        done: tuple[Any, DistributedState] = jax.lax.cond(state.passes == every - 1, step, wait)
        return done

    return optax.GradientTransformationExtraArgs(init, update)
