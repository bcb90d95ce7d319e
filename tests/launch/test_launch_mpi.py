"""One program under the mpirun of Open MPI and of MPICH, on one host and on two."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.environments import ROOT

from ..mpi import run_mpirun
from .host_jobs import need_namespaces
from .launch_jobs import Launcher

ADDRESSES = ["10.79.1.1", "10.79.1.2"]
# Called as ssh is: options, a host, a command. Each host has a name of its own, by which MPI tells hosts apart.
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec {enter} unshare --uts sh -c 'hostname node'${{host##*.}}'; exec sh -c "$*"' sh "$@"
"""


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[str]:
    """Command that enters the one of two network namespaces that is `{host}`."""
    with need_namespaces(ADDRESSES) as option:
        yield option.removeprefix("--launch-agent=")


def mpirun(
    launcher: Launcher, mpi: Path, *words: object, enter: str = "", passed: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Run the program on this machine, or with two ranks on each of two hosts; return the exit code and the output."""
    open_mpi = mpi.parent.name.endswith("openmpi")
    command = [str(mpi / "mpirun")]
    if enter:
        agent = launcher.home / "agent"
        agent.write_text(AGENT.format(enter=enter.format(host="$host")))
        agent.chmod(0o755)
        command = [*enter.format(host=ADDRESSES[0]).split(), *command]
        hosts = ",".join(f"{address}:2" for address in ADDRESSES)
        if open_mpi:
            command += ["--prtemca", "plm_ssh_agent", str(agent), "-H", hosts]
            command += [word for name in ("PYTHONPATH", "HERE", "RANKS_TEST", *passed) for word in ("-x", name)]
        else:
            command += ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", hosts, "-n", "4"]
    else:
        command += ["--oversubscribe"] * open_mpi + ["-n", "2"]
    program = [str(mpi / "python"), "-m", "tests.launch.mpi_program", *map(str, words)]
    # A shell between the launcher and the rank, as in many a batch script.
    command += ["sh", "-c", f"{shlex.join(program)}; exit $?"]
    return run_mpirun(command, ROOT, launcher.environment)


def told(launcher: Launcher, name: str) -> list[str]:
    return [path.read_text() for path in sorted(launcher.home.glob(f"{name}.*"))]


def test_ranks_of_one_host_find_each_other(launcher, mpi):
    code, said = mpirun(launcher, mpi)
    assert code == 0, said
    for world in range(2):
        assert told(launcher, f"told.{world}") == [f"({rank}, 2, {rank}, 2, 0) 3" for rank in range(2)], said


def test_ranks_of_two_hosts_agree_over_mpi_where_to_meet(launcher, mpi, two_hosts):
    code, said = mpirun(launcher, mpi, enter=two_hosts)
    assert code == 0, said
    expected = [f"({rank}, 4, {rank % 2}, 2, {rank // 2}) 10" for rank in range(4)]
    assert [told(launcher, f"told.{world}") for world in range(2)] == [expected] * 2, said


def test_without_mpi4py_what_is_missing_is_told_and_may_be_given(launcher, mpi, two_hosts):
    code, _ = mpirun(launcher, mpi, "without", enter=two_hosts)
    errors = told(launcher, "error")
    assert code != 0 and errors
    for error in errors:
        assert "there is no ENGINE_SECRET" in error and "With mpi4py (`pip install mpi4py`) they agree on it" in error
    launcher.environment |= {"ENGINE_SECRET": "a secret of tests", "ENGINE_HUB": f"{ADDRESSES[0]}:4711"}
    code, said = mpirun(launcher, mpi, "without", enter=two_hosts, passed=("ENGINE_SECRET", "ENGINE_HUB"))
    assert code == 0, said
    assert len(told(launcher, "told.1")) == 4


def test_a_rank_that_never_begins_is_not_waited_for_without_end(launcher, mpi, two_hosts):
    """MPI_Init itself has no deadline, and mpi4py blocks all other threads of the process meanwhile."""
    launcher.environment["ENGINE_START_TIMEOUT"] = "3"
    code, said = mpirun(launcher, mpi, "never", enter=two_hosts, passed=("ENGINE_START_TIMEOUT",))
    assert code != 0, said
    errors = told(launcher, "error")
    assert errors, said
    assert "RendezvousError: rank " in errors[0] and "MPI_Init has not ended within 3 s" in errors[0]
    assert "Does each of the 4 ranks call engine.init(), and has mpi4py?" in errors[0]
