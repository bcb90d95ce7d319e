"""Little memory: 64 MiB of /dev/shm, a limit of the control group, a rank that runs out of memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..ranks import run_ranks, start_ranks
from ..waiting import until
from . import launcher_programs
from .faults import named, others

MIB = 1 << 20


def small_shm() -> list[str]:
    """Return a command that runs another with a /dev/shm of 64 MiB, as in a container."""
    unshare = shutil.which("unshare")
    script = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    if unshare is None:
        pytest.skip("there is no unshare(1)")
    for options in (["--mount"], ["--mount", "--map-root-user"]):
        command = [unshare, *options, "sh", "-c", script, "sh"]
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip("no right to mount a /dev/shm of 64 MiB")


@pytest.fixture
def limited() -> Iterator[list[str]]:
    """Yield a command that runs another in a control group with 768 MiB of memory."""
    name = f"engine-test-{uuid.uuid4().hex[:8]}"
    for root, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / file).exists():
            break
        group.rmdir()
    else:
        pytest.skip("no right to make a control group that limits memory")
    try:
        (group / file).write_text(str(768 * MIB))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().strip(), "the control group is empty")
        group.rmdir()


@pytest.mark.slow
def test_a_small_dev_shm_is_enough() -> None:
    for mount in run_ranks(2, launcher_programs.large_work, prefix=small_shm()).values:
        assert "size=65536k" in mount


@pytest.mark.slow
def test_a_limit_on_memory_is_enough_for_what_is_used(limited: list[str]) -> None:
    run_ranks(2, launcher_programs.large_work, prefix=limited)


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_runs_out_of_memory_is_named(limited: list[str], victim: int) -> None:
    with start_ranks(2, launcher_programs.hungry, victim, False, prefix=limited) as job:
        job.wait_for("eats")
        until(lambda: not os.path.exists(f"/proc/{job.pid(victim)}/exe"), "the kernel has killed the rank")
        finished = job.finish(check=False)
    named(finished, others(finished, victim), victim, "RankDiedError", 0, 60)
    assert finished.code == 128 + signal.SIGKILL
    assert f"first failure: rank {victim} " in finished.err and "memory runs out" in finished.err


@pytest.mark.slow
def test_a_rank_that_is_refused_memory_is_named() -> None:
    finished = run_ranks(2, launcher_programs.hungry, 1, True, check=False)
    named(finished, others(finished, 1), 1, "RankRaisedError", 0, 60)
    assert "MemoryError" in finished.values[0]["text"]
    assert finished.code == 1
