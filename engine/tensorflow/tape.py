"""Gradient tapes whose gradients are reduced over all ranks."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from ..compression import Compression
from ..frameworks.options import Options
from ..process_sets import ProcessSet, global_process_set
from ..types import Average
from .reduction import Reduction


class _Distributed:
    """Methods that wrapping adds to the class of a tape. `_engine` is how its gradients are reduced."""

    _engine: Reduction

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """As the tape's own; the gradients are reduced over all ranks. Collective.

        Parameters
        ----------
        target, sources, output_gradients, unconnected_gradients
            As of `tf.GradientTape.gradient`.
        use_generic_names : bool
            Call the collectives by the place of a source among `sources`, not by its name: for ranks whose variables
            have different names, as when one of them has built another model before.

        Returns
        -------
        structure of tf.Tensor, tf.IndexedSlices or None
            Of the structure of `sources`. None where no gradient flows: it has to be None on all ranks.
        """
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        if not self._engine.active:
            return own
        flat = self._engine.reduce(tf.nest.flatten(own), tf.nest.flatten(sources), use_generic_names)
        return tf.nest.pack_sequence_as(sources, flat)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As the tape's own: of this rank. It is made of many gradients, which are not reduced."""
        with self._engine.paused():
            return super().jacobian(*args, **kwargs)  # type: ignore[misc]

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As the tape's own: of this rank."""
        with self._engine.paused():
            return super().batch_jacobian(*args, **kwargs)  # type: ignore[misc]

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of a variable: it belongs to this rank alone. The same on all ranks."""
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
    """Make a tape reduce the gradients that it gives over all ranks.

    What the ranks have to have in common is compared in every call: which variables there are, their dtypes and shapes,
    the operation, its factors, the compression.

    Parameters
    ----------
    gradtape : tf.GradientTape
        Stays the same object; its class becomes a subclass of the same name. It may record before or after.
    device_dense, device_sparse : str
        Accepted for scripts that have them, and without effect.
    compression : optional
        `Compression.none`, `fp16`, `bf16` or `tuned`, or a compressor of one's own. See `engine.compression`.
    sparse_as_dense : bool
        Make `tf.IndexedSlices` dense and reduce them. Else they stay sparse, with `Sum` and `Average`: each rank adds
        up its own rows, and sends these.
    op : Op
        `Average`, `Sum`, `Min`, `Max`, `Product`, or `Adasum` of the gradients.
    gradient_predivide_factor : float
        With `Average`: divide by it before the ranks' gradients are added, and by the world size over it after.
    num_groups, groups : int, list of lists of variables, optional
        Inside `tf.function` gradients travel in groups, each as soon as it is there: so many groups of about equal
        size, or these. By default, groups of a few megabytes.
    process_set : ProcessSet
        Whose ranks reduce their gradients with each other. A rank that is not in it trains by itself.
    scale_local_gradients : bool
        Divide the gradients of `register_local_source` by the number of ranks, as `Average` would.

    Returns
    -------
    tf.GradientTape
        `gradtape`, whose `gradient` is collective. Its `jacobian` and `batch_jacobian` are of this rank alone.

    Raises
    ------
    TypeError
        Not a tape; not a compression.
    ValueError
        Numbers that make no sense; a tape that is wrapped already.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"expected a tf.GradientTape, not {type(gradtape).__qualname__}")
    if isinstance(gradtape, _Distributed):
        raise ValueError("this tape is wrapped in DistributedGradientTape already: wrap it once")
    options = Options.checked(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
    )
    reduction = Reduction(options, scale_local_gradients)
    kind: Any = type(gradtape)
    gradtape.__class__ = _distributed(kind)
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
    """As `DistributedGradientTape`, but that the gradients of some layers stay with their rank.

    Parameters
    ----------
    local_layers : keras layer, or iterable of them, optional
        Layers that each rank trains by itself; equal on all ranks. What counts are their `trainable_weights`.
    scale_local_gradients : bool
        Divide their gradients by the number of ranks, as `Average` would: a batch counts for them what it counts for
        the other layers.

    Raises
    ------
    TypeError
        Also for a local layer without `trainable_weights`.
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
    """The trainable variables of a layer, or of several."""
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


@functools.cache
def _distributed(kind: Any) -> type:
    """The subclass of a class of tapes that reduces."""
    same = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Distributed, kind), same)
