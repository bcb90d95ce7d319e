"""`engine.run`: call a function on every rank of a job, and return what it returned.

Three kinds of processes take part. The caller pickles the call into a directory of its own, starts the launcher (`job`)
and waits. The launcher is a separate process because it adopts orphans and needs a process with a single thread. It
copies the call into the job's directory on every host. Each rank (`rank`) makes the call and pickles the result into
its own directory; from there the launcher moves it to the caller's.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..compat.modules import is_installed
from ..errors.formatting import format_exception
from ..host import private_files
from ..launch.errors import JobError, LaunchError
from ..launch.process import leftovers
from ..launch.process.leftovers import ERROR, RESULT
from ..text import readable

CALL, OUTCOME = "call", "outcome.json"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    *,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    ssh_options: str | None = None,
    launch_agent: str | None = None,
    remote_python: str | None = None,
    remote_directory: str | os.PathLike[str] | None = None,
    network_interface: str | None = None,
    elastic_timeout: float | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on every rank of a new job on this host or several, and wait for its end.

    Function, arguments and results are pickled. With cloudpickle installed, `func` may be a lambda, or belong to a
    notebook or the main script; otherwise it must belong to a module that the ranks can import. The ranks have this
    process's environment and `sys.path`, so other hosts need the same modules in the same places. The output of ranks
    is shown as by `enginerun`.

    Parameters
    ----------
    func : callable
        Function to call, which calls `engine.init()` itself.
    args, kwargs : sequence, mapping
        Arguments of `func`, the same on every rank.
    num_proc, np : int, optional
        Number of ranks; by default the slots of the hosts, or 1 if none are given.
    hosts, hostfile, start_timeout, output_filename
        Same as `--hosts`, `--hostfile`, `--start-timeout` (seconds) and `--output-dir` of `enginerun`.
    ssh_port, ssh_identity_file, ssh_options, launch_agent, remote_python, remote_directory, network_interface, \
network_interfaces
        Access to other hosts; same as the options of these names of `enginerun`.
    verbose : int, optional
        If not 0, print what is started, and on which CPUs.
    executable : str, optional
        Path of the ranks' Python; by default this one.
    min_num_proc, max_num_proc, min_np, max_np, host_discovery_script
        Same as the options of these names. Each makes the job elastic, unless both bounds are `num_proc` and there is
        no discovery script. In an elastic job `func` calls a function decorated with `engine.elastic.run`.
    slots, reset_limit, cooldown_range, elastic_timeout
        Settings of elastic jobs, same as `--slots-per-host`, `--reset-limit`, `--blacklist-cooldown-range` and
        `--elastic-timeout` (seconds). In other jobs they have no effect, and one line says so.
    disable_cache, use_gloo, use_mpi, mpi_args
        Accepted for compatibility; they have no effect, and one line says so.

    Returns
    -------
    list
        Results of `func`, indexed by rank; in an elastic job, of the ranks of its last world.

    Raises
    ------
    JobError
        A rank failed, or its result cannot be pickled; its traceback comes first. Or a signal ended the job.
    LaunchError
        The job cannot start.
    TypeError
        `func` is not callable, or its arguments are no sequence or mapping, or the call cannot be pickled.
    """
    check_call(func, args, kwargs)
    size = num_proc if np is None else np
    least, most = min_num_proc if min_np is None else min_np, max_num_proc if max_np is None else max_np
    if host_discovery_script is None and {least, most} <= {size, None}:  # not elastic
        least = most = None
    options = {
        "-np": 1 if all(each is None for each in (size, least, hosts, hostfile)) else size,
        "--min-np": least,
        "--max-np": most,
        "--elastic-timeout": elastic_timeout,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "--blacklist-cooldown-range": cooldown_range,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--host-discovery-script": host_discovery_script,
        "--horovod": is_installed(),
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--disable-cache": disable_cache,
        "--output-dir": output_filename,
        "--verbose": bool(verbose),
        "--quiet": not verbose,
        "--gloo": use_gloo,
        "--mpi": use_mpi,
        "--mpi-args": mpi_args,
        "--network-interface": _join_names(network_interfaces if network_interface is None else network_interface),
        "--ssh-options": ssh_options,
        "--launch-agent": launch_agent,
        "--remote-python": remote_python,
        "--remote-directory": remote_directory,
    }
    call = pickle.dumps((sys.path, sys.executable, _pickle_call(func, args, dict(kwargs or {}))))
    with tempfile.TemporaryDirectory(prefix="enginerun-call-") as directory:
        home = Path(directory)
        lock = leftovers.lock(home)  # else another job may remove it as a leftover
        try:
            private_files.write(home / CALL, call)
            _run_launcher(home, [*arguments_of(options), "--", *rank_command(call, executable)])
            return read_results(home)
        finally:
            os.close(lock)


def rank_command(call: bytes, python: str | None = None) -> list[str]:
    """Return the command of a rank that makes a pickled call (`rank`), which is in the job's directory.

    `python` is the interpreter of the rank; None or empty: this one.
    """
    return [python or sys.executable, "-P", "-m", "engine.runner.rank", hashlib.sha256(call).hexdigest()]


def _join_names(names: str | Sequence[str] | None) -> str | None:
    return names if names is None or isinstance(names, str) else ",".join(names)


def check_call(func: Any, args: Any, kwargs: Any) -> None:
    """Raise a `TypeError` for a call that would fail on every rank, before any rank is started."""
    if not callable(func):
        raise TypeError(
            f"engine.run calls a function on every rank, and {func!r} is a {type(func).__qualname__}, not a function. "
            "A script is started by 'enginerun -np N python train.py'"
        )
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(f"engine.run takes the arguments of {func!r} as a tuple: write args=({args!r},), not {args!r}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"engine.run takes keyword arguments as a dict, such as {{'lr': 0.1}}, not {kwargs!r}")


def find_pickler() -> ModuleType:
    """Return cloudpickle if it is installed, else the pickle module."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    assert isinstance(cloudpickle, ModuleType)
    return cloudpickle


def _pickle_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    used = find_pickler()
    hint = "" if used is not pickle else ": 'pip install cloudpickle', or put it into a module that ranks can import"
    if hint and getattr(func, "__module__", "__main__") == "__main__":
        raise TypeError(
            f"engine.run cannot hand {readable.quote_value(func)} to the ranks, it belongs to the main script{hint}"
        )
    try:
        data: bytes = used.dumps((func, tuple(args), kwargs))
    except Exception as error:  # whatever a `__reduce__` may raise
        told = f"engine.run cannot pickle {readable.quote_value(func)} or its arguments"
        raise TypeError(f"{told} ({format_exception(error)}){hint}") from error
    return data


def arguments_of(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the launcher's command-line arguments for a mapping of options; skip those that are None or False."""
    for option, value in options.items():
        if value is True:
            yield option
        elif isinstance(value, tuple | list):
            yield from (option, *map(str, value))
        elif value is not None and value is not False:
            yield from (option, str(value)) if option == "-np" else (f"{option}={value}",)


def _run_launcher(home: Path, arguments: Sequence[str]) -> None:
    """Start the launcher and wait for its end. If the thread that started it ends, so do launcher and ranks."""
    # In a session of its own the launcher gets no Ctrl-C of the terminal: this process passes it on, once.
    launcher = subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.runner.job", str(os.getpid()), str(home), *arguments],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        launcher.wait()
    except BaseException:  # KeyboardInterrupt above all
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait()
        finally:
            launcher.kill()
            launcher.wait()
        raise


def read_results(home: Path) -> list[Any]:
    """Return the results of a call whose job has ended, indexed by rank.

    It raises a JobError if a rank failed or its result is missing, and a LaunchError if the job did not start.
    """
    try:
        outcome = json.loads((home / OUTCOME).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        raise JobError(
            f"the launcher of the job was killed, and the ranks with it, or it could not write to {home}"
        ) from None
    if outcome["error"] is not None:
        raise LaunchError(outcome["error"])
    if outcome["code"] != 0:
        raise _make_failure(home, outcome)
    results = []
    for rank, number in enumerate(outcome["directories"]):
        path = home / f"rank.{number}.{RESULT}"
        if (problem := outcome["incomplete"].get(path.name)) is not None:
            raise JobError(
                f"the result of rank {rank} did not arrive whole, since it could not be written here: {problem}; make "
                "room, or choose an output_filename on another disk",
                rank,
            )
        if not path.exists():
            raise JobError(f"rank {rank} ended before the function returned, with exit code 0", rank)
        results.append(pickle.loads(path.read_bytes()))
    return results


def _make_failure(home: Path, outcome: Mapping[str, Any]) -> JobError:
    rank, host = outcome["rank"], outcome["host"]
    report = "\n".join(outcome["report"])
    if rank is None:  # an elastic job, or one ended by a signal
        return JobError(report or f"the job was ended by a signal (exit code {outcome['code']})")
    who = f"rank {rank}" if host is None else f"rank {rank} on {host}"
    path = home / f"rank.{rank}.{ERROR}"
    if path.name in outcome["incomplete"] or not path.exists():  # killed, or failed before the call
        return JobError(f"{who} failed first\n{report}", rank)
    trace = path.read_text(encoding="utf-8", errors="replace")
    return JobError(f"{who} failed first:\n{trace}", rank)
