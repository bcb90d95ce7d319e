"""`HorovodRunner`: the interface by which notebooks on Databricks start training jobs."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

from ..launch.errors import LaunchError
from ..runner.function import run as run_here
from .job import run

VERBOSITIES = ("all", "log_callback_only")
MARK = "[driver] "  # before what a rank has for the driver


def log_to_driver(message: object) -> None:
    """Show something on the driver, from a rank, however little of ranks is shown there.

    Parameters
    ----------
    message : object
        Its text is shown, each line with the rank.
    """
    print("\n".join(MARK + line for line in str(message).splitlines() or [""]), flush=True)


class HorovodRunner:
    """Runs a function as a training job.

    Parameters
    ----------
    np : int
        Number of ranks. Below 0: so many processes beside this one, on the driver, to try a program out; Spark has no
        part in that. 0: as many as Spark has slots.
    driver_log_verbosity : str
        `all`: what ranks write is shown here. `log_callback_only`: only what they give to `log_to_driver`.
    """

    def __init__(self, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if driver_log_verbosity not in VERBOSITIES:
            raise LaunchError(
                f"driver_log_verbosity is {driver_log_verbosity!r}; expected one of {', '.join(VERBOSITIES)}"
            )
        self._np = np
        self._shows = driver_log_verbosity == "all"

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` on every rank.

        Parameters
        ----------
        main : callable
            It calls `engine.init()` itself.
        **kwargs
            Its arguments.

        Returns
        -------
        object
            What it returned on rank 0.

        Raises
        ------
        JobError, LaunchError, TypeError
            As `engine.spark.run`.
        """
        if self._np < 0:
            return run_here(main, kwargs=kwargs, num_proc=-self._np)[0]
        size = self._np or None
        if self._shows:
            return run(main, kwargs=kwargs, num_proc=size)[0]
        with open(os.devnull, "w") as nowhere:
            return run(main, kwargs=kwargs, num_proc=size, stdout=_Told(), stderr=nowhere, verbose=0)[0]


class _Told(io.StringIO):
    """Shows the lines that are for the driver, and no others."""

    def write(self, text: str) -> int:
        sys.stdout.write("".join(line.replace(MARK, "", 1) for line in text.splitlines(True) if f">:{MARK}" in line))
        sys.stdout.flush()
        return len(text)
