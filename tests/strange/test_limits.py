"""Few processors, few descriptors or very many, closed standard streams."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from .strange_machines import DONE, JOB, LAUNCH, Machine, lines

CPU = Path("/sys/fs/cgroup/cpu")
UNIFIED = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def quota() -> Iterator[Path]:
    """Make a control group limited to half a processor."""
    version = 2 if (UNIFIED / "cgroup.controllers").exists() else 1
    group = (UNIFIED if version == 2 else CPU) / f"enginerun-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            if version == 2:
                (group / "cpu.max").write_text("50000 100000")
            else:
                (group / "cpu.cfs_period_us").write_text("100000")
                (group / "cpu.cfs_quota_us").write_text("50000")
        except OSError as error:
            pytest.skip(f"no quota can be set here: {error}")
        yield group
    finally:
        group.rmdir()


def test_one_processor(machine: Machine) -> None:
    cpu = min(os.sched_getaffinity(0))
    run = machine.run([*LAUNCH, sys.executable, JOB], before=lambda: os.sched_setaffinity(0, {cpu}))
    assert lines(run) == DONE
    assert "2 ranks on 1 CPU" in run.stderr and "not bound (more ranks than CPUs)" in run.stderr


def test_a_quota_of_half_a_processor(machine: Machine) -> None:
    with quota() as group:
        run = machine.run(
            [*LAUNCH, sys.executable, JOB], before=lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
        )
        assert lines(run) == DONE
        assert "quota 0.5: " in run.stderr


def test_a_few_descriptors_are_enough(machine: Machine) -> None:
    few = (64, 64)
    run = machine.run(
        [*LAUNCH, "--summary", sys.executable, JOB], before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few)
    )
    assert lines(run) == DONE
    alone = machine.run([sys.executable, JOB], before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few))
    assert alone.stdout == "rank 0 of 1 is done\n", alone.stderr


def test_too_few_descriptors_are_an_error_that_says_so(machine: Machine) -> None:
    few = (12, 12)
    run = machine.run([*LAUNCH, sys.executable, JOB], before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few))
    assert run.returncode == 2
    assert run.stderr.rstrip("\n").split("\n")[-1].startswith("enginerun: error: "), run.stderr
    assert "ulimit -n" in run.stderr and "Traceback" not in run.stderr


def test_as_many_descriptors_as_the_system_allows(machine: Machine) -> None:
    most = int(Path("/proc/sys/fs/nr_open").read_text())

    def many() -> None:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        except ValueError:  # a user who may not raise the hard limit takes all of it
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    assert lines(machine.run([*LAUNCH, sys.executable, JOB], before=many)) == DONE


def test_standard_streams_that_are_closed(machine: Machine) -> None:
    out = machine.home / "out"
    run = machine.run(
        [*LAUNCH, "--output-dir", out, sys.executable, JOB], before=lambda: [os.close(number) for number in range(3)]
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert [(out / f"rank.{rank}/stdout").read_text() for rank in range(2)] == [line + "\n" for line in DONE]


def test_a_rank_with_closed_streams_keeps_their_numbers_free_of_its_memory(machine: Machine) -> None:
    # If shared memory had the descriptor 2, text for standard error would overwrite it.
    said = machine.home / "said"
    subprocess.run(
        [sys.executable, JOB, "descriptors", said],
        env=machine.environment,
        preexec_fn=lambda: [os.close(number) for number in range(3)],
        check=True,
        timeout=90,
    )
    assert said.read_text() == "/dev/null /dev/null /dev/null"
