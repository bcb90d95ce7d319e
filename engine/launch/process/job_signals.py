"""Signals of the user to a job, in the launcher and in agents."""

from __future__ import annotations

import signal
import socket
from typing import Protocol

from ...host.processes import signal_name
from ...host.signals import ENDING_SIGNALS, read_signals

PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (*ENDING_SIGNALS, *PASSED_SIGNALS, signal.SIGCHLD)


class SignalHandler(Protocol):
    """Object that acts on the user's signals."""

    def pass_on(self, signum: int) -> None:
        """Pass a signal of `PASSED_SIGNALS` on to the ranks."""
        ...

    def end_by(self, signum: int) -> None:
        """End the job by a signal of `ENDING_SIGNALS`; a second one kills its ranks."""
        ...


def handle_signals(wakeup: socket.socket, handler: SignalHandler) -> frozenset[int]:
    """Pass the signals that have come to their handler, and return all that have come.

    `wakeup` delivers the numbers of signals (`engine.host.signals`).
    """
    come = read_signals(wakeup)
    for signum in come:
        if signum in PASSED_SIGNALS:
            handler.pass_on(signum)
        elif signum in ENDING_SIGNALS:
            handler.end_by(signum)
    return frozenset(come)


def ending_line(signum: int, grace: float) -> str:
    """Return the line that tells the user what his first signal does, and what a second one would do."""
    return f"{signal_name(signum)}: passed on to the ranks, which have {grace:g} s to end; once more kills them now"
