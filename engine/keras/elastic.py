"""Elastic training with Keras: `KerasState`, and the callbacks that keep and commit it during `fit`.

An epoch that was interrupted is gone on with by a `fit` of its own, over the data that is left:

>>> while state.epoch < EPOCHS:
...     left = batches[state.batch :]
...     model.fit(left, initial_epoch=state.epoch, epochs=state.epoch + 1, callbacks=[...])
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ..elastic.copies import Copy
from ..elastic.samplers import ElasticBatchSampler, ElasticSampler
from ..elastic.state import HostsUpdatedInterrupt, ObjectState, Parts, State, expect_alike, expect_names
from ..elastic.worker.batches import loop
from ..elastic.worker.gate import JobOver
from ..elastic.worker.run import leave, run
from ..forms import whole_number
from .agreement import container_of
from .names import optimizer_names, weight_names
from .optimizer import is_distributed

__all__ = [
    "CommitStateCallback",
    "ElasticBatchSampler",
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "JobOver",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "leave",
    "loop",
    "run",
]


class KerasState(ObjectState):
    """A model of Keras, its optimizer, and whatever else a training goes on from, on all backends.

    Kept are the weights, moving statistics among them, and the optimizer's variables; not the state of random
    generators, which is each rank's own.

    Parameters
    ----------
    model : keras.Model
        Built.
    optimizer : keras.optimizers.Optimizer, optional
        The model's, if there is one. It is built for the model's trainable variables, so that one which has not made a
        step has all its variables. Commits are put off while it has gradients of several passes in hand.
    **values
        As of `ObjectState`, such as `epoch=0` and `batch=0`. Further models and optimizers may be among them.

    Raises
    ------
    ValueError
        A model that is not built; a name that the state has for something else.
    TypeError
        A value that cannot be pickled, by name.
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
        """Have steps compiled anew that have the number of ranks in them: local gradients are divided by it."""
        for name in self._names:
            model = getattr(self, name)
            optimizer = getattr(model, "optimizer", None) if isinstance(model, keras.Model) else None
            if optimizer is not None and is_distributed(optimizer) and optimizer._engine.local.ids():
                model.train_function = None

    def restore(self) -> None:
        """Give all values back, and to variables that are a rank's own those that they had at its newest commit.

        On JAX a step that fails leaves variables without a value, or with one that raises the failure again.
        """
        for model in self._models():
            model._jax_state, model._jax_state_synced = None, True  # else they are given back as they failed
        super().restore()
        for variable, value in self._own:
            variable.assign(value)

    def _take(self) -> Copy:
        self._bring_back()
        taken = super()._take()
        own = [each for model in self._models() for each in _own_variables(model)]
        self._own = [(each, _array_of(each)) for each in own]
        return taken

    def _bring_back(self) -> None:
        """Have variables hold what is trained: `fit` takes their values away on JAX, and keeps them to itself."""
        for model in self._models():
            model.jax_state_sync()

    def _models(self) -> list[Any]:
        """The models whose variables `fit` takes the values of."""
        present = [getattr(self, name) for name in self._names]
        return [each for each in present if isinstance(each, keras.Model) and hasattr(each, "jax_state_sync")]

    def _passes_in_hand(self) -> bool:
        self._bring_back()
        present = [getattr(self, name) for name in self._names]
        optimizers = [value for value in present if isinstance(value, keras.optimizers.Optimizer)]
        counts = [each._engine.passes.variables[-1:] for each in optimizers if is_distributed(each)]
        return any(int(keras.ops.convert_to_numpy(count.value)) for (*found,) in counts for count in found)

    def _kept(self, value: Any) -> Any:
        variables = _variables_of(value)
        if variables is None:
            return super()._kept(value)
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
    """The variables of a model that are not kept: of random generators and metrics."""
    kept = {id(each) for each in model.weights}
    return [each for each in model.variables if id(each) not in kept]


def _variables_of(value: Any) -> dict[str, Any] | None:
    """The variables that are kept of a model or an optimizer, by their names; None of anything else."""
    if isinstance(value, keras.Model):
        return dict(zip(weight_names(value), value.weights, strict=True))
    if not isinstance(value, keras.optimizers.Optimizer):
        return None
    variables = list(value.variables)
    return dict(zip(optimizer_names(value, variables), variables, strict=True))


class _Last(keras.callbacks.Callback):
    """A callback that comes behind those of other classes, whatever their order in the program.

    What others change at the end of a batch or an epoch belongs into its commit, and its interrupt ends the calls.
    """

    order = 1

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: Any = None) -> None:
        """Move behind the others."""
        container = container_of()
        if container is not None:  # who iterates over the old list now, goes on in it
            container.callbacks = sorted(container.callbacks, key=lambda each: getattr(each, "order", 0))


class CommitStateCallback(_Last):
    """Commits a state every so many batches, and at the end of each epoch; as the last of all callbacks.

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
        """Move behind the others, and count anew."""
        super().on_train_begin(logs)
        self._since = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time to; the last batch of an epoch is committed with it."""
        self._since += 1
        if batch + 1 == (self.params or {}).get("steps"):
            return
        if self._since >= self.batches_per_commit or self.state.owed:
            self._since = 0
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self._since = 0
        self.state.commit()


class UpdateBatchStateCallback(_Last):
    """Keeps in `state.batch` how many batches of the epoch are done, over an interruption, too.

    Keras counts the batches of a `fit` from 0; those of an epoch that was interrupted go on from what the state has.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Note how far the epoch is."""
        super().on_train_begin(logs)
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch."""
        self.state.batch = self._before = 0


class UpdateEpochStateCallback(_Last):
    """Keeps in `state.epoch` how many epochs are done.

    Right for `fit(initial_epoch=state.epoch, epochs=EPOCHS)`, and for `fit(epochs=EPOCHS - state.epoch)`, as scripts
    for Horovod have it: the first epoch of a `fit` is the one that the state has.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Await the first epoch."""
        super().on_train_begin(logs)
        self._before: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note by how much Keras counts lower."""
        if self._before is None:
            self._before = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count."""
        self.state.epoch = (self._before or 0) + epoch + 1
