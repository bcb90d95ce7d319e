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
MARK = "[driver] "  # prefix of a rank's lines for the driver


def log_to_driver(message: object) -> None:
    """Show a message on the driver, from a rank, even if other output of ranks is not shown there.

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
        Number of ranks. Below 0: that many processes on the driver, without Spark, to try a program out. 0: as many as
        Spark has slots.
    driver_log_verbosity : str
        `all`: show all output of ranks here. `log_callback_only`: show only messages of `log_to_driver`.
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
            Function that calls `engine.init()` itself.
        **kwargs
            Its arguments.

        Returns
        -------
        object
            Return value of rank 0.

        Raises
        ------
        JobError, LaunchError, TypeError
            Same as in `engine.spark.run`.
        """
        if self._np < 0:
            return run_here(main, kwargs=kwargs, num_proc=-self._np)[0]
        size = self._np or None
        if self._shows:
            return run(main, kwargs=kwargs, num_proc=size)[0]
        with open(os.devnull, "w") as nowhere:
            return run(main, kwargs=kwargs, num_proc=size, stdout=_DriverStream(), stderr=nowhere, verbose=0)[0]


class _DriverStream(io.StringIO):
    """Stream that shows the lines for the driver, and no others."""

    def write(self, text: str) -> int:
        sys.stdout.write("".join(line.replace(MARK, "", 1) for line in text.splitlines(True) if f">:{MARK}" in line))
        sys.stdout.flush()
        return len(text)
