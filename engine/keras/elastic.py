"""Elastic training with Keras: `KerasState`, and the callbacks that update and commit it during `fit`.

A separate `fit` continues an interrupted epoch with the remaining data:

>>> while state.epoch < EPOCHS:
...     left = batches[state.batch :]
...     model.fit(left, initial_epoch=state.epoch, epochs=state.epoch + 1, callbacks=[...])
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from .. import elastic
from ..config.forms import whole_number
from ..elastic import *  # noqa: F403
from ..elastic.copies import Copy
from ..elastic.state import ObjectState, Parts, expect_alike, expect_names
from .agreement import container_of
from .names import optimizer_names, weight_names
from .optimizer import is_distributed

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]
__all__ += elastic.__all__


class KerasState(ObjectState):
    """State of a training job: a Keras model, its optimizer, and further values, on all backends.

    It has the weights, including moving statistics, and the optimizer's variables. It does not have the state of random
    generators, which differs by rank.

    Parameters
    ----------
    model : keras.Model
        Model that is built.
    optimizer : keras.optimizers.Optimizer, optional
        Optimizer of the trainable variables, by default that of the model. It is built, so that it has all its
        variables before its first step. Commits are deferred while it has accumulated only some of its passes per step.
    **values
        Values of `ObjectState`, such as `epoch=0` and `batch=0`. They may include further models and optimizers.

    Raises
    ------
    ValueError
        The model is not built, or a name is reserved by the state.
    TypeError
        A value cannot be pickled; the error names it.
    """

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        if not model.built:
            raise ValueError(
                "the model has no variables yet: call model.build(input_shape) before making a state of it"
            )
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is not None:
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            values = {"optimizer": optimizer, **values}
        super().__init__(model=model, **values)
        self.register_in_hand(self._passes_in_hand)

    def reset(self) -> None:
        """Discard compiled steps that contain the number of ranks, by which local gradients are divided."""
        for name in self._names:
            model = getattr(self, name)
            optimizer = getattr(model, "optimizer", None) if isinstance(model, keras.Model) else None
            if optimizer is not None and is_distributed(optimizer) and optimizer._engine.local.collect_ids():
                model.train_function = None

    def restore(self) -> None:
        """Restore all values, and local variables to their values at this rank's latest commit.

        On JAX, a failed step leaves variables without a value, or with one that raises the failure again.
        """
        for model in self._find_emptied_models():
            model._jax_state, model._jax_state_synced = None, True  # else Keras would write back the failed values
        super().restore()
        for variable, value in self._own:
            variable.assign(value)

    def _copy_values(self) -> Copy:
        self._bring_back()
        taken = super()._copy_values()
        own = [each for model in self._find_emptied_models() for each in _own_variables(model)]
        self._own = [(each, _array_of(each)) for each in own]
        return taken

    def _bring_back(self) -> None:
        """Write trained values back to the variables, from which `fit` removes them on JAX."""
        for model in self._find_emptied_models():
            model.jax_state_sync()

    def _find_emptied_models(self) -> list[Any]:
        """Return the models from whose variables `fit` removes the values."""
        present = [getattr(self, name) for name in self._names]
        return [each for each in present if isinstance(each, keras.Model) and hasattr(each, "jax_state_sync")]

    def _passes_in_hand(self) -> bool:
        self._bring_back()
        present = [getattr(self, name) for name in self._names]
        optimizers = [value for value in present if isinstance(value, keras.optimizers.Optimizer)]
        counts = [each._engine.passes.variables[-1:] for each in optimizers if is_distributed(each)]
        return any(int(keras.ops.convert_to_numpy(count.value)) for (*found,) in counts for count in found)

    def _extract_state(self, value: Any) -> Any:
        variables = _variables_of(value)
        if variables is None:
            return super()._extract_state(value)
        return Parts({name: (_dtype_of(each), _array_of(each)) for name, each in variables.items()})

    def _load(self, name: str, present: Any, kept: Any) -> None:
        variables = _variables_of(present)
        if variables is None:
            super()._load(name, present, kept)
            return
        expect_names(name, variables, kept, "variables")
        for each, variable in variables.items():
            dtype, array = kept[each]
            expect_alike(f"{name}: {each}", (_dtype_of(variable), variable.shape), (dtype, array.shape))
        for each, variable in variables.items():
            variable.assign(kept[each][1])


def _dtype_of(variable: Any) -> str:
    return str(keras.backend.standardize_dtype(variable.dtype))


def _array_of(variable: Any) -> Any:
    return np.asarray(keras.ops.convert_to_numpy(variable.value))


def _own_variables(model: Any) -> list[Any]:
    """Return the variables of a model that are not part of the state: those of random generators and metrics."""
    kept = {id(each) for each in model.weights}
    return [each for each in model.variables if id(each) not in kept]


def _variables_of(value: Any) -> dict[str, Any] | None:
    """Return the variables of a model or an optimizer that are part of the state, by name; None for other values."""
    if isinstance(value, keras.Model):
        return dict(zip(weight_names(value), value.weights, strict=True))
    if not isinstance(value, keras.optimizers.Optimizer):
        return None
    variables = list(value.variables)
    return dict(zip(optimizer_names(value, variables), variables, strict=True))


class _Last(keras.callbacks.Callback):
    """Base class of callbacks that run after those of other classes, whatever their order in the program.

    A commit has to include the changes of other callbacks at the end of a batch or an epoch. An interrupt by a commit
    skips all later callbacks.
    """

    order = 1

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: Any = None) -> None:
        """Sort this callback after those of other classes."""
        container = container_of()
        if container is not None:  # A running iteration continues over the old list.
            container.callbacks = sorted(container.callbacks, key=lambda each: getattr(each, "order", 0))


class CommitStateCallback(_Last):
    """Commit a state every `batches_per_commit` batches, and at the end of each epoch, after all other callbacks.

    Parameters
    ----------
    state : State
    batches_per_commit : int
    """

    order = 2

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = whole_number("batches_per_commit", batches_per_commit, 1)
        self._since = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Sort this callback after the others, and reset the count of batches."""
        super().on_train_begin(logs)
        self._since = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if it is due; the last batch of an epoch is committed with the epoch."""
        self._since += 1
        if batch + 1 == (self.params or {}).get("steps"):
            return
        if self._since >= self.batches_per_commit or self.state.owed:
            self._since = 0
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit the state."""
        self._since = 0
        self.state.commit()


class UpdateBatchStateCallback(_Last):
    """Count in `state.batch` the completed batches of the epoch, including those before an interruption.

    Keras counts the batches of a `fit` from 0. In an interrupted epoch this callback continues the count of the state.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Note the completed batches of the epoch."""
        super().on_train_begin(logs)
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Update the count of batches."""
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reset the count of batches."""
        self.state.batch = self._before = 0


class UpdateEpochStateCallback(_Last):
    """Count completed epochs in `state.epoch`.

    It supports `fit(initial_epoch=state.epoch, epochs=EPOCHS)`, and `fit(epochs=EPOCHS - state.epoch)` of scripts for
    Horovod: the first epoch of a `fit` is that of the state.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the offset, which the first epoch sets."""
        super().on_train_begin(logs)
        self._before: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the offset of the state's epoch from that of Keras, in the first epoch."""
        if self._before is None:
            self._before = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Update the count of epochs."""
        self.state.epoch = (self._before or 0) + epoch + 1
