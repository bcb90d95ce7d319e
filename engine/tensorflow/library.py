"""The library of native ops: loaded, given the engine's native call, and tried; or the reason why it cannot be used."""

from __future__ import annotations

import ctypes
from typing import Any

import tensorflow as tf

from .. import config, logs
from ..errors import EngineError
from ..native import calls, library

_OPS = ("engine_reduce", "engine_scatter", "engine_gather", "engine_exchange", "engine_place", "engine_probe")


def load() -> Any:
    """The module of TensorFlow's wrappers of the native ops, or None, with a warning that says why.

    Returns
    -------
    module or None
    """
    environ = config.environment()
    if not config.load(environ).tensorflow_native:
        logs.logger.info("collectives of engine.tensorflow are calls of Python, as ENGINE_TENSORFLOW_NATIVE says")
        return None
    try:
        return _load(library("tensorflow_op"))
    except (EngineError, OSError, tf.errors.OpError) as error:
        _warn(error)
        return None


def _load(path: str) -> Any:
    """The wrappers of the ops in the library at `path`.

    Raises
    ------
    EngineError
        This TensorFlow lacks a function of its C API.
    """
    module = tf.load_op_library(path)
    native = ctypes.CDLL(path)  # the same library, once more
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


def works(module: Any) -> bool:
    """Whether TensorFlow's callbacks are laid out as the ops have to know them; a warning says it if not.

    This starts TensorFlow's runtime, and what a program sets up, devices and threads, it has to set up before.
    """
    with tf.init_scope():
        if not tf.executing_eagerly() or int(module.engine_probe(set=0)):  # each op looks at its callback, besides
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
