"""The stand-in for libcuda keeps the driver's promises in any allowed order, and detects reliance on more.

The litmus programs validate it: `python -m benchmarks.gpu.litmus` runs the same binary with a real driver.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ..standins import HERE, POLICIES, ROOT, build

Run = Callable[..., tuple[int, str]]

PROGRAMS = re.findall(r"^  X\((\w+)\)", (ROOT / "benchmarks/gpu/litmus/programs.h").read_text(), re.MULTILINE)
CHECKS = re.findall(r"^    CHECK\((\w+)\)", (Path(__file__).parent / "checks.c").read_text(), re.MULTILINE)
MUTANTS = re.findall(
    r"X\((\w+)\)", (HERE / "cuda/internal.h").read_text().partition("MUTANTS(X)")[2].partition("enum")[0]
)
SEEDS = range(1, int(os.environ.get("LITMUS_SEEDS", "6")) + 1)
CRASHES = "writes_far_beside_an_allocation_crash"

# Programs that detect each fault of a stand-in.
KILLERS = {
    "event_covers_too_much": "record_covers_nothing_later",
    "wait_covers_too_much": "wait_covers_no_more_than_the_record",
    "wait_does_nothing": "wait_orders_two_streams",
    "rerecord_moves_waits": "record_again_moves_no_wait",
    "rerecord_is_ignored": "record_again_moves_queries",
    "unrecorded_wait_blocks": "unrecorded_wait_is_nothing",
    "unrecorded_query_not_ready": "unrecorded_query_succeeds",
    "query_always_ready": "query_tells_whether_a_stream_is_empty",
    "synchronize_does_nothing": "synchronize_returns_when_all_is_done",
    "stream_out_of_order": "stream_runs_in_order",
    "stream0_no_barrier": "blocking_streams_wait_for_stream0",
    "stream0_stops_all": "non_blocking_streams_pass_stream0",
    "stream0_crosses_contexts": "stream0_is_of_its_context",
    "destroyed_stream_drops_work": "stream_destroyed_while_pending",
    "destroyed_event_drops_wait": "event_destroyed_while_pending",
    "arguments_read_late": "arguments_are_copied_at_the_launch",
    "copy_reads_early": "pinned_memory_is_read_when_the_copy_runs",
    "pageable_copy_reads_late": "pageable_memory_is_read_at_the_call",
    "host_access_allowed": "host_may_not_touch_device_memory",
    "no_guard": CRASHES,
    "no_poison": "freed_memory_is_poisoned",
    "capture_executes": "capture_runs_nothing",
    "capture_forgets_order": "graph_keeps_the_order",
    "unsafe_calls_allowed": "query_of_another_thread_spoils_a_capture",
    "relaxed_is_refused": "relaxed_threads_may_query",
    "thread_local_is_global": "local_captures_concern_nobody_else",
    "unjoined_allowed": "captured_streams_must_be_joined",
    "events_need_no_context": "events_across_contexts",
    "contexts_are_shared": "context_is_of_the_thread",
    "elapsed_of_pending": "elapsed_time_needs_both_events",
    "priority_not_clamped": "priorities_are_clamped",
    "clock_without_waits": "wait_orders",
    "clock_without_queries": "query_tells_the_host",
    "clock_without_launches": "launch_takes_what_the_host_wrote",
    "clock_without_streams": "order_goes_through_a_third_stream",
    "clock_knows_all": "missing_wait_is_found",
}


def runs() -> list[dict[str, object]]:
    """Return all policies; the random one comes with several seeds."""
    return [{"policy": "eager"}, {"policy": "lazy"}, *({"policy": "drawn", "seed": seed} for seed in SEEDS)]


def as_it_should(name: str, status: int) -> bool:
    """Return whether a program ended like one that found no error."""
    return status == (-signal.SIGSEGV if name == CRASHES else 0)


def test_programs_are_those_of_the_binary(litmus: Path, checks: Path, program: Run) -> None:
    assert len(PROGRAMS) >= 25
    assert program(litmus, "nobody")[0] == 2
    assert set(PROGRAMS).isdisjoint(CHECKS)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_litmus(name: str, litmus: Path, program: Run) -> None:
    """Each promise of the driver holds under every policy."""
    for settings in runs():
        status, text = program(litmus, name, **settings)
        assert status == 0, (settings, text)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CHECKS)
def test_finds(name: str, checks: Path, program: Run) -> None:
    """Only the stand-in detects these errors, under any timing."""
    for settings in runs():
        status, text = program(checks, name, **settings)
        assert as_it_should(name, status), (settings, status, text)


def test_every_mutant_has_a_killer() -> None:
    assert {*KILLERS, "none"} == set(MUTANTS)


@pytest.mark.sample(5)
@pytest.mark.parametrize("mutant", KILLERS)
def test_mutant_is_killed(mutant: str, litmus: Path, checks: Path, program: Run) -> None:
    """A stand-in with this fault fails the program that is named for the promise, under every policy."""
    name = KILLERS[mutant]
    binary = litmus if name in PROGRAMS else checks
    for policy in POLICIES:
        status, text = program(binary, name, patience=200, policy=policy, mutant=mutant, deadline=1000)
        assert not as_it_should(name, status), policy
        assert status not in (2, 70, 77), text


SUMS = [name for name in PROGRAMS if "sum" in name or name == "graph_goes_before_its_communicator"]


@pytest.mark.parametrize("name", SUMS)
def test_sums_see_that_a_graph_runs_in_another_order(name: str, litmus: Path, program: Run) -> None:
    """The graph that is captured with NCCL has a copy, a sum of two ranks, and a copy."""
    assert len(SUMS) == 5
    status, text = program(litmus, name, policy="lazy", mutant="capture_forgets_order", deadline=1000)
    assert status == 1
    assert "not so" in text


def test_sums_on_one_device(litmus: Path, program: Run, tmp_path: Path) -> None:
    """There are two ranks where NCCL lets them share the device, otherwise one; without NCCL the sums are skipped."""
    sharing = build(tmp_path, 23007) / "libnccl.so.2"
    for name in SUMS:
        for library in ({}, {"ENGINE_NCCL_LIBRARY": str(sharing)}):
            status, text = program(litmus, name, devices=1, more=library)
            assert status == 0, (library, text)
    status, text = program(litmus, SUMS[0], more={"ENGINE_NCCL_LIBRARY": str(tmp_path / "nothing")})
    assert (status, text.strip()) == (77, "skipped: this needs NCCL, which ENGINE_NCCL_LIBRARY names")


def test_reports_tell_the_seed(checks: Path, program: Run) -> None:
    _, text = program(checks, "missing_wait_is_found", policy="drawn", seed=17, mutant="clock_without_waits", quiet=0)
    assert "[drawn, seed 17]" in text


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"fail": "cuInit:1:999"}, "CUDA_ERROR_UNKNOWN"),
        ({"fail": "cuMemHostAlloc:1:2"}, "CUDA_ERROR_OUT_OF_MEMORY"),
        ({"devices": 0}, "CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_programs_fail_as_ordered_by_the_environment(
    settings: dict[str, object], wanted: str, litmus: Path, program: Run
) -> None:
    status, text = program(litmus, "unrecorded_query_succeeds", **settings)
    assert status == 1
    assert f"returned {wanted}" in text


def test_setting_that_nobody_knows_is_refused(litmus: Path, program: Run) -> None:
    for settings in ({"policy": "hasty"}, {"mutant": "unknown"}, {"fail": "cuInit"}):
        assert program(litmus, "unrecorded_query_succeeds", **settings)[0] == 70
