"""`DistributedOptimizer` for TensorFlow: optimizers of TensorFlow 1 here, those of Keras in `engine.keras`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..collectives.bindings import binding_of, framework_of
from ..collectives.compression import Compression
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Adasum, Average
from ..errors import EngineError
from ..frameworks.agreement import claim_name, compares_gradients, expect_agreement
from ..frameworks.optimizer import derive_class, expect_unwrapped
from ..frameworks.options import ReductionOptions
from .accumulation import Accumulation
from .reduction import GradientReduction


class _DistributedV1Optimizer:
    """Methods that wrapping adds to an optimizer of TensorFlow 1. `_engine` is the state of one wrapping."""

    _engine: _V1Wrapping

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients like the optimizer's own method, and reduce them over all ranks. Collective."""
        return self._engine.reduce_computed(super().compute_gradients(*args, **kwargs))  # type: ignore[misc]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients like the optimizer's own method, once in `backward_passes_per_step` calls.

        It reduces the gradients first if `compute_gradients` was never called.
        """
        pairs = self._engine.to_apply(list(grads_and_vars))
        apply = super().apply_gradients  # type: ignore[misc]
        return self._engine.when_due(pairs, lambda: apply(pairs, *args, **kwargs))

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of a variable from reductions, as local to this rank. The same on all ranks."""
        self._engine.reduction.register_local(var)

    def unwrap(self) -> Any:
        """Restore the optimizer's own class. Returns the optimizer."""
        kind = self._engine.kind
        del self._engine
        self.__class__ = kind
        return self


class _V1Wrapping:
    """State of a wrapped optimizer."""

    def __init__(self, kind: type, options: ReductionOptions, scale_local: bool) -> None:
        self.kind = kind
        number, prefix = claim_name(options)
        self.reduction = GradientReduction(options, scale_local, number, f"{prefix}.")
        self._accumulation: Accumulation | None = None
        if options.passes > 1:
            self._accumulation = Accumulation(options.passes, options.average_passes, options.sparse_as_dense)
        self._computes = (
            False  # whether `compute_gradients` was ever called, in which case it is the one that reduces gradients
        )
        if options.process_set.included() and compares_gradients():
            expect_agreement(options, {})

    def reduce_computed(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Reduce gradients for `compute_gradients`; return them with their variables."""
        self._computes = True
        return self._reduce_pairs(pairs)

    def to_apply(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Return gradients and variables for `apply_gradients`, after reducing those that were not reduced before."""
        return pairs if self._computes else self._reduce_pairs(pairs)

    def when_due(self, pairs: list[tuple[Any, Any]], apply: Any) -> Any:
        """Call `apply` if enough passes were made for a step, and return its result."""
        if self._accumulation is None:
            return apply()
        return self._accumulation.when_due([gradient for gradient, _ in pairs], apply)

    def _reduce_pairs(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if self._accumulation is None:
            return list(zip(self.reduction.reduce(gradients, variables), variables, strict=True))
        present = [variable for gradient, variable in pairs if gradient is not None]
        added = self._accumulation.add(gradients, variables, lambda sums: self.reduction.reduce(sums, present))
        return list(zip(added, variables, strict=True))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer reduce its gradients over all ranks. Collective.

    An optimizer of Keras is passed to `engine.keras.DistributedOptimizer`. One of TensorFlow 1 reduces in
    `compute_gradients`, which `minimize` calls: in a session, in `tf.function` and in eager mode.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer or tf.compat.v1.train.Optimizer
        Optimizer to wrap. It stays the same object; its class becomes a subclass of the same name.
    name : str, optional
    use_locking : bool
    device_dense, device_sparse : str
        Accepted for existing scripts, and without effect.
    compression : optional
        `Compression.none`, `fp16`, `bf16`, `fp8`, `tuned` or `tuned8`, or a compressor of one's own. See
        `engine.Compressor`.
    sparse_as_dense : bool
        Whether to convert `tf.IndexedSlices` to dense tensors before their reduction. Otherwise they stay sparse, with
        `Sum` and `Average`: each rank adds up its own rows, and sends these.
    backward_passes_per_step : int
        Number of passes that this rank accumulates before a reduction; the optimizer takes a step in the last of them.
        Sparse gradients then need `sparse_as_dense=True`.
    op : Op
        `Average`, `Sum`, `Min`, `Max` or `Product`.
    gradient_predivide_factor : float
        Divisor of the ranks' gradients before they are added, with `Average`; the sum is divided by the world size over
        this factor.
    average_aggregated_gradients : bool
        Whether to divide accumulated gradients by the number of passes.
    num_groups, groups : int, list of lists of variables, optional
        Number of groups of about equal size, or lists of variables, in which gradients are sent in a graph. A group is
        sent as soon as it is complete. By default, groups have a few megabytes.
    process_set : ProcessSet
        Process set whose ranks reduce their gradients with each other. A rank that is not in it trains by itself.
    scale_local_gradients : bool
        Whether to divide the gradients of `register_local_var` by the number of ranks, as `Average` would.

    Returns
    -------
    Optimizer
        `optimizer`, with `register_local_var(variable)`.

    Raises
    ------
    TypeError
        `optimizer` is not an optimizer, or `compression` is not a compression.
    ValueError
        A number is out of range, or the optimizer is wrapped already.
    EngineError
        `op` is Adasum with an optimizer of TensorFlow 1.
    MismatchError
        The ranks give different options.
    """
    shared = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "average_aggregated_gradients": average_aggregated_gradients,
        "num_groups": num_groups,
        "groups": groups,
        "process_set": process_set,
    }
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _of_keras(optimizer, shared | {"scale_local_gradients": scale_local_gradients})
    expect_unwrapped(optimizer, _DistributedV1Optimizer)
    if op == Adasum:
        raise EngineError(
            "op=Adasum combines what the ranks' steps have changed, which it does not for optimizers of TensorFlow 1: "
            "use op=Average, or DistributedGradientTape(op=Adasum), which combines gradients"
        )
    kind = type(optimizer)
    wrapping = _V1Wrapping(kind, ReductionOptions.from_arguments(**shared), scale_local_gradients)
    optimizer.__class__ = derive_class(_DistributedV1Optimizer, kind)
    optimizer._engine = wrapping
    return optimizer


def _of_keras(optimizer: Any, options: dict[str, Any]) -> Any:
    """Call `engine.keras.DistributedOptimizer` for an optimizer of Keras; raise TypeError for others."""
    framework = framework_of(optimizer)
    if framework is not None and framework.package == "keras":
        return binding_of(framework).DistributedOptimizer(optimizer, **options)
    if type(optimizer).__module__.startswith("tf_keras."):
        raise TypeError(
            f"{type(optimizer).__qualname__} is an optimizer of tf_keras, Keras 2: engine.keras has Keras 3 alone. "
            "Unset TF_USE_LEGACY_KERAS, or use DistributedGradientTape in a training loop"
        )
    raise TypeError(
        "expected a keras.optimizers.Optimizer or a tf.compat.v1.train.Optimizer, not "
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    )
