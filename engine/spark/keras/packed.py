"""Pickles of Keras objects, together with their custom objects and the backend that they were made on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...text.deprecation import find_former_name
from ..saved_pickles import load_pickle


class Packed:
    """Value that contains models, optimizers or callbacks of Keras. Its pickle yields the value itself.

    If unpickling imports Keras, it selects the backend that Keras has here. `custom_objects` has classes and functions
    by their names in Keras.
    """

    def __init__(self, value: Any, custom_objects: Mapping[str, Any] | None) -> None:
        self._value = value
        self._custom_objects = dict(custom_objects or {})

    def __reduce__(self) -> tuple[Any, ...]:
        import keras
        from pyspark import cloudpickle

        return _unpickle_value, (cloudpickle.dumps(self._value), keras.backend.backend(), self._custom_objects)


def _unpickle_value(data: bytes, backend: str, custom_objects: dict[str, Any]) -> Any:
    os.environ.setdefault("KERAS_BACKEND", backend)
    import keras

    with keras.saving.custom_object_scope(custom_objects):
        return load_pickle(data)


def __getattr__(name: str) -> Any:
    return find_former_name(__name__, name, {"_opened": _unpickle_value})
