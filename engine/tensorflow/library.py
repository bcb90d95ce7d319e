"""Loading and test of the library of native ops, with a warning if it cannot be used."""

from __future__ import annotations

import ctypes
from typing import Any

import tensorflow as tf

from ..config import config
from ..errors import EngineError
from ..native import calls, find_library
from ..text import logs

_OPS = ("engine_reduce", "engine_scatter", "engine_gather", "engine_exchange", "engine_place", "engine_probe")


def load() -> Any:
    """Load the module of TensorFlow's wrappers of the native ops; on failure, log a warning and return None."""
    environ = config.read_environment()
    if not config.load(environ).tensorflow_native:
        logs.logger.info("collectives of engine.tensorflow are calls of Python, as ENGINE_TENSORFLOW_NATIVE says")
        return None
    try:
        return _load(find_library("tensorflow_op"))
    except (EngineError, OSError, tf.errors.OpError) as error:
        _warn(error)
        return None


def _load(path: str) -> Any:
    """Load the wrappers of the ops in the library at `path`.

    Raises EngineError if this TensorFlow lacks a function of its C API, or has not created a wrapper.
    """
    module = tf.load_op_library(path)
    native = ctypes.CDLL(path)  # the same library, for its C functions
    native.engine_tensorflow_reason.restype = ctypes.c_char_p
    native.engine_tensorflow_use.restype = ctypes.c_char_p
    native.engine_tensorflow_use.argtypes = [ctypes.c_void_p]
    reason = native.engine_tensorflow_reason() or native.engine_tensorflow_use(calls.address())
    if reason:
        raise EngineError(reason.decode())
    missing = [name for name in _OPS if not hasattr(module, name)]
    if missing:
        raise EngineError(f"TensorFlow has made no functions for {', '.join(missing)}")
    return module


def is_compatible(module: Any) -> bool:
    """Return whether TensorFlow's callbacks have the layout that the ops expect; log a warning if not.

    This starts TensorFlow's runtime. A program has to configure devices and threads before.
    """
    with tf.init_scope():
        if not tf.executing_eagerly() or int(module.engine_probe(set=0)):  # Each op checks its callback as well.
            return True
    _warn("its callbacks are not laid out as libstdc++'s std::function")
    return False


def _warn(reason: object) -> None:
    logs.logger.warning(
        "engine.tensorflow: native ops cannot be used with TensorFlow %s, so collectives are calls of Python, "
        "which cost more and run one after the other: %s",
        tf.__version__,
        reason,
    )
