"""`DistributedOptimizer` for Keras 3, which makes an existing optimizer reduce its gradients over all ranks.

The optimizer stays the same object; its class becomes a subclass whose `apply` reduces first. So clipping, the overflow
check of a loss scale, weight decay and moving averages see the same gradients on all ranks. On the JAX backend
`stateless_apply` reduces, too, since that of `LossScaleOptimizer` does not call `apply`. The flag `inside` prevents a
second reduction.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras

from ..collectives.compression import Compression
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Average
from ..frameworks.optimizer import derive_class
from ..text import logs
from .wrapping import KerasWrapping

_CLASS: Any = object.__dict__["__class__"]  # sets an object's class, even if the class overrides `__class__`
_DEPTH = 16  # number of stack frames that are searched for a LossScaleOptimizer


class Variables(list[Any]):
    """List that can be called, like the variables of an optimizer in Keras 2: `optimizer.variables()`."""

    def __call__(self) -> list[Any]:
        return self


# `_DistributedKerasOptimizer` precedes an optimizer's class in the bases, which has the other methods.
_Optimizer: Any = object


class _DistributedKerasOptimizer(_Optimizer):
    """Methods that wrapping adds to the class of an optimizer of Keras."""

    _engine: KerasWrapping
    built: bool

    def build(self, variables: Any) -> None:
        """Build the optimizer, and the variables for the sums of several passes."""
        super().build(variables)
        self._engine.passes.create_variables(variables)

    @property
    def variables(self) -> list[Any]:
        """Variables of the optimizer, followed by those for the sums of several passes. The list can be called."""
        own: list[Any] = super().variables
        return Variables(own if self._engine.inside else own + self._engine.passes.variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce gradients over the ranks, and apply them like the optimizer's own method. Collective."""
        engine: KerasWrapping = self._engine
        own: Any = super()
        if engine.inside or not len(grads):
            own.apply(grads, trainable_variables)
            return
        variables = self._resolve_trained(trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(f"apply() was given {len(grads)} gradients for {len(variables)} variables")

        def step(gradients: Sequence[Any]) -> None:
            reduced = engine.reduce(gradients, variables)
            with engine.enter_optimizer():
                own.apply(reduced, trainable_variables)

        _expect_outermost(self, engine)
        engine.passes.add_pass(list(grads), variables, step)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Reduce gradients over the ranks, and apply them like the optimizer's own method. Collective."""
        engine: KerasWrapping = self._engine
        own: Any = super()
        if engine.inside:
            return own.stateless_apply(optimizer_variables, grads, trainable_variables)

        def step(state: Sequence[Any], gradients: Sequence[Any]) -> Any:
            reduced = engine.reduce(gradients, self._trainable_variables)
            with engine.enter_optimizer():
                return own.stateless_apply(state, reduced, trainable_variables)

        _expect_outermost(self, engine)
        return engine.passes.stateless_add_pass(list(optimizer_variables), list(grads), list(trainable_variables), step)

    def save_own_variables(self, store: Any) -> None:
        """Save the variables of the optimizer without those of the wrapping."""
        with self._engine.enter_optimizer():
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the variables of the optimizer without those of the wrapping."""
        with self._engine.enter_optimizer():
            super().load_own_variables(store)

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a plain optimizer from a configuration."""
        plain: Any = cls.__mro__[2]
        return plain.from_config(config, *args, **kwargs)

    def __reduce__(self) -> Any:
        # A copied or unpickled optimizer is a plain one.
        load, arguments = super().__reduce__()
        return getattr(self._engine.kind, load.__name__), arguments

    def register_local_var(self, variable: Any) -> None:
        """Exclude the gradients of a variable from reductions, as local to this rank. The same on all ranks."""
        self._engine.local.add(variable)

    def unwrap(self) -> Any:
        """Restore the optimizer's own class. Returns the optimizer."""
        _CLASS.__set__(self, self._engine.kind)
        object.__delattr__(self, "_engine")
        return self

    def _resolve_trained(self, variables: Any) -> list[Any]:
        """Return the trained variables, after building the optimizer if necessary."""
        if variables is None:
            return list(self._trainable_variables)
        variables = list(variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
            self.built = True
        return variables


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    check_parameters: bool = True,
) -> Any:
    """Make an optimizer of Keras reduce gradients over all ranks, on the backend that Keras uses.

    It is for `compile` and `fit`, `train_on_batch`, a `train_step` or a custom loop. Gradients are reduced at the
    beginning of `apply` (`stateless_apply` on JAX), which is collective. In the first call the ranks compare their
    options and variables.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        Optimizer to wrap. It stays the same object, with its schedule and variables. A model with it is saved with the
        plain optimizer, and loads without the engine; `engine.keras.load_model` wraps it again. A `LossScaleOptimizer`
        itself is wrapped, not its inner optimizer.
    name, device_dense, device_sparse : optional
        Accepted for existing scripts, and without effect.
    compression : optional
        `Compression.none`, `fp16`, `bf16`, `fp8`, `tuned` or `tuned8`.
    sparse_as_dense : bool
        Whether to convert `tf.IndexedSlices` to dense tensors before their reduction. Otherwise they stay sparse, and
        their rows are gathered.
    gradient_predivide_factor : float
        Divisor of the ranks' gradients before they are added, with `Average`; the sum is divided by the world size over
        this factor.
    op : Op
        `Average`, `Sum`, `Min`, `Max` or `Product`.
    backward_passes_per_step : int
        Number of batches that this rank accumulates before a reduction; only then the optimizer takes a step and counts
        an iteration. This takes as much memory as the model.
    average_aggregated_gradients : bool
        Whether to divide the sum of several passes by their number.
    num_groups, groups : optional
        Number of groups, or lists of variables, whose gradients are sent together, if the backend allows a choice. By
        default, groups by size.
    process_set : ProcessSet
        Process set whose ranks reduce their gradients with each other. A rank that is not in it trains by itself.
    scale_local_gradients : bool
        Whether to divide the gradients of local variables, which are not reduced, by the number of ranks.
    prescale_factor, postscale_factor : float
        Factors for the local gradients, and for the result.
    check_parameters : bool
        Whether to compare the ranks' variables before the first step, and log a warning if they differ, as after a
        forgotten `BroadcastGlobalVariablesCallback`.

    Returns
    -------
    keras.optimizers.Optimizer
        `optimizer`, with `register_local_var(variable)` and `unwrap()`. A copy or a pickle of it is a plain optimizer.

    Raises
    ------
    TypeError
        `optimizer` is not an optimizer of Keras, or `compression` is not a compression.
    ValueError
        A number is out of range, `op` is Adasum, or the optimizer or its inner one is wrapped already.
    MismatchError
        The ranks' options differ, or the names, dtypes or shapes of their variables, or the set of those with a
        gradient; raised in the first step.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        hint = ": call keras.optimizers.get() for it" if isinstance(optimizer, str | dict) else ""
        raise TypeError(f"expected a keras.optimizers.Optimizer, not {type(optimizer).__qualname__}{hint}")
    for each in (optimizer, *_find_inner_optimizers(optimizer)):
        if isinstance(each, _DistributedKerasOptimizer):
            place = (
                "this optimizer is"
                if each is optimizer
                else f"the optimizer inside of this {_name_class(optimizer)} is"
            )
            raise ValueError(
                f"{place} wrapped in DistributedOptimizer already; wrap the outermost once, or unwrap() that one first"
            )
    wrapping = KerasWrapping(
        optimizer,
        scale_local_gradients=scale_local_gradients,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        check_parameters=check_parameters,
    )
    _advise_on_accumulation(optimizer)
    if optimizer.built:
        wrapping.passes.create_variables(optimizer._trainable_variables)
    kind = type(optimizer)
    # `__class__` is the plain class, since Keras writes its name to files.
    told = property(lambda self: self._engine.kind, _CLASS.__set__)
    object.__setattr__(optimizer, "_engine", wrapping)  # bypasses Keras, which would track it
    _CLASS.__set__(optimizer, derive_class(_DistributedKerasOptimizer, kind, {"__class__": told}))
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> Any:
    """Make an optimizer reduce gradients, except those of local layers. See `DistributedOptimizer`.

    Parameters
    ----------
    local_layers : keras.layers.Layer, or iterable of them, optional
        Layers that each rank trains by itself; equal on all ranks. Their gradients are not reduced. With
        `scale_local_gradients` they are divided by the number of ranks, as if the other ranks had zeros.
    **options
        Other options of `DistributedOptimizer`.

    Raises
    ------
    TypeError
        An entry of `local_layers` is not a layer.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise TypeError(f"local_layers has a {type(layer).__qualname__}; expected layers of Keras")
    wrapped = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        **options,
    )
    wrapped._engine.local.layers += layers
    return wrapped


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer is wrapped in `DistributedOptimizer`."""
    return isinstance(optimizer, _DistributedKerasOptimizer)


def _find_inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the inner optimizers, to which an optimizer passes its gradients."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [*([] if inner is None else [inner]), *getattr(optimizer, "_inner_optimizers", ())]


def _name_class(optimizer: Any) -> str:
    return type(optimizer).__name__


def _expect_outermost(optimizer: Any, engine: KerasWrapping) -> None:
    """Raise ValueError, in the first step, if an optimizer gets its gradients from another one.

    A `LossScaleOptimizer` calls its inner optimizer only if no gradient of this rank has overflowed. Otherwise the
    other ranks would wait for this one.
    """
    if engine.begun:
        return
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.optimizers.Optimizer) and any(
            each is optimizer for each in _find_inner_optimizers(caller)
        ):
            kind = _name_class(caller)
            raise ValueError(
                f"the optimizer inside of {kind} is wrapped in DistributedOptimizer, and would reduce only "
                f"what {kind} hands on, which need not be the same on all ranks. Wrap from outside: "
                f"DistributedOptimizer(keras.optimizers.{kind}(...)). With the policy mixed_float16 compile() "
                "puts a LossScaleOptimizer around any other optimizer: give it a LossScaleOptimizer that is wrapped, "
                "or auto_scale_loss=False"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


def _advise_on_accumulation(optimizer: Any) -> None:
    """Warn if Keras accumulates gradients after the reduction, which then takes place for every batch."""
    for each in (optimizer, *_find_inner_optimizers(optimizer)):
        if steps := getattr(each, "gradient_accumulation_steps", None):
            logs.logger.warning(
                "%s(gradient_accumulation_steps=%d) adds up gradients that have been reduced over the ranks: right, "
                "but with %d reductions for a step. DistributedOptimizer(backward_passes_per_step=%d, "
                "average_aggregated_gradients=True) in place of it needs one",
                _name_class(each),
                steps,
                steps,
                steps,
            )
            return
