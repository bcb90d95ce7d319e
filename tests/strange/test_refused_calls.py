"""Pythons that lack system calls run jobs; systems that refuse these calls are named at once."""

from __future__ import annotations

import errno
import sys
from functools import partial
from pathlib import Path

import pytest

from .strange_machines import DONE, JOB, LAUNCH, Machine, lines, refuse

# A portable build of Python, as conda's and uv's were; and an open-file limit of 10**9, for which a kernel
# without close_range makes as many calls in a loop.
OLD_PYTHON = """
import os, signal
for module, names in ((os, "memfd_create pidfd_open P_PIDFD MFD_CLOEXEC"), (signal, "pidfd_send_signal")):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sysconf = os.sysconf
os.sysconf = lambda name: 1073741816 if name == "SC_OPEN_MAX" else sysconf(name)
"""


def test_a_python_without_the_calls_runs_jobs(machine: Machine) -> None:
    (machine.home / "sitecustomize.py").write_text(OLD_PYTHON)
    old = {"PYTHONPATH": f"{machine.home}:{machine.site}"}
    run = machine.run(
        [*LAUNCH, "--summary", sys.executable, JOB], env=old, before=partial(refuse, ["close_range"], errno.ENOSYS)
    )
    assert lines(run) == DONE
    assert "collectives" in run.stderr, run.stderr  # the pages of counters were readable
    alone = machine.run([sys.executable, JOB], env={**old, "ENGINE_METRICS": "1"})
    assert alone.stdout == "rank 0 of 1 is done\n", alone.stderr


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", ["pidfd_open", "memfd_create"])
def test_a_system_that_refuses_a_call_is_named_at_once(machine: Machine, call: str, error: int) -> None:
    refused = partial(refuse, [call], error)
    job = machine.run([*LAUNCH, "--output-dir", machine.home / "out", sys.executable, JOB], before=refused)
    assert job.returncode == 2
    assert f"refuses {call}" in job.stderr and "seccomp" in job.stderr
    assert "Traceback" not in job.stderr
    assert [line for line in job.stderr.split("\n") if "error" in line][-1].startswith("enginerun: error: ")
    alone = machine.run([sys.executable, JOB], before=refused)
    assert alone.returncode == 1
    assert f"refuses {call}" in alone.stderr and "seccomp" in alone.stderr
    assert alone.stderr.rstrip("\n").split("\n")[-1].startswith("engine_ext.errors.RendezvousError: ")


def test_ranks_say_what_their_system_refuses(machine: Machine, tmp_path: Path) -> None:
    run = machine.run(
        [*LAUNCH, "--no-metrics", "--output-dir", tmp_path / "out", sys.executable, JOB],
        before=partial(refuse, ["memfd_create"]),
    )
    assert run.returncode == 1
    for rank in range(2):  # rank 0 could not make it, and has told the other
        said = (tmp_path / f"out/rank.{rank}/stderr").read_text()
        assert "rank 0 cannot make the memory that the ranks share: the system refuses memfd_create" in said
