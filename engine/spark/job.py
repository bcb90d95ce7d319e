"""`engine.spark.run`: call a function on every rank of a new job, whose ranks the tasks of a Spark job start."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pickle
import re
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..compat.modules import is_installed
from ..config.forms import Whole, make_duration_form
from ..config.setting import read, read_variable
from ..errors.formatting import exception_text, format_exception
from ..host import network
from ..launch.errors import JobError, LaunchError
from ..launch.process.leftovers import ERROR, RESULT
from ..launch.process.plan import MOST_RANKS, OURS, without_places
from ..launch.process.rank_end import RankEnd
from ..launch.report import failure_report
from ..runner.function import check_call
from ..text import readable
from .collecting import Collecting, LateStartError, StageProgress
from .record import SCHEMA, RankRecord, read_rows
from .slots import check, context_of, default_size, held_by_others
from .task import FIRST, LAST, JobSpec, serve
from .task_listener import TaskListener

START_TIMEOUT = 600.0
SOON = 3.0  # seconds after which missing tasks are checked for whether they wait for another job
SETTLE = 3.0  # seconds that tasks have to report their end after Spark has failed the job
PREFIXES = ("ENGINE_", "HOROVOD_")  # prefixes of variables that ranks get from the driver


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    spark: Any = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on every rank of a new job in a running Spark application, and wait for its end.

    A rank is a child process of a Spark task, and has what Spark gives to a task: its slot, its executor's environment
    and modules. Function, arguments and results are pickled by cloudpickle. Output of ranks is shown here as it comes.

    Parameters
    ----------
    fn : callable
        Function that calls `engine.init()` itself.
    args, kwargs : sequence, mapping
        Its arguments, the same on every rank.
    num_proc : int, optional
        Number of ranks; by default as many as Spark has slots. With Spark Connect it must be given.
    start_timeout : float, optional
        Seconds in which Spark must start all ranks; 600 by default, or `HOROVOD_SPARK_START_TIMEOUT`.
    env : mapping, optional
        Variables of the ranks, over those of the executors and the engine's settings in this process's environment.
    stdout, stderr : file, optional
        Text streams for output of ranks, each line with its rank; by default this process's.
    verbose : int
        0: show nothing but output of ranks and errors.
    nics : str or sequence of str, optional
        Network interfaces by which ranks of different hosts reach each other; each host uses the first one that it has.
    prefix_output_with_timestamp : bool
        Whether lines begin with the time.
    executable : str, optional
        Python interpreter of the ranks; by default that of the executors.
    use_mpi, use_gloo, extra_mpi_args
        Accepted and ignored.
    spark : SparkSession, optional
        Session to run in; by default the active one.

    Returns
    -------
    list
        Return values of `fn`, by rank. The ranks of a host are consecutive.

    Raises
    ------
    JobError
        A rank failed, and the text begins with its traceback; or its task was killed, or the executor was lost.
    LaunchError
        The job cannot start: there is no session, there are too few slots, or they do not become free in time.
    TypeError
        Same as in `engine.run`.
    """
    check_call(fn, args, kwargs)
    session = session_of(spark)
    size = read_ranks("num_proc", num_proc) or default_size(session)
    patience = read_start_timeout(start_timeout)
    streams = (stdout or sys.stdout, stderr or sys.stderr)
    secret = secrets.token_hex(32)
    own = listening_address(session)
    with TaskListener(size, secret, own, streams, prefix_output_with_timestamp) as listener:
        say: Callable[[str], None] = listener.show_line if verbose else lambda line: None
        check(session, size, patience, say)
        spec = JobSpec(
            size=size,
            name=f"spark-{secrets.token_hex(8)}",
            secret=secret,
            addresses=tuple((host, listener.port) for host in own_addresses(session, own)),
            call=pickle_call(fn, args, kwargs),
            settings=settings_of(env, nics),
            executable=executable or "",
            horovod=is_installed(),
        )
        return _Job(session, spec, listener, say).run(patience)


def read_ranks(name: str, number: object) -> int | None:
    """Validate a number of ranks from a caller, if any. Raises LaunchError with its value and what is allowed."""
    try:
        return None if number is None else Whole(1, MOST_RANKS)(number)
    except ValueError as error:
        raise LaunchError(f"{name} is {readable.quote_value(number)}; expected {error}") from None


def read_start_timeout(given: float | None) -> float:
    """Return the seconds in which Spark must start the tasks: the given value, the variable's, or the default."""
    if given is not None:
        chosen = read(make_duration_form(0.001), given, "start_timeout")
    else:
        chosen = read_variable(os.environ, "HOROVOD_SPARK_START_TIMEOUT", make_duration_form(0.001))
    return START_TIMEOUT if chosen is None else float(chosen)


class _Job:
    """Job that has room in Spark; `say` shows a line."""

    def __init__(self, session: Any, spec: JobSpec, listener: TaskListener, say: Callable[[str], None]) -> None:
        self._session = session
        self._spec = spec
        self._listener = listener
        self._say = say
        self._late = threading.Event()
        self._progress = StageProgress(spec.size)

    def run(self, seconds: float) -> list[Any]:
        """Run the job, and return the results of its ranks."""
        spec, session, size = self._spec, self._session, self._spec.size

        def run_task(batches: Any) -> Any:
            return serve(spec, batches)

        frame = session.range(0, size, 1, size).mapInArrow(run_task, SCHEMA, barrier=True)
        began = time.time()
        self._listener.set_deadline(seconds, self._late.set)
        waiting = threading.Timer(SOON, self._tell_of_waiting)
        waiting.daemon = True
        waiting.start()
        try:
            with self._progress.follow_session(session):
                rows = Collecting(session, frame, spec.name).await_rows(self._late, self._runs_unseen)
        except Exception as error:
            raise self._explain_failure(error, seconds, began) from error
        finally:
            waiting.cancel()
        records = read_rows((row.name, row.data) for row in rows)
        if self._listener.came == 0:
            self._say("the executors do not reach this process: what ranks wrote is in the executors' stderr")
        if any(record.end.failed for record in records.values()):
            raise self._explain_rank_failure(records, began)
        return [_read_result(records, rank) for rank in range(size)]

    def _tell_of_waiting(self) -> None:
        """Report which jobs hold the slots, if no task has come: tasks of a barrier stage start all together."""
        if self._listener.came == 0:
            with contextlib.suppress(Exception):  # Spark may have ended
                if line := held_by_others(self._session, self._spec.size):
                    self._say(line)

    def _runs_unseen(self) -> bool:
        """Return whether Spark runs tasks of the job that cannot reach this process; such tasks are not late."""
        context, size = context_of(self._session), self._spec.size
        if context is None:
            return self._progress.all_began
        tracker = context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in context._jsc.sc().statusTracker().getJobIdsForTag(self._spec.name)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return any(
            info.numTasks == size == info.numActiveTasks + info.numCompletedTasks for info in stages if info is not None
        )

    def _explain_failure(self, error: Exception, seconds: float, began: float) -> Exception:
        """Return the exception for the user after Spark has failed the job."""
        self._listener.await_reports(SETTLE)
        if isinstance(error, LateStartError):
            return LaunchError(
                f"{self._listener.came} of {self._spec.size} tasks came within {seconds:g} s: Spark has no room for "
                "them, or the executors do not start; see Spark's user interface, or give a longer start_timeout"
            )
        told = self._listener.records
        lost = self._listener.lost
        failed = any(record.end.failed for record in (*told.values(), *lost.values()))
        found = self._explain_rank_failure({**lost, **told}, began) if failed else None
        if found is not None and found.rank not in lost:
            return found
        said = re.search(f"{re.escape(FIRST)}(.*?){re.escape(LAST)}", exception_text(error), re.DOTALL)
        if said is not None:
            number = re.search(r"rank ([0-9]{1,9})\b", said[1])
            return JobError(said[1], int(number[1]) if number else None)
        if found is not None:
            return JobError(f"{found}\nSpark: {find_spark_reason(error)}", found.rank)
        return JobError(f"Spark has ended the job: {find_spark_reason(error)}")

    def _explain_rank_failure(self, records: Mapping[int, RankRecord], began: float) -> JobError:
        """Return an error that names the rank that failed first, determined as in `enginerun`."""
        now = time.time()
        cut = {rank: RankEnd(rank, -9, now, by_launcher=True) for rank in range(self._spec.size) if rank not in records}
        ends = [cut[rank] if rank in cut else records[rank].end for rank in range(self._spec.size)]
        with tempfile.TemporaryDirectory(prefix="enginerun-report-") as home:
            for record in records.values():
                record.write(Path(home))
            cause = failure_report.find_first_failure(ends)
            assert cause is not None
            rank = cause.culprit
            hosts = {each: records[each].host if each in records else "" for each in range(self._spec.size)}
            found = records.get(rank)
            if found is not None and found.end.lost:
                others = readable.format_ranks([end.rank for end in ends if end.rank != rank])
                return JobError(f"rank {rank} on {found.host} was lost: {found.end.lost}; {others} ended with it", rank)
            if found is not None and ERROR in found.files:
                trace = found.files[ERROR].decode(errors="replace")
                return JobError(f"rank {rank} on {found.host} failed first:\n{trace}", rank)
            lines = "\n".join(failure_report.failure_lines(cause, ends, Path(home), began, hosts))
            return JobError(f"rank {rank} on {hosts[rank]} failed first\n{lines}", rank)


def session_of(spark: Any = None) -> Any:
    """Return the session to run in: the given one, or else the active one.

    Raises LaunchError if no session is active, or pyspark is not installed.
    """
    if spark is not None:
        return spark
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise LaunchError("engine.spark needs pyspark 4: pip install '.[spark]' in the source tree") from error
    try:
        return SparkSession.active()  # of this thread, or else the default session of the application
    except PySparkRuntimeError as error:
        raise LaunchError(
            "there is no active Spark session: make one by SparkSession.builder.getOrCreate(), or give spark="
        ) from error


def find_spark_reason(error: Exception) -> str:
    """Return the line of Spark's exception that says why it has ended a job, without the stack."""
    text = exception_text(error)
    found = re.search(r"Job aborted due to stage failure: ([^\n]*)|([^\n]*(?:ExecutorLost|cancelled)[^\n]*)", text)
    if found:
        return (found[1] or found[2]).strip()
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def _read_result(records: Mapping[int, RankRecord], rank: int) -> Any:
    record = records.get(rank)
    if record is None or RESULT not in record.files:
        raise JobError(f"rank {rank} ended before the function returned, with exit code 0", rank)
    return pickle.loads(record.files[RESULT])


def pickle_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Pickle a call; raise TypeError if that is impossible."""
    from pyspark import cloudpickle

    try:
        data: bytes = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    except Exception as error:  # whatever a `__reduce__` may raise
        told = f"engine.spark.run cannot pickle {readable.quote_value(fn)} or its arguments"
        raise TypeError(f"{told} ({format_exception(error)})") from error
    return data


def settings_of(env: Mapping[str, str] | None, nics: str | Sequence[str] | None) -> dict[str, str]:
    """Return the variables of the ranks, in addition to those of the executors."""
    here = {name: value for name, value in without_places(os.environ).items() if name.startswith(PREFIXES)}
    place = re.compile(
        r"ENGINE_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|JOB|SECRET|OUTPUT_DIR)$|HOROVOD_(LOCAL_|CROSS_)?(RANK|SIZE)$"
    )
    chosen = {name: value for name, value in here.items() if name not in OURS and not place.match(name)}
    if nics:
        chosen["ENGINE_INTERFACE"] = nics if isinstance(nics, str) else ",".join(nics)
    return chosen | {name: str(value) for name, value in (env or {}).items()}


def has_remote_executors(session: Any) -> bool:
    """Return whether executors may be on other hosts than this process."""
    context = context_of(session)
    return context is None or re.match(r"local($|\[|-cluster\[)", str(context.master)) is None


def listening_address(session: Any) -> str | None:
    """Return the address on which this process listens for its tasks; None: all addresses of this host.

    It is that of `spark.driver.bindAddress`, if the user has chosen one for Spark's own ports, and the loopback address
    if Spark is local.
    """
    if not has_remote_executors(session):
        return "127.0.0.1"
    context = context_of(session)
    chosen = "" if context is None else context.getConf().get("spark.driver.bindAddress", "")
    try:
        address = network.resolve(chosen, 0)[0].host if chosen else "::"
    except OSError as error:
        raise LaunchError(f"spark.driver.bindAddress={chosen}: {error.strerror}") from None
    return None if ipaddress.ip_address(address).is_unspecified else address


def own_addresses(session: Any, bound: str | None) -> list[str]:
    """Return the addresses of this process's host, first the one by which Spark's executors reach it.

    `bound` is the result of `listening_address`: the only address on which this process listens, or None.
    """
    if not has_remote_executors(session):
        return ["127.0.0.1"]
    context = context_of(session)
    known = [] if context is None else [context.getConf().get("spark.driver.host", "")]
    addresses = [bound] if bound is not None else [*network.own_addresses(), "127.0.0.1"]
    return [*dict.fromkeys([*filter(None, known), *addresses])]
