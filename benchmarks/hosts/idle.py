"""Cost of an idle job for each host: its ranks, its agent, and the launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import paths
from benchmarks.common.processes import RankError
from benchmarks.hosts.places import HostPlaces

START_LIMIT = 120.0
_PROGRAM = """
import time, numpy, engine
engine.init()
engine.allreduce(numpy.ones(1 << 20, numpy.float32), name="first")
print("up", flush=True)
time.sleep(3600)
"""


def measure_idle_job(places: HostPlaces, seconds: float) -> list[dict[str, Any]]:
    """Start a job by `enginerun`, and measure the processor time of all its processes while it is idle.

    The measurement lasts `seconds`. Rows have `where`: the number of a host, or "launcher"; and `cores`: seconds of
    processor time per second.
    """
    command = [*places.get_launch_prefix(), sys.executable, "-m", "engine.launch", *places.launch_options()]
    log = paths.get_output_path("logs/hosts-idle.log")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(paths.ROOT))))
    }
    with log.open("wb") as errors:
        job = subprocess.Popen(
            [*command, "--", sys.executable, "-c", _PROGRAM],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait_until_up(job, log, places.ranks)
        places_of = {str(host): places.get_process_id(host) for host in range(places.hosts)}
        time.sleep(2.0)  # The end of the start-up does not count as idle time.
        before, start = _read_used_time(job.pid, places_of), time.perf_counter()
        time.sleep(seconds)
        after, spent = _read_used_time(job.pid, places_of), time.perf_counter() - start
    finally:
        job.send_signal(signal.SIGINT)
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
    return [
        {
            "where": where,
            "cores": sum(after[where].get(task, used) - used for task, used in tasks.items()) / 1e9 / spent,
        }
        for where, tasks in before.items()
    ]


def _wait_until_up(job: subprocess.Popen[bytes], log: Path, ranks: int) -> None:
    deadline = time.monotonic() + START_LIMIT
    while len(re.findall(r"stdout>:up$", log.read_text(), re.MULTILINE)) < ranks:
        if job.poll() is not None or time.monotonic() > deadline:
            raise RankError(f"the idle job did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


def _read_used_time(launcher: int, first: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the nanoseconds that each thread has run, by host and for the launcher.

    `first` has the first process of each host; the others of the host are in its PID namespace.
    """
    namespaces = {os.readlink(f"/proc/{pid}/ns/pid"): where for where, pid in first.items()}
    used: dict[str, dict[str, int]] = {where: {} for where in (*first, "launcher")}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where = namespaces.get(os.readlink(process / "ns/pid"))
            if where is None and int(process.name) == launcher:
                where = "launcher"
            if where is not None:
                for task in (process / "task").iterdir():
                    used[where][task.name] = int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # It has ended, or belongs to another user.
    return used
