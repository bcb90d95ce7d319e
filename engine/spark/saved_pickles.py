"""Pickles of models, estimators and stores, also those in which revisions before 0.1 name modules that have moved."""

from __future__ import annotations

import io
import pickle
from typing import Any

from ..text.deprecation import warn_former_file

_MOVED = {
    "engine.compression": "engine.collectives.compression",
    "engine.process_sets": "engine.collectives.process_sets",
    "engine.types": "engine.collectives.reduce_ops",
}


class _SavedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _MOVED:
            warn_former_file(f"{module}.{name}", stacklevel=3)
        return super().find_class(_MOVED.get(module, module), name)


def load_pickle(data: bytes) -> Any:
    """Return the object of a pickle. That runs code, so only trusted users may have written it."""
    return _SavedUnpickler(io.BytesIO(data)).load()
