"""Callbacks for `fit`: initial broadcast, averaged metrics, learning rates for larger batches, the best model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from ..collectives.process_sets import ProcessSet, global_process_set
from ..session import topology
from . import agreement
from .names import named_variables
from .optimizer import is_distributed
from .values import broadcast_named


class BroadcastGlobalVariablesCallback(agreement.Agreeing):
    """Broadcast the model and optimizer state of one rank before training begins.

    If the ranks would take different numbers of steps, begin with different epochs, or write the same file, all of them
    raise a `MismatchError`.

    Parameters
    ----------
    root_rank : int
        World rank whose values are sent.
    device : str, optional
        Accepted for existing scripts, and without effect.
    local_variables : sequence of keras.Variable, optional
        Variables that keep each rank's own values. The same on all ranks.
    process_set : ProcessSet, optional
        Process set whose ranks train one model.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: Sequence[Any] | None = None,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {id(each) for each in local_variables or ()}
        self._process_set = process_set
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, if the model is built."""
        self._done = False
        agreement.compare_runs(self)
        optimizer = self.model.optimizer
        if not self.model.built:
            return
        if optimizer is not None and not optimizer.built:  # With TensorFlow, Keras would build it in the first step.
            optimizer.build(self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first batch, which has built a model that was not built before."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        self._done = True
        if self._process_set.included():
            known = named_variables(self.model)
            shared = {name: each for name, each in known.items() if id(each) not in self._local}
            broadcast_named(shared, self.root_rank, self._process_set)


class MetricAverageCallback(agreement.Agreeing):
    """Average metrics over the ranks at the end of each epoch, and stop all ranks together.

    It has to precede the callbacks that decide by metrics, such as `EarlyStopping`, `ReduceLROnPlateau` and
    `ModelCheckpoint`, so that they decide the same on all ranks. A metric that only some ranks have, for example
    because one of them validates, is averaged over these and set on all. If a callback has requested the end of the
    training on any rank, all ranks end it.

    Parameters
    ----------
    device : str, optional
        Accepted for existing scripts, and without effect.
    process_set : ProcessSet, optional
        Process set whose ranks average.
    """

    averages = True

    def __init__(self, device: str = "", *, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare the ranks' steps and files. Collective."""
        agreement.compare_runs(self)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the numbers in `logs` by their averages. Collective.

        Raises MismatchError if ranks that train one model together are in different epochs or have different learning
        rates.
        """
        if not self._process_set.included():
            return
        own = {name: float(value) for name, value in (logs or {}).items() if _is_number(value)}
        optimizer = self.model.optimizer
        trains_together = optimizer is not None and is_distributed(optimizer)
        rate = _to_float(optimizer.learning_rate) if trains_together else None
        told = agreement.gather_by_rank((own, bool(self.model.stop_training), epoch, rate), self._process_set)
        if trains_together:
            partners = [rank for rank in optimizer._engine.options.process_set.ranks if rank in told]
            agreement.expect_equal_epochs({rank: told[rank][2] for rank in partners})
            agreement.expect_equal_rates({rank: told[rank][3] for rank in partners}, epoch)
        if logs is not None:
            for name in dict.fromkeys(name for metrics, *_ in told.values() for name in metrics):
                values = [metrics[name] for metrics, *_ in told.values() if name in metrics]
                logs[name] = sum(values) / len(values)
        if any(stopped for _, stopped, *_ in told.values()):
            self.model.stop_training = True


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiply a learning rate by a factor that depends on the epoch.

    Parameters
    ----------
    initial_lr : float
        Learning rate that is multiplied.
    multiplier : float or callable
        Factor, or a function from the epoch to the factor. The epoch is an integer with `staircase`, else it has a
        fraction.
    start_epoch : int
        First epoch with the multiplied learning rate.
    end_epoch : int, optional
        First epoch after these.
    staircase : bool
        Whether the learning rate changes at the beginning of an epoch, or else with every batch.
    momentum_correction : bool
        Whether to multiply a momentum that contains the learning rate, as in `SGD`, by the new rate over the old one
        (Goyal et al. 2017, arXiv:1706.02677, remark 2).
    steps_per_epoch : int, optional
        Number of batches in an epoch, needed if Keras does not know it and `staircase` is False.

    Raises
    ------
    ValueError
        `steps_per_epoch` is needed, but neither given nor known to Keras.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier

    def on_train_begin(self, logs: Any = None) -> None:
        """Determine the number of batches in an epoch."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__} changes the learning rate with every batch, and Keras does not know how many "
                "an epoch has: give it steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the learning rate of an epoch."""
        self.current_epoch = epoch
        if self.staircase:
            self._set_learning_rate(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of a batch."""
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_learning_rate(self.current_epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the metrics."""
        if logs is not None:
            logs["lr"] = _to_float(self.model.optimizer.learning_rate)

    def _set_learning_rate(self, epoch: float) -> None:
        """Set the learning rate for an epoch, or a fraction of it, between `start_epoch` and `end_epoch`."""
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        optimizer = self.model.optimizer
        old, new = _to_float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        if np.float32(new) == np.float32(old):  # Keras stores it as float32.
            return
        optimizer.learning_rate = new
        if self.momentum_correction and old:
            for velocity in _find_momentums(optimizer):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate over the first epochs, from that of one rank to that of all ranks.

    It begins with `initial_lr / size()` and ends with `initial_lr`, as in Goyal et al. (2017, arXiv:1706.02677).

    Parameters
    ----------
    initial_lr : float
        Scaled learning rate after the warm-up.
    warmup_epochs : int
    momentum_correction, steps_per_epoch : optional
        Same as in `LearningRateScheduleCallback`.
    verbose : int
        Verbosity: 1 prints a line at the end, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def warmup_multiplier(epoch: float) -> float:
            # Count a batch as done at its beginning, so that the last one has the full rate.
            done = min(epoch + 1 / (self.steps_per_epoch or 1), warmup_epochs)
            return 1 / topology.size() * (done * (topology.size() - 1) / warmup_epochs + 1)

        super().__init__(initial_lr, warmup_multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the learning rate to the metrics, and print a line at the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose and topology.rank() == 0:
            rate = _to_float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: the warm-up has reached the learning rate {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Save the best model, on rank 0 only. `MetricAverageCallback` has to precede it.

    Attributes
    ----------
    on_one_rank : bool
        Whether only rank 0 writes.

    Parameters
    ----------
    monitor, verbose, mode, save_freq : optional
        Same as in `keras.callbacks.ModelCheckpoint`.
    filepath : path
        Path of a file that ends with `.keras`.
    """

    on_one_rank = True

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str = "best_model.keras",
    ) -> None:
        super().__init__(filepath, monitor, verbose, True, False, mode, save_freq)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save the model if it is due by `save_freq`, on rank 0."""
        if topology.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save the model if it is the best so far, on rank 0."""
        if topology.rank() == 0:
            super().on_epoch_end(epoch, logs)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) or (keras.ops.is_tensor(value) and not value.shape)


def _to_float(value: Any) -> float:
    """Return a learning rate, which may be a variable, as a float."""
    return float(keras.ops.convert_to_numpy(value))


def _find_momentums(optimizer: Any) -> list[Any]:
    """Return the momentums of an optimizer whose momentum contains the learning rate: `SGD`, `RMSprop`."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, keras.optimizers.SGD | keras.optimizers.RMSprop) or not getattr(inner, "momentum", 0):
        return []
    found = getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or []
    return [each for each in found if each is not None]
