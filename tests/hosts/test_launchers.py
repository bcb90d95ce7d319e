"""A program on two hosts under torchrun itself, and under a stand-in for srun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..launch.host_jobs import need_namespaces
from . import stand_in_srun

ROOT = Path(__file__).parents[2]
ADDRESSES = ["10.79.4.1", "10.79.4.2"]
PROGRAM = ["-m", "tests.hosts.engine_program"]


@pytest.fixture(scope="module")
def enter() -> Iterator[str]:
    """Give the command that enters the network namespace of host `{host}`."""
    with need_namespaces(ADDRESSES) as option:
        yield option.removeprefix("--launch-agent=")


def finish(*commands: list[str], **environ: str) -> str:
    """Run commands concurrently; each must succeed. Return all of their output."""
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "ENGINE_SECRET": "a secret of tests", **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        told = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), told
    return "".join(out for out, _ in told)


def check(text: str) -> None:
    """Check that each of four ranks has begun two worlds, with its right place in them."""
    # They share a pipe, and an end of a line may come behind what another rank has written.
    places = sorted(json.loads(told)["place"] for told in re.findall(r"\{[^{}]*\}", text))
    assert places == sorted([rank, rank % 2, 2, rank // 2, 2] for rank in range(4) for _ in range(2))


@pytest.mark.slow
def test_torchrun_starts_ranks_on_two_hosts(enter: str) -> None:
    pytest.importorskip("torch", reason="torchrun comes with torch")
    commands = []
    for number, address in enumerate(ADDRESSES):
        options = f"--nnodes 2 --node-rank {number} --nproc-per-node 2 --master-addr {ADDRESSES[0]} --master-port 29511"
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split(), *PROGRAM]
        commands.append([*enter.format(host=address).split(), *torchrun])
    check(finish(*commands))


def test_a_stand_in_for_srun_starts_ranks_on_two_hosts(enter: str) -> None:
    """The hub is the first node of the step, and the port derives from the job's number."""
    srun = [sys.executable, stand_in_srun.__file__, f"--nodelist={','.join(ADDRESSES)}", "--ntasks-per-node=2"]
    check(finish([*srun, sys.executable, *PROGRAM], STAND_IN_ENTER=enter))
