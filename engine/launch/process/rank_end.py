"""The end of a rank's process."""

from __future__ import annotations

from dataclasses import dataclass

from ...exit_report.report import NOTHING, ExitReport
from ...host.processes import signal_name


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank's process."""

    rank: int
    code: int  # exit code; minus the signal's number if one killed it
    time: float  # time of the end: seconds, CLOCK_REALTIME
    by_launcher: bool = False  # whether the launcher had sent it a signal by then
    # Description of how its host's agent was lost, if the end was not observed because of that; else empty
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
    """Return a text on how a process ended, such as `exit code 3` or `killed by SIGKILL`, for a `RankEnd.code`."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"
