"""`DistributedOptimizer` for TensorFlow: optimizers of TensorFlow 1 here, those of Keras in `engine.keras`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..compression import Compression
from ..errors import EngineError
from ..frameworks.agreement import claim_name, compares, expect_agreement
from ..frameworks.options import Options
from ..frameworks.table import binding_of, framework_of
from ..process_sets import ProcessSet, global_process_set
from ..types import Adasum, Average
from .accumulation import Accumulation
from .reduction import Reduction


class _Distributed:
    """Methods that wrapping adds to an optimizer of TensorFlow 1. `_engine` is the state of one wrapping."""

    _engine: _Wrapping

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer's own; the gradients are reduced over all ranks. Collective."""
        return self._engine.reduced(super().compute_gradients(*args, **kwargs))  # type: ignore[misc]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own, once in `backward_passes_per_step` calls.

        Of an optimizer whose `compute_gradients` has never been called it reduces the gradients before.
        """
        pairs = self._engine.to_apply(list(grads_and_vars))
        apply = super().apply_gradients  # type: ignore[misc]
        return self._engine.when_due(pairs, lambda: apply(pairs, *args, **kwargs))

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of a variable: it belongs to this rank alone. The same on all ranks."""
        self._engine.reduction.register_local(var)

    def unwrap(self) -> Any:
        """Give the optimizer its own class back. Returns it."""
        kind = self._engine.kind
        del self._engine
        self.__class__ = kind
        return self


class _Wrapping:
    """The state of a wrapped optimizer."""

    def __init__(self, kind: type, options: Options, scale_local: bool) -> None:
        self.kind = kind
        number, prefix = claim_name(options)
        self.reduction = Reduction(options, scale_local, number, f"{prefix}.")
        self._accumulation: Accumulation | None = None
        if options.passes > 1:
            self._accumulation = Accumulation(options.passes, options.average_passes, options.sparse_as_dense)
        self._computes = (
            False  # whether `compute_gradients` was ever called: then it is there that gradients are reduced
        )
        if options.process_set.included() and compares():
            expect_agreement(options, {})

    def reduced(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Gradients and their variables, as `compute_gradients` gives them."""
        self._computes = True
        return self._reduced(pairs)

    def to_apply(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Gradients and their variables, as `apply_gradients` is to use them."""
        return pairs if self._computes else self._reduced(pairs)

    def when_due(self, pairs: list[tuple[Any, Any]], apply: Any) -> Any:
        """The result of `apply`, if enough passes were made for a step."""
        if self._accumulation is None:
            return apply()
        return self._accumulation.when_due([gradient for gradient, _ in pairs], apply)

    def _reduced(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
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

    An optimizer of Keras goes to `engine.keras.DistributedOptimizer`. One of TensorFlow 1 reduces in
    `compute_gradients`, which `minimize` calls: in a session, in `tf.function` and in eager mode.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer or tf.compat.v1.train.Optimizer
        Stays the same object; its class becomes a subclass of the same name.
    name : str, optional
    use_locking : bool
    device_dense, device_sparse : str
        Accepted for scripts that have them, and without effect.
    compression : optional
        `Compression.none`, `fp16`, `bf16` or `tuned`, or a compressor of one's own. See `engine.compression`.
    sparse_as_dense : bool
        Make `tf.IndexedSlices` dense and reduce them. Else they stay sparse, with `Sum` and `Average`: each rank adds
        up its own rows, and sends these.
    backward_passes_per_step : int
        So many passes are added up on this rank before a reduction; the optimizer takes a step in the last of them.
        Sparse gradients need `sparse_as_dense=True` then.
    op : Op
        `Average`, `Sum`, `Min`, `Max` or `Product`.
    gradient_predivide_factor : float
        With `Average`: divide by it before the ranks' gradients are added, and by the world size over it after.
    average_aggregated_gradients : bool
        Divide what several passes have added up by their number.
    num_groups, groups : int, list of lists of variables, optional
        In a graph gradients travel in groups, each as soon as it is there: so many groups of about equal size, or
        these. By default, groups of a few megabytes.
    process_set : ProcessSet
        Whose ranks reduce their gradients with each other. A rank that is not in it trains by itself.
    scale_local_gradients : bool
        Divide the gradients of `register_local_var` by the number of ranks, as `Average` would.

    Returns
    -------
    Optimizer
        `optimizer`, with `register_local_var(variable)`.

    Raises
    ------
    TypeError
        Not an optimizer; not a compression.
    ValueError
        Numbers that make no sense; an optimizer that is wrapped already.
    EngineError
        `op=Adasum` with an optimizer of TensorFlow 1.
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
    if isinstance(optimizer, _Distributed):
        raise ValueError(
            "this optimizer is wrapped in DistributedOptimizer already; wrap it once, or unwrap() it first"
        )
    if op == Adasum:
        raise EngineError(
            "op=Adasum combines what the ranks' steps have changed, which it does not for optimizers of TensorFlow 1: "
            "use op=Average, or DistributedGradientTape(op=Adasum), which combines gradients"
        )
    kind = type(optimizer)
    wrapping = _Wrapping(kind, Options.checked(**shared), scale_local_gradients)
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), same)
    optimizer._engine = wrapping
    return optimizer


def _of_keras(optimizer: Any, options: dict[str, Any]) -> Any:
    """`engine.keras.DistributedOptimizer`, if it is an optimizer of Keras."""
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
