"""Loading of models whose optimizers reduce gradients over the ranks."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from ..collectives.compression import Compression
from .optimizer import DistributedOptimizer, is_distributed


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    **options: Any,
) -> Any:
    """Load a model, compiled as it was saved, and wrap its optimizer in `DistributedOptimizer`.

    The file may have been saved with a plain optimizer, a wrapped one, or a Keras optimizer that Horovod has wrapped.
    The optimizer keeps its state, such as moments and the number of steps. The call is not collective: each rank that
    needs the saved values reads the file. Other ranks get them by `BroadcastGlobalVariablesCallback`.

    Parameters
    ----------
    filepath : path
        Same as for `keras.models.load_model`.
    custom_optimizers : iterable of type, optional
        Classes of optimizers that are not part of Keras, and not registered with it.
    custom_objects : mapping of str to object, optional
        Same as for `keras.models.load_model`.
    compression, **options
        Options of `DistributedOptimizer`.

    Returns
    -------
    keras.Model
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    objects = {**_wrapped_by_horovod(filepath), **known, **(custom_objects or {})}
    model = keras.models.load_model(filepath, custom_objects=objects)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        DistributedOptimizer(optimizer, compression=compression, **options)
    return model


def _wrapped_by_horovod(filepath: Any) -> dict[str, type]:
    """Return the Keras class of the optimizer in a `.keras` file, if the file has a wrapped one from Horovod."""
    if not os.path.isfile(filepath) or not zipfile.is_zipfile(filepath):
        return {}
    with zipfile.ZipFile(filepath) as file:
        compiled = json.loads(file.read("config.json")).get("compile_config") or {}
    saved = compiled.get("optimizer")
    if not isinstance(saved, dict) or not str(saved.get("module")).startswith("horovod."):
        return {}
    kind = getattr(keras.optimizers, str(saved.get("class_name")), None)
    return {} if kind is None else {str(saved.get("registered_name")): kind}
