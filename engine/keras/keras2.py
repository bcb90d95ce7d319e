"""Spellings of Keras 2 in scripts for Horovod, which Keras 3 accepts under the compatibility switch.

All occur in Horovod's own examples: `Adam(lr=...)`, `optimizer.lr`, `optimizer.variables()`, and
`compile(experimental_run_tf_function=...)`. The classes of Keras themselves are patched, since such scripts also use
plain optimizers with a `DistributedGradientTape`. The meaning of valid Keras 3 code does not change.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from .optimizer import Variables


def accept_old_spellings() -> None:
    """Patch the installed Keras 3 to accept the old spellings. A second call does nothing."""
    optimizer = next((each for each in keras.optimizers.Optimizer.__mro__ if "apply_gradients" in vars(each)), None)
    trainer = next((each for each in keras.Model.__mro__ if "compile" in vars(each)), None)
    if optimizer is None or trainer is None or hasattr(optimizer, "lr"):
        return
    optimizer.__init__ = _accept_old_argument(optimizer.__init__, "lr", "learning_rate")
    optimizer.lr = property(lambda self: self.learning_rate, _set_rate, doc="The learning rate, as Keras 2 called it.")
    optimizer.variables = property(_callable_variables(optimizer.variables.fget))
    trainer.compile = _accept_old_argument(trainer.compile, "experimental_run_tf_function")


def _set_rate(optimizer: Any, value: Any) -> None:
    optimizer.learning_rate = value


def _callable_variables(get: Any) -> Any:
    """Wrap the getter of `variables` so that the list can also be called."""

    @functools.wraps(get)
    def get_variables(self: Any) -> Any:
        return Variables(get(self))

    return get_variables


def _accept_old_argument(method: Any, old: str, new: str | None = None) -> Any:
    """Wrap a method so that it accepts an old argument, which is passed under a new name or ignored."""

    @functools.wraps(method)
    def call_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if old in kwargs:
            value = kwargs.pop(old)
            if new is not None:
                kwargs[new] = value
        return method(self, *args, **kwargs)

    return call_method
