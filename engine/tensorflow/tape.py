"""Gradient tapes whose gradients are reduced over all ranks."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from ..collectives.compression import Compression
from ..collectives.process_sets import ProcessSet, global_process_set
from ..collectives.reduce_ops import Average
from ..frameworks.optimizer import derive_class
from ..frameworks.options import ReductionOptions
from .reduction import GradientReduction

_derive_class = functools.cache(derive_class)  # a program may make a tape in each step


class _DistributedTape:
    """Methods that wrapping adds to the class of a tape. `_engine` reduces its gradients."""

    _engine: GradientReduction

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Compute gradients like the tape's own method, and reduce them over all ranks. Collective.

        Parameters
        ----------
        target, sources, output_gradients, unconnected_gradients
            Arguments of `tf.GradientTape.gradient`.
        use_generic_names : bool
            Whether to name the collectives by the positions of sources, not by their names. It is for ranks whose
            variables have different names, for example because one of them has built another model before.

        Returns
        -------
        structure of tf.Tensor, tf.IndexedSlices or None
            Reduced gradients in the structure of `sources`. A gradient that is None has to be None on all ranks.
        """
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        if not self._engine.active:
            return own
        flat = self._engine.reduce(tf.nest.flatten(own), tf.nest.flatten(sources), use_generic_names)
        return tf.nest.pack_sequence_as(sources, flat)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the Jacobian of this rank like the tape's own method; its gradients are not reduced."""
        with self._engine.pause():
            return super().jacobian(*args, **kwargs)  # type: ignore[misc]

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the batch Jacobian of this rank like the tape's own method; its gradients are not reduced."""
        with self._engine.pause():
            return super().batch_jacobian(*args, **kwargs)  # type: ignore[misc]

    def register_local_source(self, source: Any) -> None:
        """Exclude the gradient of a variable from reductions, as local to this rank. The same on all ranks."""
        self._engine.register_local(source)


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a tape reduce its gradients over all ranks.

    Every call compares the properties that must be equal on all ranks: the variables, their dtypes and shapes, the
    operation, its factors and the compression.

    Parameters
    ----------
    gradtape : tf.GradientTape
        Tape to wrap, before or after it has recorded. It stays the same object; its class becomes a subclass of the
        same name.
    device_dense, device_sparse : str
        Accepted for existing scripts, and without effect.
    compression : optional
        `Compression.none`, `fp16`, `bf16`, `fp8`, `tuned` or `tuned8`, or a compressor of one's own. See
        `engine.Compressor`.
    sparse_as_dense : bool
        Whether to convert `tf.IndexedSlices` to dense tensors before their reduction. Otherwise they stay sparse, with
        `Sum` and `Average`: each rank adds up its own rows, and sends these.
    op : Op
        `Average`, `Sum`, `Min`, `Max`, `Product`, or `Adasum` of the gradients.
    gradient_predivide_factor : float
        Divisor of the ranks' gradients before they are added, with `Average`; the sum is divided by the world size over
        this factor.
    num_groups, groups : int, list of lists of variables, optional
        Number of groups of about equal size, or lists of variables, in which gradients are sent inside `tf.function`.
        A group is sent as soon as it is complete. By default, groups have a few megabytes.
    process_set : ProcessSet
        Process set whose ranks reduce their gradients with each other. A rank that is not in it trains by itself.
    scale_local_gradients : bool
        Whether to divide the gradients of `register_local_source` by the number of ranks, as `Average` would.

    Returns
    -------
    tf.GradientTape
        `gradtape`, whose `gradient` is collective. Its `jacobian` and `batch_jacobian` are those of this rank alone.

    Raises
    ------
    TypeError
        `gradtape` is not a tape, or `compression` is not a compression.
    ValueError
        A number is out of range, or the tape is wrapped already.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"expected a tf.GradientTape, not {type(gradtape).__qualname__}")
    if isinstance(gradtape, _DistributedTape):
        raise ValueError("this tape is wrapped in DistributedGradientTape already: wrap it once")
    options = ReductionOptions.from_arguments(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
    )
    reduction = GradientReduction(options, scale_local_gradients)
    kind: Any = type(gradtape)
    gradtape.__class__ = _derive_class(_DistributedTape, kind)
    gradtape._engine = reduction
    return gradtape


@tf.autograph.experimental.do_not_convert
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a tape reduce its gradients, except those of local layers. See `DistributedGradientTape`.

    Parameters
    ----------
    local_layers : keras layer, or iterable of them, optional
        Layers whose `trainable_weights` each rank trains by itself; equal on all ranks.
    scale_local_gradients : bool
        Whether to divide their gradients by the number of ranks, as `Average` would, so that a batch has the same
        weight for all layers.

    Raises
    ------
    TypeError
        Same as for `DistributedGradientTape`; or a local layer has no `trainable_weights`.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in trainable_weights(local_layers):
        tape.register_local_source(variable)
    return tape


def trainable_weights(layers: Any) -> list[Any]:
    """Return the trainable variables of a layer, or of several."""
    if layers is None:
        return []
    found = []
    for layer in [layers] if hasattr(layers, "trainable_weights") else layers:
        if not hasattr(layer, "trainable_weights"):
            raise TypeError(
                f"local_layers has a {type(layer).__qualname__}, which is no layer: it has no trainable_weights"
            )
        found += layer.trainable_weights
    return found
