"""The end of a rank's process."""

from __future__ import annotations

from dataclasses import dataclass

from ...exit_report.report import NOTHING, ExitReport
from ...host.processes import signal_name


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank's process.

    Attributes
    ----------
    rank : int
    code : int
        Exit code; minus the signal's number if one killed it.
    time : float
        Time of the end: seconds, CLOCK_REALTIME.
    by_launcher : bool
        Whether the launcher had sent it a signal by then.
    lost : str
        Description of how the agent of its host was lost, if the end was not observed because of that; else empty.
    report : ExitReport
        Exit report of the process.
    """

    rank: int
    code: int
    time: float
    by_launcher: bool = False
    lost: str = ""
    report: ExitReport = NOTHING

    @property
    def failed(self) -> bool:
        """True if it failed without a signal of the launcher."""
        return self.code != 0 and not self.by_launcher

    @property
    def exit_code(self) -> int:
        """Exit code as a shell has it."""
        return shell_code(self.code)


def shell_code(code: int) -> int:
    """Return an exit code as a shell has it: 128 + the signal's number for a killed process."""
    return 128 - code if code < 0 else code


def describe_code(code: int) -> str:
    """Return a text on how a process ended.

    Parameters
    ----------
    code : int
        Same as in `RankEnd.code`.

    Returns
    -------
    str
        Text such as `exit code 3` or `killed by SIGKILL`.
    """
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"
