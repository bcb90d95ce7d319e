"""Trackers of experiments that log a job's progress: TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from ..session import topology
from .meter import ProgressMeter

INTERVAL = 10.0


class Tracker:
    """Base of trackers: call `step` after each optimizer step, on every rank. A subclass defines `_log`.

    Parameters
    ----------
    interval : float
        Seconds between two logs, on rank 0. Other ranks log nothing.

    Examples
    --------
    >>> with engine.trackers.TensorBoardTracker("runs/1") as tracker:
    ...     for batch in loader:
    ...         train(batch)
    ...         tracker.step(examples=len(batch))
    """

    def __init__(self, interval: float = INTERVAL) -> None:
        if not interval >= 0:
            raise ValueError(f"interval is {interval!r}; give seconds from 0 on")
        self._interval = interval
        self._steps = 0
        self._logged = 0
        self._leads = topology.rank() == 0
        self._meter = ProgressMeter() if self._leads else None
        self._due = time.monotonic() + interval

    def step(self, examples: int | None = None, number: int | None = None) -> None:
        """Count a step that has ended, and log the figures if the interval is over.

        Parameters
        ----------
        examples : int, optional
            Number of examples that this rank has used in the step.
        number : int, optional
            Number of the step, under which the tracker logs; by default steps are counted from 1 on.
        """
        if self._meter is None:
            return
        self._steps = self._steps + 1 if number is None else number
        self._meter.count_step(examples)
        if time.monotonic() >= self._due:
            self._log_figures(self._meter)

    def close(self) -> None:
        """Log the figures of the last interval, and close what this tracker has opened."""
        meter, self._meter = self._meter, None
        if meter is not None:
            try:
                if self._steps != self._logged:
                    self._log_figures(meter)
            finally:
                self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._meter is not None:
            self._meter = None  # the engine may have failed: nothing is measured any more
            self._close()

    def _log_figures(self, meter: ProgressMeter) -> None:
        self._log(meter.read_figures(), self._steps)
        self._logged = self._steps
        self._due = time.monotonic() + self._interval

    def _log(self, figures: dict[str, float], step: int) -> None:
        """Log figures under a step's number."""
        raise NotImplementedError(f"{type(self).__qualname__} does not say how it logs: define _log")

    def _close(self) -> None:
        """Close what this tracker has opened."""


class TensorBoardTracker(Tracker):
    """Tracker that writes scalars for TensorBoard, on rank 0.

    Parameters
    ----------
    writer : str or SummaryWriter
        Directory, to which tensorboardX writes; or an open writer of `torch.utils.tensorboard` or tensorboardX, which
        stays open.
    interval : float
        Seconds between two logs.
    """

    def __init__(self, writer: Any, interval: float = INTERVAL) -> None:
        super().__init__(interval)
        self._own = not hasattr(writer, "add_scalar")
        self._writer = (_open_writer(writer) if self._own else writer) if self._leads else None

    def _log(self, figures: dict[str, float], step: int) -> None:
        assert self._writer is not None
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _close(self) -> None:
        if self._own and self._writer is not None:
            self._writer.close()


def _open_writer(directory: Any) -> Any:
    """Open a writer of tensorboardX, which needs no TensorBoard."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ImportError(
            "TensorBoardTracker needs tensorboardX for a directory: pip install tensorboardX, or give it a "
            "torch.utils.tensorboard.SummaryWriter"
        ) from None
    return SummaryWriter(str(directory))


class MLflowTracker(Tracker):
    """Tracker that logs metrics to MLflow's active run, on rank 0; without one MLflow starts a run.

    Parameters
    ----------
    interval : float
        Seconds between two logs.
    synchronous : bool
        Whether a log waits for MLflow's server. By default a thread of MLflow sends it, and `close` waits.
    """

    def __init__(self, interval: float = INTERVAL, synchronous: bool = False) -> None:
        super().__init__(interval)
        self._synchronous = synchronous
        if self._leads:
            try:
                import mlflow
            except ImportError:
                raise ImportError("MLflowTracker needs MLflow: pip install mlflow, or mlflow-skinny") from None
            self._mlflow = mlflow

    def _log(self, figures: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(figures, step=step, synchronous=self._synchronous)

    def _close(self) -> None:
        if not self._synchronous:
            self._mlflow.flush_async_logging()


class WandbTracker(Tracker):
    """Tracker that logs to Weights & Biases, on rank 0.

    Parameters
    ----------
    run : wandb.Run, optional
        Run to log to; by default the one that `wandb.init` of this process has started.
    interval : float
        Seconds between two logs.
    """

    def __init__(self, run: Any = None, interval: float = INTERVAL) -> None:
        super().__init__(interval)
        self._run = run
        if self._leads and run is None:
            try:
                import wandb
            except ImportError:
                raise ImportError("WandbTracker needs Weights & Biases: pip install wandb") from None
            self._run = wandb.run
            if self._run is None:
                raise ValueError("there is no run of Weights & Biases: call wandb.init on rank 0 before, or give `run`")

    def _log(self, figures: dict[str, float], step: int) -> None:
        # Under a step's number of our own, as W&B refuses numbers that are less than those of the program's logs.
        self._run.log({**figures, "engine/step": step})
