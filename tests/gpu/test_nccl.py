"""The stand-in for libnccl: real processes, which it lets hang, fail and die like NCCL, with a reason."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from ..standins import build
from ..waiting import until
from .jobs import Job


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 4])
def test_functions_against_numpy(size: int, libraries: Path, tmp_path: Path) -> None:
    Job(libraries, tmp_path, size, "functions", policy="eager").succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["eager", "lazy", "drawn"])
def test_sends_and_receives(policy: str, libraries: Path, tmp_path: Path) -> None:
    """Lazy ranks run a kernel because a peer waits for it."""
    Job(libraries, tmp_path, 3, "alltoall", policy=policy).succeeds()


@pytest.mark.parametrize("program", ["halves", "group", "large"])
def test_numbers(program: str, libraries: Path, tmp_path: Path) -> None:
    Job(libraries, tmp_path, 3 if program == "halves" else 2, program).succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["count", "dtype", "op", "root", "function"])
def test_mismatch_names_both_ranks(what: str, libraries: Path, tmp_path: Path) -> None:
    Job(libraries, tmp_path, 2, "mismatch", what).succeeds()


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", ["event_in_progress", "use_in_progress", "first_use"])
@pytest.mark.parametrize("seed", [1, 2])
def test_non_blocking_communicators(program: str, seed: int, libraries: Path, tmp_path: Path) -> None:
    """The kernel comes later than the call, on another thread, whatever the call returned."""
    Job(libraries, tmp_path, 2, program, seed=seed).succeeds()


def test_blocking_communicators_block_at_first_use(libraries: Path, tmp_path: Path) -> None:
    Job(libraries, tmp_path, 2, "first_use", "blocking").succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["eager", "lazy", "drawn"])
def test_abort_lets_a_new_world_begin(policy: str, libraries: Path, tmp_path: Path) -> None:
    Job(libraries, tmp_path, 3, "abort", policy=policy).succeeds()


def test_free_under_a_running_kernel_is_found(libraries: Path, tmp_path: Path) -> None:
    Job(libraries, tmp_path, 2, "freed_too_early").succeeds()


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["grouped", "one-by-one"])
def test_two_orders_with_one_place_are_a_deadlock(how: str, libraries: Path, tmp_path: Path) -> None:
    Job(libraries, tmp_path, 2, "two_orders", how, slots=1).succeeds()


@pytest.mark.parametrize("slots", [1, 2])
def test_one_order_is_none(slots: int, libraries: Path, tmp_path: Path) -> None:
    Job(libraries, tmp_path, 2, "two_orders", "same", slots=slots).succeeds()


def test_two_orders_with_place_for_both_are_none(libraries: Path, tmp_path: Path) -> None:
    """So the deadlock above is due to the lack of room."""
    statuses, texts = Job(libraries, tmp_path, 2, "two_orders", slots=2).end()
    assert statuses == [1, 1]
    assert all("assert failures" in text for text in texts)


@pytest.mark.parametrize(
    ("program", "settings", "text"),
    [
        ("two_threads", {"linger": 1}, "two threads are in NCCL at once"),
        ("other_thread", {"one_thread": 1}, "is called by another thread"),
    ],
)
def test_threads_in_one_communicator_abort(
    program: str, settings: dict[str, object], text: str, libraries: Path, tmp_path: Path
) -> None:
    statuses, texts = Job(libraries, tmp_path, 1, program, **{**settings, "quiet": 0}).end()
    assert statuses == [-signal.SIGABRT]
    assert text in texts[0]


def test_threads_one_after_the_other_are_allowed(libraries: Path, tmp_path: Path) -> None:
    Job(libraries, tmp_path, 1, "other_thread").succeeds()


def test_death_before_a_kernel_hangs_the_others(libraries: Path, tmp_path: Path) -> None:
    statuses, texts = Job(libraries, tmp_path, 3, "death").end()
    assert statuses == [0, 0, -signal.SIGKILL], texts


def test_death_in_init_ends_with_an_abort(libraries: Path, tmp_path: Path) -> None:
    job = Job(libraries, tmp_path, 2, "death_in_init")
    until(lambda: job.ranks[1].poll() is not None, "a death")
    (tmp_path / "dead").touch()
    statuses, texts = job.end()
    assert statuses == [0, -signal.SIGKILL], texts


@pytest.mark.parametrize("program", ["injected", "destroy_waits"])
def test_faults(program: str, libraries: Path, tmp_path: Path) -> None:
    Job(libraries, tmp_path, 2, program).succeeds()


def test_hanging_call_does_not_return(libraries: Path, tmp_path: Path) -> None:
    job = Job(libraries, tmp_path, 1, "group", fail="ncclGroupEnd:1:hang")
    with pytest.raises(subprocess.TimeoutExpired):
        job.ranks[0].communicate(timeout=2)
    job.ranks[0].kill()
    job.end()


def test_two_ranks_on_one_device_are_refused(libraries: Path, tmp_path: Path) -> None:
    texts = Job(libraries, tmp_path, 2, "init_fails", "together", devices=[3, 3]).succeeds()
    assert all("Duplicate GPU detected : rank 0 and rank 1" in text for text in texts)


@pytest.mark.slow
def test_versions(libraries: Path, tmp_path: Path) -> None:
    """An older one lacks later functions, works with itself, and refuses others."""
    old = build(tmp_path / "old", 21805)
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", old / "libnccl.so.2"], text=True, capture_output=True
    ).stdout
    assert " ncclCommInitRankConfig" in symbols
    assert " ncclCommRevoke" not in symbols
    assert " ncclMemAlloc" not in symbols
    Job(old, tmp_path, 2, "group").succeeds()
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    texts = Job([libraries, old], mixed, 2, "init_fails", "together").succeeds()
    assert all("Mismatched NCCL version" in text for text in texts)
