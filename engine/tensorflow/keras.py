"""Alias of `engine.keras` under Horovod's name: `import engine.tensorflow.keras as hvd`."""

from __future__ import annotations

import sys

from .. import keras
from ..keras import *  # noqa: F403
from ..keras import callbacks, elastic

__all__ = keras.__all__

# For `from engine.tensorflow.keras.callbacks import ...`, as if this were a package.
sys.modules[f"{__name__}.elastic"] = elastic
sys.modules[f"{__name__}.callbacks"] = callbacks
