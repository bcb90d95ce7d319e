"""Environments in which much is missing or odd, and a clock that is set while a job runs."""

from __future__ import annotations

import os
import re
import sys

import pytest

from .strange_machines import DONE, JOB, LAUNCH, Machine, lines

# A missing login, as under cron or in a container; locales and time zones that are not installed; Python without
# assertions, docstrings and bytecode files, with warnings as errors.
ODD = {
    "TZ": "No/Such_Zone",
    "LC_ALL": "xx_XX.UTF-8",
    "XDG_CACHE_HOME": "relative",
    "PYTHONOPTIMIZE": "2",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONWARNINGS": "error",
}
MISSING = ("HOME", "USER", "LOGNAME", "TERM", "SHELL", "LANG")
# The time of day jumps once the file CLOCK_SET exists; every Python of the job sees that.
CLOCK = """
import os, time
if "CLOCK_SET" in os.environ:
    kept = time.time
    time.time = lambda: kept() + float(os.environ["CLOCK_BY"]) * os.path.exists(os.environ["CLOCK_SET"])
"""
SETS_THE_CLOCK = """
import pathlib, os, signal, sys
import numpy, engine
engine.init()
engine.allreduce(numpy.ones(3))
pathlib.Path(os.environ["CLOCK_SET"]).touch()
engine.allreduce(numpy.ones(3))
if "fail" in sys.argv and engine.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
engine.barrier()
"""


def test_an_environment_that_lacks_much(machine: Machine) -> None:
    for name in MISSING:
        machine.environment.pop(name, None)
    seeded = ["sh", "-c", 'PYTHONHASHSEED=$RANK exec "$@"', "sh"]  # differs by rank: no order may depend on it
    run = machine.run([*LAUNCH, "--summary", *seeded, sys.executable, JOB], env=ODD, before=lambda: os.umask(0o077))
    assert lines(run) == DONE
    assert "stalls, errors: none" in run.stderr


@pytest.mark.parametrize("by", [-3600, 3600])
@pytest.mark.parametrize("end", ["well", "fail"])
def test_a_clock_that_is_set_while_the_job_runs(machine: Machine, by: int, end: str) -> None:
    (machine.home / "sitecustomize.py").write_text(CLOCK)
    set_ = {"PYTHONPATH": f"{machine.home}:{machine.site}", "CLOCK_SET": str(machine.home / "set"), "CLOCK_BY": str(by)}
    run = machine.run([*LAUNCH, "--summary", sys.executable, "-c", SETS_THE_CLOCK, end], env=set_)
    assert re.search(r"summary: 2 ranks, 0:00:\d\d$", run.stderr, re.MULTILINE), run.stderr
    assert re.search(r"throughput: +48 B of tensors in 0:00:\d\d, \d\S* MB/s a rank", run.stderr), run.stderr
    if end == "fail":
        after = re.search(r"first failure: rank 1 on .* (\d+\.\d) s after the start", run.stderr)
        assert after is not None and 0 < float(after[1]) < 60, run.stderr
    else:
        assert run.returncode == 0, run.stderr
