"""One job from its options to its exit code."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.config import Config
from ..config.setting import variable_name
from ..host import linux, machine, private_files, processes
from ..host.signals import catch_signals
from ..text import readable
from .cli.elastic_options import Elastic
from .cli.hidden_package import find_hiding_file
from .cli.horovod_options import without_effect
from .cli.options import Options, load
from .driver import Driver, Interrupted, JobPolicy, JobSetup
from .errors import LaunchError
from .fixed_policy import FixedPolicy
from .hosts import remote_files
from .hosts.host_list import told_idle
from .local_policy import LocalPolicy
from .metrics import Metrics
from .process import leftovers, spawn
from .process.console import Console
from .process.cpu_binding import allot_cpus
from .process.devices import devices_here, share_devices
from .process.guardian import NOWHERE, Guardian
from .process.job_signals import SIGNALS
from .process.output import RankOutput
from .process.plan import Job
from .process.rank_end import shell_code
from .process.supervisor import Outcome
from .report.elastic_report import Result
from .report.failure_cause import FailureCause
from .report.failure_report import QUOTE, failure_lines, find_first_failure, flight_records


class JobRun:
    """One run of a job.

    `collect` is called with the job's directory when all its processes have ended, before it may be removed.
    """

    def __init__(self, options: Options, collect: Callable[[Path], None] = lambda directory: None) -> None:
        # Host of each rank after `run`; None if all ranks were on this host or the job was elastic
        self.hosts: dict[int, str] | None = None
        # Rank that failed first, and why, after `run`; None if none failed
        self.failure_cause: FailureCause | None = None
        self.report: list[str] = []  # report on the failure, as it was shown
        # N of each rank's directory `rank.N`; in an elastic job, of the last world's ranks
        self.directories = list(range(options.size))
        self._options = options
        self._collect = collect
        self._out = Console(1)
        self._err = Console(2, beside=self._out)
        self._output: RankOutput | None = None
        self._clocks: dict[int, float] = {}
        self._shares: dict[str, tuple[int, int]] = {}
        self._keep = True

    def run(self) -> int:
        """Run the job to its end, and return its exit code; raise a `LaunchError` if it cannot start.

        The code is 0, that of the first failing rank, or 128 + a signal: the one that killed that rank, or by which the
        user ended the job.
        """
        options = self._options
        linux.open_standard_descriptors()  # after the consoles have seen which of them were closed
        if not processes.is_proc_usable():
            raise LaunchError(
                "/proc does not show the processes of this job: it is missing, or that of another PID namespace; mount "
                "it, as in 'unshare --pid --fork --mount-proc'"
            )
        try:
            here = machine.working_directory()  # also that of the ranks
        except FileNotFoundError as error:
            raise LaunchError(error.strerror) from None
        chosen = load(options, os.environ)
        start = self._choose_run(chosen)
        if (hidden := find_hiding_file(options.command, here)) is not None:
            self._say_line(hidden)
        if options.ignored:
            self._say_line(without_effect(options.ignored))
        for line in [] if options.quiet else told_idle(options.idle, options.size):
            self._say_line(line)
        with (
            self._told_first(),
            Metrics(options, chosen, os.environ, self._say_line) as metrics,
            self._open_directory() as directory,
        ):
            job = Job(
                size=options.size,
                name=f"{os.getpid()}-{secrets.token_hex(8)}",
                secret=secrets.token_hex(32),
                port=spawn.find_port(),
                directory=directory,
                settings=_collect_settings(options, chosen) | metrics.settings,
                horovod=options.horovod,
                torchrun=options.torchrun,
                counters=() if options.places or options.elastic else metrics.counters,
                memory=options.memory,
                gpus=options.gpus,
            )
            unix_offset, began = time.time() - time.monotonic(), time.monotonic()
            outcome = start(job, metrics)
            self._collect(directory)
            seconds = time.monotonic() - began
            # The system clock may have been set meanwhile; times are reported by its present setting.
            code, lines = self._conclude_job(outcome, directory, time.time() - seconds)
            if not self._gave_up_files:
                leftovers.forget_empty(directory)
            log = job.settings.get(variable_name("autotune_log")) or chosen.get("autotune_log")
            by_user = outcome.signum if self.failure_cause is None else None
            lines = self._summarize_run(metrics.pages, seconds, unix_offset, log, by_user) + lines
        if not self._out.flush() and self._out.lost:
            lines.insert(0, f"{self._out.lost} bytes of output were lost: stdout did not take them")
        for line in lines:
            self._say_line(line)
        self._close_consoles()
        return code

    @property
    def problems(self) -> dict[str, OSError]:
        """Files of ranks that are incomplete here, and why."""
        return {} if self._output is None else self._output.problems

    @property
    def _gave_up_files(self) -> bool:
        return self._output is not None and self._output.files.given_up

    @contextlib.contextmanager
    def _told_first(self) -> Iterator[None]:
        """Flush the consoles before a `LaunchError` is shown."""
        try:
            yield
        except LaunchError:
            self._close_consoles()
            raise

    def _close_consoles(self) -> None:
        """Flush and close both consoles, so that other code may write to stdout and stderr."""
        self._out.close()
        self._err.close()

    def _say_line(self, line: str) -> None:
        """Show a line of the launcher's own; control characters that it quotes are removed."""
        prefix = "" if line.startswith(QUOTE) else "enginerun: "
        self._err.write(f"{prefix}{readable.plain_line(line)}\n".encode())

    def _choose_run(self, chosen: Mapping[str, Any]) -> Callable[[Job, Metrics], Outcome]:
        """Return the function that runs the ranks: elastic, on several hosts, or here; refuse invalid options now."""
        if self._options.elastic is not None:
            return self._prepare_elastic(chosen, self._options.elastic)
        return self._prepare_hosts(chosen) if self._options.places else self._prepare_local()

    def _prepare_local(self) -> Callable[[Job, Metrics], Outcome]:
        """Return the function that runs all ranks on this host; refuse invalid options now."""
        options = self._options
        program = spawn.find_command(options.command, os.environ)
        allotment = allot_cpus(
            machine.collect_facts(),
            options.size,
            os.environ,
            binding=options.binding,
            cpus_per_rank=options.cpus_per_rank,
        )

        visible = devices_here(os.environ.get("CUDA_VISIBLE_DEVICES"))
        devices = () if options.gpus is None else share_devices(*options.gpus, options.size, visible)

        def run(job: Job, metrics: Metrics) -> Outcome:
            descriptors = spawn.raise_descriptor_limit(options.size)
            return self._drive_job(
                replace(job, devices=devices),
                metrics,
                0.0,
                lambda driver, guardian: LocalPolicy(driver, guardian, program, allotment, descriptors),
            )

        return run

    def _prepare_hosts(self, chosen: Mapping[str, Any]) -> Callable[[Job, Metrics], Outcome]:
        """Return the function that runs ranks on several hosts, each with an agent."""
        seconds = float(chosen.get("start_timeout", Config.start_timeout))

        def run(job: Job, metrics: Metrics) -> Outcome:
            spawn.raise_descriptor_limit(self._options.most + len(self._options.places))
            return self._drive_job(job, metrics, seconds, lambda driver, _: FixedPolicy(driver))

        return run

    def _prepare_elastic(self, chosen: Mapping[str, Any], elastic: Elastic) -> Callable[[Job, Metrics], Outcome]:
        """Return the function that runs an elastic job; each host has an agent, even if this is the only host."""
        from .elastic.job_watch import Watch  # 40 modules, which a fixed job would wait for
        from .elastic.policy import ElasticPolicy

        config = Config(**{name: chosen[name] for name in ("start_timeout", "stall_limit") if name in chosen})
        limits = elastic.make_limits(config.start_timeout, config.stall_limit, self._options.grace)

        def run(job: Job, metrics: Metrics) -> Outcome:
            spawn.raise_descriptor_limit(2 * self._options.most)  # a host may have one rank
            watch = Watch(elastic, metrics.pages, metrics.tell)
            return self._drive_job(
                job, metrics, limits.start_timeout, lambda driver, _: ElasticPolicy(driver, limits, watch)
            )

        return run

    def _drive_job(
        self, job: Job, metrics: Metrics, seconds: float, make_policy: Callable[[Driver, Guardian], JobPolicy]
    ) -> Outcome:
        """Run the ranks, and agents, and return when all their processes have ended, whatever happens."""

        def note_start(number: int) -> None:
            metrics.add(number, functools.partial(driver.policy.is_running, number))

        local = self._options.elastic is None and not self._options.places
        # Agents have guardians of their own, which guard the ranks.
        with _guard_job(job, metrics, None if local else NOWHERE) as (guardian, wakeup):
            consoles = (self._out, self._err)
            setup = JobSetup(
                self._options, job, consoles, metrics.pages, os.environ, wakeup, seconds, self._say_line, note_start
            )
            driver = Driver(setup, lambda driver: make_policy(driver, guardian))
            self._output = driver.output
            try:
                with driver:
                    driver.start()
                    metrics.start(driver.loop)
                    outcome = driver.run()
            except LaunchError:
                self._keep = self._options.directory is not None
                raise
            except Interrupted as error:
                return Outcome([], error.signum, hurried=True)
            if outcome.failed and outcome.signum is None and not outcome.hurried:
                metrics.wait_for_scrape(wakeup)
            metrics.stop()  # while signals cannot end this process, and the guardian would clean up
            policy = driver.policy
            self.directories = list(policy.members)
            if outcome.ends:
                self.hosts, self._clocks, self._shares = policy.hosts, policy.clocks, policy.shares
        return outcome

    def _conclude_job(self, outcome: Outcome, directory: Path, started: float) -> tuple[int, list[str]]:
        """Return the exit code and the lines to show to the user."""
        cause = None if isinstance(outcome, Result) else find_first_failure(outcome.ends, self._clocks)
        lines = [] if self._output is None else list(self._output.list_losses())
        if self._out.broken or self._err.broken:
            lines.append("the output could not all be shown, because nobody reads it or the disk is full")
        flights = flight_records(directory)
        # A job ended by the user counts as failed, unless no rank had been started: then there is nothing to keep.
        failed = cause is not None or (outcome.signum is not None and bool(outcome.ends))
        if isinstance(outcome, Result):
            failed = outcome.failed
        self._keep = bool(self._options.directory or failed or flights or lines)
        if self._keep and (outcome.ends or failed) and not (self._options.quiet and cause is None):
            lines.append(f"each rank's stdout and stderr: {directory}/rank.N/")
        if flights:
            lines.append(f"flight records of {readable.format_ranks(flights)}: {directory}/rank.N/flight.json")
        if isinstance(outcome, Result):
            self.report = list(outcome.lines) if outcome.failed else []
            return outcome.code, [*lines, *outcome.lines]
        if cause is not None:
            self.failure_cause = cause
            for end in outcome.ends:
                if end.code != 0 and self._output is not None:
                    self._output.keep_report(end.rank, end.report)
            self.report = failure_lines(cause, outcome.ends, directory, started, self.hosts)
            return cause.exit_code, lines + self.report
        if outcome.signum is not None:
            lines.append(f"ended by {processes.signal_name(outcome.signum)}")
            return shell_code(-outcome.signum), lines
        return 0, lines

    def _summarize_run(
        self, pages: Sequence[int], seconds: float, unix_offset: float, log: object, signum: int | None
    ) -> list[str]:
        """Return the lines of `--summary`, from the ranks' pages of counters and the launcher's knowledge of the run.

        `pages` are descriptors by rank, `seconds` is the job's duration, and `unix_offset` is seconds since 1970 minus
        the monotonic clock. `log` is the path of the tuner's log, or None; `signum` is the signal by which the user
        ended the job.
        """
        if not self._options.summary:
            return []
        from ..metrics.report.advice import summarize_run
        from ..metrics.report.find_jobs import look_into
        from ..metrics.report.summary import Run

        run = Run(
            seconds=seconds,
            size=self._options.size,
            processors=machine.collect_facts().usable,
            unix_offset=unix_offset,
            tuner_log=None if log is None else str(log),
            ended_by=None if signum is None else processes.signal_name(signum),
            hosts=self._shares,
        )
        return summarize_run({rank: look_into(descriptor) for rank, descriptor in enumerate(pages)}, run)

    @contextlib.contextmanager
    def _open_directory(self) -> Iterator[Path]:
        """Make and lock the job's directory; remove it afterwards, unless it is to be kept."""
        chosen = self._options.directory
        lock = None
        try:
            if chosen is None:
                leftovers.clear_old(Path(tempfile.gettempdir()))
                directory = Path(tempfile.mkdtemp(prefix=leftovers.PREFIX))
            else:
                directory = machine.absolute_path(chosen)
                private_files.make_directory(directory, keep_mode=leftovers.holds_other_files(directory))
            lock = _lock(directory)
            leftovers.forget_records(directory)
            for rank in range(self._options.most):
                private_files.make_directory(directory / f"rank.{rank}")
            if self._options.enclosed:
                private_files.write(directory / remote_files.ENCLOSED, self._options.enclosed)
        except OSError as error:
            raise LaunchError(f"no directory for the job's files: {error}; choose one with --output-dir") from error
        try:
            yield directory
        finally:
            if not self._gave_up_files:
                (directory / remote_files.ENCLOSED).unlink(missing_ok=True)
            if lock is not None:
                os.close(lock)
            if not self._keep:
                shutil.rmtree(directory)


@contextlib.contextmanager
def _guard_job(job: Job, metrics: Metrics, host: str | None) -> Iterator[tuple[Guardian, socket.socket]]:
    """Catch signals, and yield the socket that delivers them, and a guardian, which acts if the launcher is killed."""
    guardian = Guardian(job.name, metrics.remove_files, host)
    try:
        with catch_signals(SIGNALS, lambda *_: None) as wakeup:
            yield guardian, wakeup
    except LaunchError:
        guardian.stop()
        raise
    guardian.stop()  # not after another error, which may leave processes: they are ended with this one


def _collect_settings(options: Options, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return the ranks' settings, with the launcher's values for two that the user has not chosen.

    With `--output-dir` the tuner's log goes to the job's directory. In an elastic job ranks wait for a silent host no
    longer than the launcher does.
    """
    ours = {}
    if options.directory is not None:
        ours["autotune_log"] = str(machine.absolute_path(options.directory) / "autotune.jsonl")
    if options.elastic is not None:
        ours["host_silence"] = f"{options.elastic.silence:g}"
    return {variable_name(name): value for name, value in ours.items() if name not in chosen} | options.settings


def _lock(directory: Path) -> int:
    """Lock a directory against other jobs; raise a `LaunchError` if another job uses it."""
    try:
        return leftovers.lock(directory)
    except BlockingIOError:
        raise LaunchError(f"--output-dir: {str(directory)!r} is in use by another job: choose another") from None
