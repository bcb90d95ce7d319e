"""Checks between ranks at the start of a `fit`, and warnings about callbacks that would make ranks diverge.

A step is collective. Ranks with different numbers of steps would block at the end, or combine the last step of one
rank's epoch with the first of another's. Callbacks of Keras do not know of other ranks. The number of the first epoch
is compared when that epoch begins, since `BackupAndRestore` sets it only then. A rank without a remaining epoch
compares at the end of its training.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras

from ..collectives import objects
from ..collectives.process_sets import ProcessSet
from ..errors import MismatchError
from ..host import machine
from ..text import logs
from .optimizer import is_distributed

_DEPTH = 6  # number of stack frames that are searched for the list of callbacks
_WRITING = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
_FILES = ("filepath", "backup_dir")  # attributes with the paths that callbacks write


class Agreeing(keras.callbacks.Callback):
    """Base class of callbacks that call `compare_runs` when training begins."""

    # Whether it averages metrics over the ranks, so that callbacks that decide by metrics have to come after it
    averages = False
    _compares_epoch_in: ProcessSet | None = None  # set in one callback, from the start of `fit` to its first epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Compare the number of the first epoch between ranks. Collective in that epoch."""
        self._compare_first_epoch(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """Tell the other ranks that this one has no epoch to train, unless the first epoch was compared."""
        self._compare_first_epoch(None)

    def _compare_first_epoch(self, epoch: int | None) -> None:
        process_set, self._compares_epoch_in = self._compares_epoch_in, None
        if process_set is not None:
            expect_equal_epochs(gather_by_rank(epoch, process_set, "fit.epoch"))


def compare_runs(callback: Any) -> None:
    """Compare the ranks' steps and files, and warn about callbacks that decide by one rank's metrics. Collective.

    It does nothing without a wrapped optimizer, and for an `Agreeing` callback that is not the first one of a `fit`.

    If ranks would take different numbers of steps, or write the same file at the same time, all ranks raise
    MismatchError.
    """
    optimizer = callback.model.optimizer
    if optimizer is None or not is_distributed(optimizer):
        return
    process_set = optimizer._engine.options.process_set
    container = container_of()
    callbacks = [] if container is None else list(container.callbacks)
    first = next((each for each in callbacks if isinstance(each, Agreeing)), callback)
    if first is not callback or not process_set.included():
        return
    _warn_of_local_metrics(callbacks)
    known = callback.params or {}
    at_once = getattr(callback.model, "steps_per_execution", 1)
    everyone = gather_by_rank(
        (known.get("steps"), known.get("epochs"), at_once, _list_written_files(callbacks)), process_set
    )
    _expect_equal_steps({rank: (steps, epochs) for rank, (steps, epochs, _, _) in everyone.items()})
    _expect_equal(
        {rank: at_once for rank, (_, _, at_once, _) in everyone.items()},
        "compile() was given different steps_per_execution on the ranks ({said}), and the gradients of one step would "
        "not meet: give it the same number on all ranks",
    )
    _expect_own_files({rank: files for rank, (_, _, _, files) in everyone.items()})
    callback._compares_epoch_in = process_set


def gather_by_rank(told: Any, process_set: ProcessSet, name: str | None = None) -> dict[int, Any]:
    """Gather objects of all ranks of a process set, by world rank. Collective."""
    return dict(zip(process_set.ranks, objects.allgather_object(told, name, process_set), strict=True))


def expect_equal_epochs(told: dict[int, int | None]) -> None:
    """Raise MismatchError if the ranks are about to train different epochs; None means no epoch at all."""
    _expect_equal(
        {rank: "none" if epoch is None else epoch for rank, epoch in told.items()},
        "fit() would train different epochs on the ranks, counted from 0 ({said}): learning rates and weights "
        "would differ. Give fit() one initial_epoch on all ranks, such as engine.broadcast_object(initial_epoch, 0). "
        "If BackupAndRestore resumed them from backups of different epochs, restore one of these on all ranks, or use "
        "engine.keras.elastic.KerasState",
    )


def expect_equal_rates(told: dict[int, float | None], epoch: int) -> None:
    """Raise MismatchError if the ranks' learning rates differ at the end of an epoch."""
    _expect_equal(
        told,
        f"the ranks' learning rates differ at the end of epoch {epoch}, counted from 0 ({{said}}): give each rank "
        "the same optimizer and schedule, and put callbacks that change the rate after MetricAverageCallback",
    )


def _expect_equal(told: dict[int, Any], text: str) -> None:
    """Raise MismatchError unless all ranks have the same value; `{said}` in its text stands for their values."""
    if len(set(told.values())) > 1:
        said = ", ".join(f"rank {rank}: {value}" for rank, value in told.items())
        raise MismatchError(text.format(said=said))


def container_of() -> Any:
    """Return the Keras list of callbacks that is calling this code, if any; it is searched in the stack."""
    frame: Any = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            break
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            return caller
        frame = frame.f_back
    return None


def _warn_of_local_metrics(callbacks: Sequence[Any]) -> None:
    """Warn about callbacks that act on metrics of this rank alone."""
    averaged = next((k for k, each in enumerate(callbacks) if getattr(each, "averages", False)), None)
    for k, each in enumerate(callbacks):
        kind = type(each).__name__
        if getattr(each, "monitor", None) and (averaged is None or k < averaged):
            logs.logger.warning(
                "%s decides by this rank's own %r: ranks may stop at different epochs, or keep different weights. Put "
                "MetricAverageCallback before it",
                kind,
                each.monitor,
            )
        if isinstance(each, keras.callbacks.TerminateOnNaN):
            logs.logger.warning(
                "%s looks at this rank's own loss, and may end the training of one rank in the middle of an epoch, "
                "where the others wait for it: leave it out, or compare the averaged loss after MetricAverageCallback",
                kind,
            )


def _expect_equal_steps(told: dict[int, tuple[int | None, int | None]]) -> None:
    """Raise MismatchError if the ranks would take different numbers of steps, as far as Keras knows them."""
    known = {steps for steps, _ in told.values() if steps is not None}
    if len(known) > 1 or len({epochs for _, epochs in told.values()}) > 1:
        said = ", ".join(
            f"rank {rank}: {'unknown' if steps is None else steps} batches, {epochs} epochs"
            for rank, (steps, epochs) in told.items()
        )
        raise MismatchError(
            f"fit() would take different numbers of steps on the ranks, and a step needs all of them ({said}). Give "
            "each rank equally many samples and epochs, or fit(steps_per_epoch=N) with an N that all have"
        )


def _expect_own_files(told: dict[int, list[str]]) -> None:
    """Raise MismatchError if several ranks would write the same file, and corrupt it."""
    often = Counter(path for paths in told.values() for path in set(paths))
    shared = next((path for path, count in often.items() if count > 1), None)
    if shared is not None:
        ranks = " and ".join(str(rank) for rank, paths in told.items() if shared in paths)
        raise MismatchError(
            f"ranks {ranks} have a callback that writes {shared!r}, all at the same time, which leaves a broken file. "
            "Give ModelCheckpoint to rank 0 alone, or use engine.keras.callbacks.BestModelCheckpoint; give "
            "BackupAndRestore a path of its own on each rank"
        )


def _list_written_files(callbacks: Sequence[Any]) -> list[str]:
    """Return the files that callbacks of this rank write, except for callbacks that write only on rank 0."""
    writing = (each for each in callbacks if isinstance(each, _WRITING) and not getattr(each, "on_one_rank", False))
    found = [getattr(each, name, None) for each in writing for name in _FILES]
    return [str(machine.absolute_path(path)) for path in found if path]
