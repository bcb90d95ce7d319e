"""The names of `horovod.tensorflow.util`, which `horovod.tensorflow` shows, too."""

from __future__ import annotations

from .util import gpu_available

__all__ = ["gpu_available"]


def _executing_eagerly() -> bool:
    """Whether TensorFlow runs operations as they are called."""
    import tensorflow as tf

    return bool(tf.executing_eagerly())
