"""What the examples share: how they show and write down what happens. Nothing here concerns the engine."""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

QUIET_SECONDS = 2.0  # between two lines where there is no terminal to draw a bar on


class Log:
    """A progress bar with the latest numbers, and a file with all of them; silent on ranks other than 0.

    Parameters
    ----------
    title : str
    steps : int
        In all.
    samples : int
        In a step, over all ranks.
    path : Path or None
        Where one line of JSON is written for each step.
    active : bool
        Whether this rank is the one that shows.
    """

    def __init__(self, title: str, steps: int, samples: int, path: Path | None = None, *, active: bool) -> None:
        self._title, self._steps, self._samples, self._active = title, steps, samples, active
        self._file = open(path, "w", buffering=1) if path is not None and active else None  # noqa: SIM115
        self._console = Console(highlight=False)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}")
        self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console, disable=not active)
        self._task = self._bar.add_task(title, total=steps, text="")
        self._step, self._began, self._said = 0, time.perf_counter(), float("-inf")
        self._seconds = self._waited = 0.0  # since the end of the first step, which is slower than all others

    def __enter__(self) -> Log:
        if self._console.is_terminal:
            self._bar.start()
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._bar.stop()
        if self._file is not None:
            self._file.close()

    def say(self, text: str) -> None:
        """Show one line."""
        if self._active:
            self._console.print(text, soft_wrap=True)

    def step(self, loss: float, waited: float) -> None:
        """One step is done.

        Parameters
        ----------
        loss : float
            Over the whole batch.
        waited : float
            Seconds of the step in which this rank waited for communication.
        """
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self._step += 1
        if not self._active:
            return
        text = f"loss {loss:.4f}"
        if self._step > 1:
            self._seconds, self._waited = self._seconds + seconds, self._waited + waited
            pace = self._samples * (self._step - 1) / self._seconds
            text += f", {pace:.1f} samples/s, waiting for communication {self._waited / self._seconds:.1%}"
        self._bar.update(self._task, advance=1, text=text)
        last = self._step == self._steps
        if not self._console.is_terminal and (last or now - self._said >= QUIET_SECONDS):
            self._said = now
            print(f"{self._title}: step {self._step}/{self._steps}, {text}", flush=True)
        self._write(step=self._step, loss=loss, seconds=seconds, waited=waited)

    def _write(self, **numbers: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(numbers) + "\n")


TRAINING = 1500  # of the 1797 pictures; the others are for the examination


def digits() -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Pictures of handwritten digits, [1797, 64] from 0 to 1, and their labels, in an order that mixes the writers.

    They are read from the file that comes with scikit-learn, so that this works with any version of NumPy.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        stop("the pictures come with scikit-learn, which is not installed")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", np.float32, delimiter=",")
    table = np.random.RandomState(0).permutation(table)
    return table[:, :64] / 16, table[:, 64].astype(np.int32)


def build_reader() -> Any:
    """Return a module of PyTorch, a convolution and two dense layers, that reads the digits."""
    from torch import nn

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def batch(step: int, size: int) -> NDArray[np.int64]:
    """Which training pictures a step uses: for a step always the same ones, in every epoch each once."""
    epoch, place = divmod(step, TRAINING // size)
    return np.random.RandomState(epoch).permutation(TRAINING)[place * size : (place + 1) * size]


def many(number: int, word: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def need_library(name: str, install: str) -> None:
    """End the program unless a library is installed, with the command that installs it."""
    if find_spec(name) is None:
        stop(f"{name} is not installed in {sys.prefix}: {install}")


def stop(message: str) -> NoReturn:
    """End the program with one line that says why."""
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")
