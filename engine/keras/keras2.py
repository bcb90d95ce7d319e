"""Spellings of Keras 2 that scripts written for Horovod have, accepted by Keras 3 under the compatibility switch.

Each stood in Horovod's own examples: `Adam(lr=...)`, `optimizer.lr`, `optimizer.variables()`, and
`compile(experimental_run_tf_function=...)`. The classes of Keras themselves take them, since such scripts use plain
optimizers too, beside a `DistributedGradientTape`. Nothing that Keras 3 accepts means anything else afterwards.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from .optimizer import Variables


def accept_old_spellings() -> None:
    """Let the installed Keras 3 take them. A second call does nothing."""
    optimizer = next((each for each in keras.optimizers.Optimizer.__mro__ if "apply_gradients" in vars(each)), None)
    trainer = next((each for each in keras.Model.__mro__ if "compile" in vars(each)), None)
    if optimizer is None or trainer is None or hasattr(optimizer, "lr"):
        return
    optimizer.__init__ = _without(optimizer.__init__, "lr", "learning_rate")
    optimizer.lr = property(lambda self: self.learning_rate, _set_rate, doc="The learning rate, as Keras 2 called it.")
    optimizer.variables = property(_callable_variables(optimizer.variables.fget))
    trainer.compile = _without(trainer.compile, "experimental_run_tf_function")


def _set_rate(optimizer: Any, value: Any) -> None:
    optimizer.learning_rate = value


def _callable_variables(get: Any) -> Any:
    """The getter of `variables`, whose list can be called, too."""

    @functools.wraps(get)
    def variables(self: Any) -> Any:
        return Variables(get(self))

    return variables


def _without(method: Any, old: str, new: str | None = None) -> Any:
    """A method that takes an argument that it does not know any more: under another name, or for nothing."""

    @functools.wraps(method)
    def accepting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if old in kwargs:
            value = kwargs.pop(old)
            if new is not None:
                kwargs[new] = value
        return method(self, *args, **kwargs)

    return accepting
