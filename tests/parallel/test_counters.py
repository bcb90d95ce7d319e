"""The page of counters agrees with the work done."""

from __future__ import annotations

import os
import signal

import pytest

import engine
from engine.metrics import names, page

from ..ranks import run_ranks, start_ranks
from ..waiting import measured
from . import counters_program

KINDS = names.OPERATIONS


def by_kind(fields: counters_program.Fields, name: str) -> dict[str, int]:
    width = len(fields[name]) // len(KINDS)
    return {kind: sum(fields[name][k * width : (k + 1) * width]) for k, kind in enumerate(KINDS)}


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_collective_is_counted(size: int) -> None:
    finished = run_ranks(size, counters_program.every_kind)
    rows = size * (size + 1) // 2
    for value in finished.values:
        fields = value["after"]
        assert all(not any(each) for name, each in value["before"].items() if name.startswith("collective"))
        times = {"allreduce": 5, "broadcast": 4, "allgather": 5, "alltoall": 6, "reducescatter": 7, "barrier": 8}
        assert by_kind(fields, "collectives") == times == by_kind(fields, "collective_tensors")
        assert by_kind(fields, "collective_durations") == times
        assert by_kind(fields, "collective_bytes") == {
            "allreduce": 2 * (4 << 18) + 3 * 32,
            "broadcast": 4 * 40,
            "allgather": 5 * rows * 8,
            "alltoall": by_kind(fields, "collective_bytes")["alltoall"],  # rank 0's part; ranks may differ
            "reducescatter": 7 * size * 2 * 5 * 4,
            "barrier": 0,
        }
        for k, kind in enumerate(KINDS):
            counts = fields["collective_durations"][k * page.DURATIONS : (k + 1) * page.DURATIONS]
            least = sum(n * (1 << (b - 1)) for b, n in enumerate(counts) if b)
            most = sum(n * (1 << b) for b, n in enumerate(counts))
            assert least <= by_kind(fields, "collective_ns")[kind] < most, kind
        assert value["history"] == {
            f"{kind}, {names.ALGORITHMS[k % len(names.ALGORITHMS)]}": count
            for k, count in enumerate(fields["collectives"])
            for kind in (KINDS[k // len(names.ALGORITHMS)],)
            if count
        }
        total = sum(times.values())
        assert fields["submitted"] == fields["completed"] == [total]
        assert fields["requests"] == [2 + 4 + 8]  # new names, including one for each of the barriers
        assert value["counters"]["tensors"] == total
        assert 0 <= fields["exposed_ns"][0] <= min(fields["blocked_ns"][0], sum(fields["collective_ns"]))
        assert fields["fused_bytes"] == [2 * (4 << 18) + 3 * 32]
        assert fields["fusion_capacity"] == [5 * (64 << 20)]
        assert fields["size"] == [size] and fields["state"] == [names.STATES.index("running")]
    ranks = [value["after"]["rank"][0] for value in finished.values]
    assert ranks == list(range(size))
    leader, *others = [value["after"] for value in finished.values]
    assert sum(leader["cycles"]) == total and not any(sum(fields["cycles"]) for fields in others)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "slow"), [(2, 0), pytest.param(2, 1, marks=pytest.mark.slow), (3, 2)])
def test_who_is_late_lags_and_nobody_else(size: int, slow: int) -> None:
    delay, steps = 0.04, 30

    def measure() -> None:
        found = run_ranks(size, counters_program.late, slow, delay, steps).values
        lags = [fields["lag_ns"][0] / fields["lags"][0] * 1e-9 for fields in found]
        # Barriers count as well, and no rank is late to those: half of all entries.
        assert lags[slow] > 0.4 * delay, lags
        assert all(lag < lags[slow] / 2 for rank, lag in enumerate(lags) if rank != slow), lags
        leader = found[0]
        assert leader["negotiated"] == leader["lags"] and leader["negotiation_ns"][0] * 1e-9 > 0.9 * delay * (steps - 1)
        assert all(fields["negotiated"] == [0] for fields in found[1:])
        waited = [fields["blocked_ns"][0] * 1e-9 for fields in found]
        assert min(waited[:slow] + waited[slow + 1 :]) > 0.9 * delay * (steps - 1)

    measured(measure)


def test_new_names_in_each_step_hide_nobody_who_is_late() -> None:
    delay, steps = 0.02, 20

    def measure() -> None:
        found = run_ranks(3, counters_program.late_without_names, 1, delay, steps).values
        lags = [fields["lag_ns"][0] / fields["lags"][0] * 1e-9 for fields in found]
        assert found[0]["lags"] == [steps]
        assert lags[1] > 0.8 * delay and max(lags[0], lags[2]) < lags[1] / 2, lags

    measured(measure)


def test_steps_are_counted_with_their_lengths() -> None:
    count, seconds = 20, 0.02

    def measure() -> None:
        for rank, value in enumerate(run_ranks(2, counters_program.steps, count, seconds).values):
            fields, length = value["fields"], value["seconds"]
            assert fields["steps"] == [count + 1] and sum(fields["step_durations"]) == count
            assert count * seconds * 0.9 < fields["step_ns"][0] * 1e-9 <= length
            if rank == 1:  # waits for rank 0, which computes for twice as long
                assert fields["blocked_ns"][0] * 1e-9 > 0.8 * count * seconds / 2
                exposed = fields["exposed_ns"][0] / fields["blocked_ns"][0]
                assert exposed < 0.5, "waiting for a late rank is no communication"

    measured(measure)


def test_nothing_is_made_where_nothing_is_counted() -> None:
    assert run_ranks(2, counters_program.off, options=["--no-metrics"]).values == [(0, 1), (0, 1)]


def test_worlds_one_after_the_other_and_sets_count_into_one_page() -> None:
    for rank, fields in enumerate(run_ranks(3, counters_program.worlds).values):
        assert fields["worlds"] == [2]
        assert by_kind(fields, "collectives")["allreduce"] == 2 + 10 * (rank < 2)
        assert fields["submitted"] == fields["completed"]


def test_mismatches_are_counted() -> None:
    for fields in run_ranks(2, counters_program.mismatch).values:
        assert fields["mismatches"] == [3] and fields["submitted"] == fields["completed"]


def test_what_is_overdue_is_counted_until_it_is_done() -> None:
    waiting, _ = run_ranks(2, counters_program.stalled).values
    during, after = waiting
    assert during["stalled"] == [1] and during["submitted"][0] == during["completed"][0] + 1
    assert after["stalled"] == [0] and after["stall_warnings"][0] >= 1


def test_nothing_is_overdue_in_a_world_that_has_failed() -> None:
    fields = run_ranks(2, counters_program.given_up, check=False).values[0]
    assert fields["state"] == [names.STATES.index("failed")]
    assert fields["cause"] == [names.CAUSES.index("stalled")] and fields["culprit"] == [2]
    assert fields["stalled"] == [0] and fields["stall_warnings"][0] >= 1


def test_who_has_joined_has_nothing_pending() -> None:
    for fields in run_ranks(3, counters_program.joined).values:
        assert fields["submitted"] == fields["completed"]
        assert by_kind(fields, "collectives")["allreduce"] == 3


def test_a_failure_and_its_cause_are_on_every_page() -> None:
    with start_ranks(3, counters_program.bereaved) as job:
        job.wait_for("ready.0", "ready.1", "ready.2")
        os.kill(job.pid(1), signal.SIGKILL)
        job.wait_for("known.0", "known.2")
        job.finish(check=False)


def test_readers_and_the_engine_mean_the_same() -> None:
    engine.init(metrics=True)
    try:
        assert {name: len(words) for name, words in counters_program.own().items()} == page.EXPECTED
        assert counters_program.snapshot().names == names.NAMES
        with pytest.raises(ValueError, match="no_such is no field"):
            engine.session.runtime.current_engine().tell(no_such=1)
        with pytest.raises(ValueError, match="collectives is no field"):
            engine.session.runtime.current_engine().tell(collectives=1)
    finally:
        engine.shutdown()
    for stores, name in enumerate(names.STORES):
        for wire, compression in enumerate(names.COMPRESSIONS):
            engine.init(metrics=True, stores=name, compression=compression)
            try:
                engine.barrier()
                fields = counters_program.own()
            finally:
                engine.shutdown()
            assert fields["stores"] == [stores] and fields["compression"] == [wire]
