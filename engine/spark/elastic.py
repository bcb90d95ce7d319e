"""`engine.spark.run_elastic`: a function on ranks that may come and go, in the tasks of a Spark job.

Three kinds of processes take part. The launcher is that of every elastic job, in a process beside this one. Spark's
tasks offer themselves as hosts of one slot (`hosting`), and this process reports them to the launcher
(`task_registry`). The channel of an agent goes from the launcher through a relay (`task_relay`), which replaces ssh, to
the task's connection.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from ..compat.modules import install as install_compat
from ..compat.modules import is_installed
from ..host import private_files
from ..launch.errors import JobError, LaunchError
from ..launch.process import leftovers
from ..runner.function import CALL, arguments_of, check_call, rank_command, read_results
from . import slots, task_relay
from .collecting import Collecting, LateStartError
from .hosting import HostSpec, host_agents
from .job import (
    find_spark_reason,
    listening_address,
    own_addresses,
    pickle_call,
    read_ranks,
    read_start_timeout,
    session_of,
    settings_of,
)
from .task_registry import HOSTS, SETTINGS, SOCKET, TaskRegistry

MORE = 5.0  # seconds to wait for further tasks once there are enough
LOOK = 0.1
ROOT = str(Path(task_relay.__file__).parents[2])  # directory from which Python imports this package
FAREWELL = 5.0  # seconds that tasks have to end by themselves
ENDING = 30.0  # seconds that the launcher has to end its processes


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    cooldown_range: tuple[float, float] | None = None,
    executable: str | None = None,
    spark: Any = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on the ranks of an elastic job in a running Spark application, and wait for its end.

    The ranks run in ordinary tasks, one in each. A rank that fails is restarted in its task. Spark reruns a task whose
    process or executor is lost. Meanwhile the others go on from the last commit.

    Parameters
    ----------
    fn : callable
        Function that calls `engine.init()`, and a function wrapped by `engine.elastic.run`.
    args, kwargs : sequence, mapping
        Its arguments, the same on every rank.
    num_proc : int, optional
        Number of ranks at the start; by default as many as Spark has slots.
    min_num_proc, min_np : int, optional
        Minimum number of ranks with which the job goes on; by default `num_proc`.
    max_num_proc, max_np : int, optional
        Maximum number of ranks, and the number of tasks that are requested from Spark; by default `num_proc`.
    start_timeout : float, optional
        Seconds in which Spark must start enough tasks; 600 by default, or `HOROVOD_SPARK_START_TIMEOUT`.
    elastic_timeout : float, optional
        Seconds that the job waits for enough ranks after it has lost some; 600 by default.
    reset_limit : int, optional
        Number of resets that are allowed; the next one ends the job.
    cooldown_range : (float, float), optional
        Seconds for which a task whose ranks fail is not used: initial value and maximum; by default forever.
    env, stdout, stderr, verbose, nics, prefix_output_with_timestamp, executable, spark
        Same as in `engine.spark.run`.

    Returns
    -------
    list
        Return values of `fn`, by rank in the last world.

    Raises
    ------
    JobError
        The training is not complete; the text has the resets and the first failure.
    LaunchError
        The job cannot start: there is no session, it is one of Spark Connect, there are too few slots, or too few tasks
        come in time.
    TypeError
        Same as in `engine.run`.
    """
    check_call(fn, args, kwargs)
    session = session_of(spark)
    least = read_ranks("min_num_proc", min_np if min_num_proc is None else min_num_proc)
    most = read_ranks("max_num_proc", max_np if max_num_proc is None else max_num_proc)
    num_proc = read_ranks("num_proc", num_proc)
    slots.check_elastic(session, least or num_proc or 1)
    size = num_proc if num_proc is not None else max(least or 1, slots.default_size(session))
    least, most = least or size, most or size
    if not 1 <= least <= size <= most:
        raise LaunchError(f"num_proc is {size}; it must lie between min_num_proc, {least}, and max_num_proc, {most}")
    seconds = read_start_timeout(start_timeout)
    options = {
        "-np": size,
        "--min-np": least,
        "--max-np": most,
        "--elastic-timeout": elastic_timeout,
        "--start-timeout": seconds,
        "--reset-limit": reset_limit,
        "--blacklist-cooldown-range": cooldown_range,
        "--network-interface": nics if nics is None or isinstance(nics, str) else ",".join(nics),
        "--prefix-output-with-timestamp": prefix_output_with_timestamp,
        "--quiet": not verbose,
    }
    call = pickle_call(_make_call, (pickle_call(fn, args, kwargs), is_installed()), None)
    home = Path(tempfile.mkdtemp(prefix="enginerun-call-"))
    lock = leftovers.lock(home)
    try:
        private_files.write(home / SETTINGS, json.dumps(settings_of(env, None)).encode())
        # The empty name matches no Python interpreter, so that the executors' paths come first.
        private_files.write(home / CALL, pickle.dumps((sys.path, "", call)))
        job = _ElasticJob(session, home, executable or "", (stdout or sys.stdout, stderr or sys.stderr))
        return job.run(options, least, size, most, seconds)
    finally:
        os.close(lock)
        shutil.rmtree(home, ignore_errors=True)


def _make_call(call: bytes, horovod: bool) -> Any:
    """Make the call on a rank, with Horovod's module names if the caller has installed them."""
    if horovod:
        install_compat()
    fn, args, kwargs = pickle.loads(call)
    return fn(*args, **kwargs)


class _ElasticJob:
    """Elastic job, which may find room in Spark."""

    def __init__(self, session: Any, home: Path, executable: str, streams: tuple[TextIO, TextIO]) -> None:
        self._session = session
        self._home = home  # directory of this job
        self._executable = executable  # Python interpreter of the ranks; empty: the executors'
        self._streams = streams  # streams for stdout and stderr of the launcher
        self._over = threading.Event()
        self._spark_error: BaseException | None = None

    def run(self, options: Mapping[str, Any], least: int, size: int, most: int, seconds: float) -> list[Any]:
        """Run the job, and return the results of its ranks."""
        secret = secrets.token_hex(32)
        own = listening_address(self._session)
        with TaskRegistry(most, secret, own, self._home) as registry:
            addresses = tuple((host, registry.port) for host in own_addresses(self._session, own))
            rows = self._submit_tasks(HostSpec(addresses, secret, self._executable), most)
            tasks = threading.Thread(target=self._await_end, args=(rows,), daemon=True)
            tasks.start()
            try:
                self._await_tasks(registry, least, size, most, seconds)
                self._run_launcher(options)
            finally:
                registry.close()
                tasks.join(FAREWELL)  # tasks that have room end by themselves
                self._over.set()
                tasks.join()
        return read_results(self._home)

    def _submit_tasks(self, spec: HostSpec, most: int) -> Collecting:
        """Submit the tasks to Spark."""

        def run_task(batches: Any) -> Any:
            return host_agents(spec, batches)

        frame = self._session.range(0, most, 1, most).mapInArrow(run_task, "nothing string")
        return Collecting(self._session, frame, f"spark-{secrets.token_hex(8)}")

    def _await_end(self, rows: Collecting) -> None:
        """Wait, in a thread, until Spark has ended the job."""
        try:
            rows.await_rows(self._over, lambda: False)
        except LateStartError:
            pass  # it was cancelled after the end of the job
        except BaseException as error:  # raised again in the thread that waits
            self._spark_error = error

    def _await_tasks(self, registry: TaskRegistry, least: int, size: int, most: int, seconds: float) -> None:
        """Wait for `size` tasks, or `MORE` seconds longer than for the minimum."""
        began = time.monotonic()
        enough = 0.0
        while (came := registry.came) < size:
            self._check_spark()
            now = time.monotonic()
            enough = (enough or now) if came >= least else 0.0
            if enough and now - enough > MORE:
                return
            if now - began > seconds:
                raise LaunchError(
                    f"{came} of {most} tasks came within {seconds:g} s, and {least} are needed: Spark has no room for "
                    "them, or the executors do not start; see Spark's user interface, or give a longer start_timeout"
                )
            time.sleep(LOOK)

    def _check_spark(self) -> None:
        if self._spark_error is not None:
            raise JobError(f"Spark has ended the job: {find_spark_reason(self._spark_error)}") from self._spark_error  # type: ignore[arg-type]

    def _run_launcher(self, options: Mapping[str, Any]) -> None:
        """Start the launcher, and wait for its end."""
        home = self._home
        carry = f"import sys; sys.path.insert(0, {ROOT!r}); from {task_relay.__name__} import main; sys.exit(main())"
        words = [sys.executable, "-I", "-c", carry, str(home / SOCKET), "{host}"]
        hosts = [shutil.which("cat") or "/bin/cat", str(home / HOSTS)]
        more = {
            "--host-discovery-script": shlex.join(hosts),
            "--launch-agent": shlex.join(words),
            "--remote-python": "python3",  # ignored by the carrier
            "--remote-directory": tempfile.gettempdir(),
            "--no-binding": True,
        }
        command = rank_command((home / CALL).read_bytes())
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "engine.spark.launcher", str(os.getpid()), str(home)),
                *(*arguments_of({**options, **more}), "--", *command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        pumps = [
            threading.Thread(target=_show_output, args=pair, daemon=True)
            for pair in zip((launcher.stdout, launcher.stderr), self._streams, strict=True)
        ]
        for pump in pumps:
            pump.start()
        try:
            while launcher.poll() is None:
                self._check_spark()
                time.sleep(LOOK)
        finally:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
            try:
                launcher.wait(ENDING)
            finally:
                launcher.kill()
                launcher.wait()
                for pump in pumps:
                    pump.join(FAREWELL)


def _show_output(source: IO[bytes], stream: TextIO) -> None:
    """Show output of the launcher, line by line; an error of the user's stream does not affect the job."""
    for line in source:
        try:
            stream.write(line.decode(errors="replace"))
            stream.flush()
        except Exception:
            continue
