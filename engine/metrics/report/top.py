"""`enginerun top`: a live view of a running job of this host in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...config.forms import Number, make_argument_type
from ...host.signals import ENDING_SIGNALS, catch_signals
from ...text.bounded_reader import parse_natural
from ...text.readable import format_count, print_plain, replace_unprintable
from .find_jobs import Attached, RunningJob, find_jobs
from .rates import JobReading, compute_rates

if TYPE_CHECKING:
    from socket import socket

    from rich.console import Console

    from .top_screen import Frame

SHORTEST = 0.1  # seconds between two readings
PIPE_WIDTH = 100
NARROWEST = 20  # minimum number of columns to draw for


class TopError(Exception):
    """Error if there is nothing to show. The text gives the reason and the remedy; the exit code is 1."""


def main(arguments: Sequence[str]) -> int:
    """Run `enginerun top` with the arguments that follow `top`; return the exit code.

    It is 0 after the job has ended or the user has quit, and 1 if there is no job to show.
    """
    given = _make_parser().parse_args(arguments)
    try:
        from rich.console import Console
    except ImportError:
        print_plain("enginerun top: error: it needs rich: pip install '.[metrics]' in the source tree", file=sys.stderr)
        return 1
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    try:
        with Attached(choose_job(find_jobs(), given.job)) as job, catch_signals(ENDING_SIGNALS, _stop) as signals:
            if given.once:
                _show_once(job, console, given.interval, signals)
            else:
                _watch_job(job, console, given.interval, signals)
    except TopError as error:
        print_plain(f"enginerun top: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has closed the pipe. Python would report an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        pass
    return 0


def choose_job(jobs: Sequence[RunningJob], wanted: str | None) -> RunningJob:
    """Choose the job to show; raise TopError if no job fits, several do, or the job does not count.

    `wanted` is the process id of a member, or the job's name, or a prefix of the name; None: the only job.
    """
    if wanted is None:
        fitting = [job for job in jobs if job.pages] or list(jobs)
        if not fitting:
            raise TopError(
                "no job of yours runs on this host. Start one with 'enginerun -np 2 python train.py'; without "
                "enginerun, a job is seen if it was started with ENGINE_METRICS=1"
            )
    else:
        fitting = [job for job in jobs if job.run == wanted or parse_natural(wanted) in job.members]
        fitting = fitting or [job for job in jobs if job.run.startswith(wanted)]
        if not fitting:
            known = f"; there {'are' if len(jobs) > 1 else 'is'}:\n{_format_jobs(jobs)}" if jobs else ""
            raise TopError(
                f"no job of yours on this host has the name or the process {replace_unprintable(wanted)}{known}"
            )
    if len(fitting) > 1:
        raise TopError(
            f"there are several jobs; choose one by its name or a process, as in 'enginerun top {fitting[0].pid}':\n"
            f"{_format_jobs(fitting)}"
        )
    job = fitting[0]
    if not job.pages:
        raise TopError(
            f"the job {replace_unprintable(job.run)} (process {job.pid}) runs without counting: start it without "
            "--no-metrics and without ENGINE_METRICS=0"
        )
    return job


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enginerun top",
        description="Watch a running job of this host: who is slow, what communication costs, what stalls. Leave with "
        "q or Ctrl-C; it leaves by itself when the job ends.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("job", nargs="?", metavar="PID|RUN", help="the job, if there are several: a process of it, or its name")
    interval = make_argument_type(Number(SHORTEST, 3600, "a number of seconds"))
    add("--interval", type=interval, default=1.0, metavar="S", help="seconds between two readings (default 1)")
    add("--once", action="store_true", help="print figures of one interval, and exit")
    return parser


def _format_jobs(jobs: Sequence[RunningJob]) -> str:
    """Format jobs, one line each."""
    lines = []
    for job in jobs:
        if not job.pages:
            about = "runs without counting"
        else:
            about = f"{format_count(len(job.pages), 'rank')}{'' if job.launched else ', without a launcher of ours'}"
        lines.append(f"  {job.pid:>8}  {replace_unprintable(job.run)}  ({about})")
    return "\n".join(lines)


def _stop(*_: object) -> None:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP as on Ctrl-C, so that the terminal is restored."""
    raise KeyboardInterrupt


def _make_frame(job: Attached, before: JobReading | None, now: JobReading) -> Frame:
    from .top_screen import Frame

    between = {} if before is None else compute_rates(before, now)
    return Frame(job.job.run, now, between, job.read_process_states(now), time.time(), job.read_elastic_state())


def _show_once(job: Attached, console: Console, interval: float, signals: socket) -> None:
    """Show the figures of one interval."""
    from .top_screen import describe_end, draw_frame

    before = job.read()
    if _wants_to_leave(None, signals, interval):
        return
    running = job.runs
    frame = _make_frame(job, before, job.read())
    console.print(draw_frame(frame, max(NARROWEST, console.width), None))
    if not running:
        console.print(describe_end(frame), markup=False, soft_wrap=True)


def _watch_job(job: Attached, console: Console, interval: float, signals: socket) -> None:
    """Show the job until it ends or the user quits."""
    from rich.live import Live

    from .top_screen import describe_end, draw_frame

    before: JobReading | None = None
    # On a terminal the screen is redrawn in place; elsewhere, frames follow each other.
    in_place = console.is_terminal and not console.is_dumb_terminal
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop") if in_place else None
    size = console.size
    with _keys() as keys, live or contextlib.nullcontext():
        while True:
            running = job.runs  # checked before the pages are read, so that the last reading shows the end
            now = job.read()
            frame = _make_frame(job, before, now)
            if live is not None:
                if console.size != size:  # the terminal has rewrapped its content
                    size = console.size
                    console.clear()
                live.update(draw_frame(frame, max(NARROWEST, size.width), size.height), refresh=True)
            elif before is not None or not running:
                console.print(draw_frame(frame, max(NARROWEST, console.width), None))
            if not running:
                break
            before = now
            if _wants_to_leave(keys, signals, interval):
                return
    console.print(describe_end(frame), markup=False, soft_wrap=True)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Set stdin to read keys one by one if it is our foreground terminal; yield its descriptor, else None."""
    try:
        descriptor = sys.stdin.fileno()
        ours = os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # stdin is closed
        ours = False
    if not ours:
        yield None
        return
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _wants_to_leave(keys: int | None, signals: socket, seconds: float) -> bool:
    """Wait up to `seconds` for the key q, or for a signal whose handler has not been called."""
    end, signal_comes = time.monotonic() + seconds, signals.fileno()
    while (left := end - time.monotonic()) > 0:
        ready = select.select([signal_comes] if keys is None else [signal_comes, keys], [], [], left)[0]
        if signal_comes in ready:
            return True
        if keys is not None and ready:
            typed = os.read(keys, 64)
            if not typed:  # the terminal is gone
                return True
            if b"q" in typed.lower():
                return True
    return False
