"""Frozen batches: gradients on GPUs travel in the same batches in every pass, however late ranks are.

No rank waits for gradients that may not come. The GPUs are pretended; ranks are threads, and the coordinator is the
engine's.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import RankStalledError
from engine.metrics import page

from ..waiting import be_late, measured, until
from .frozen_worlds import COUNTS, SMALL, Entry, Passes, backward, world
from .pretended_gpu import Optimizer, PretendedGpu, PretendedTensor

NEVER = 10_000.0  # cycle time in milliseconds, too long for any test to wait for
SOON = 0.5  # seconds; no batch is given up for its age within them

layouts = pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 0), (0, 1, 1)], ids=lambda hosts: "".join(map(str, hosts)))


def passes(
    rank: int, native: Any, gpu: PretendedGpu, count: int = 8, most: float = 0.001, seed: int = 0, dropped: int = 0
) -> Passes:
    """Tensors that travelled together in each of `count` passes, with random delays and missing gradients."""
    drawn = random.Random(f"{rank} {seed}")
    optimizer = Optimizer(native, COUNTS)
    found = []
    for _ in range(count):
        begin = gpu.count()
        order = [k for k in reversed(range(len(COUNTS))) if not dropped or drawn.randrange(dropped)]
        backward(optimizer, order, lambda: drawn.random() * most * (drawn.random() < 0.3))
        found.append(gpu.travelled(begin, gpu.count()))
    return found


def expect_frozen(found: list[Passes]) -> None:
    """Check that gradients travelled alone in the first pass, and in the same batches in all others, on all ranks."""
    for each in found:
        assert sorted(each[0]) == [(count,) for count in COUNTS]
        for later in each[1:]:
            assert sorted(later) == sorted(found[0][1])
    batches = found[0][1]
    assert sorted(count for batch in batches for count in batch) == COUNTS
    assert 2 < len(batches) < len(COUNTS) / 2, batches
    for batch in batches:
        assert list(batch) == sorted(batch, reverse=True), "in the order of the first pass"
        assert 4 * sum(batch) <= SMALL


@layouts
def test_batches_recur_whoever_is_late(hosts: tuple[int, ...]) -> None:
    """Holds within a world, and in the next one, which is another run of the program."""
    runs = []
    for seed in range(2):
        with world(hosts) as each:
            found = each.run(lambda *rank: passes(*rank, seed=seed))  # noqa: B023
            rows = [row for row in each.threads.engines[0].history() if row["frozen"]]
            counted = page.read(each.threads.pages[0])
        expect_frozen(found)
        assert counted is not None
        closed = dict(zip(counted.names["reasons"], counted.fields["cycles"], strict=True))
        assert len(rows) == closed["frozen"] == 7 * len(found[0][1]), rows
        runs.append(sorted(found[0][1]))
    assert runs[0] == runs[1]


def test_batches_recur_where_ranks_lack_gradients() -> None:
    """A gradient of any rank travels in its batch; one of no rank moves nothing, and the others keep their order."""
    with world((0, 0, 0)) as each:
        found = each.run(lambda *rank: passes(*rank, dropped=20))
    expect_frozen(found)


def test_without_freezing_they_do_not_recur() -> None:
    """Shows that the tested property does not hold by itself."""
    with world((0, 0), device_sums="ordered") as each:
        found = each.run(lambda *rank: passes(*rank, count=20))
        assert not any(row["frozen"] for row in each.threads.engines[0].history())
    assert len({tuple(sorted(each)) for each in found[0]}) > 1


def test_what_no_rank_has_moves_nothing() -> None:
    def program(_rank: int, native: Any, gpu: PretendedGpu) -> Passes:
        optimizer = Optimizer(native, COUNTS)
        found = []
        for turn in range(4):
            begin = gpu.count()
            backward(optimizer, [k for k in range(len(COUNTS)) if turn < 2 or k != 7], lambda: 0.0)
            found.append(gpu.travelled(begin, gpu.count()))
        return found

    with world((0, 0), cycle_time_ms=NEVER) as each:
        found = each.run(program)
    for passed in found:
        without = sorted(tuple(count for count in batch if count != COUNTS[7]) for batch in passed[1])
        assert sorted(passed[2]) == sorted(passed[3]) == without


def test_two_optimizers_share_no_batch() -> None:
    """Their gradients alternate, and one of the optimizers skips some passes."""
    other = [count + 1000 for count in COUNTS]

    def program(rank: int, native: Any, gpu: PretendedGpu) -> Passes:
        drawn = random.Random(rank)
        optimizers = [Optimizer(native, COUNTS, 0), Optimizer(native, other, 1)]
        found = []
        for turn in range(9):
            begin = gpu.count()
            for k in range(len(COUNTS)):
                for optimizer in optimizers[: 1 if turn % 3 == 2 else 2]:
                    be_late(drawn.random() * 0.0005)
                    optimizer.bring(k)
            for optimizer in optimizers[: 1 if turn % 3 == 2 else 2]:
                optimizer.group.announce()
            for optimizer in optimizers[: 1 if turn % 3 == 2 else 2]:
                optimizer.finish()
            found.append(sorted(gpu.travelled(begin, gpu.count())))
        return found

    with world((0, 0), fusion_threshold=64 << 20) as each:
        found = each.run(program)
    for passed in found:
        assert passed[2] == [tuple(COUNTS)]
        assert all(one == [tuple(COUNTS)] + [tuple(other)] * (turn % 3 != 2) for turn, one in enumerate(passed[1:], 1))


# ---- who waits -------------------------------------------------------------------------------------------------------


def test_blocking_calls_pass_what_is_held() -> None:
    """They wait for no cycle and no gradient, and break no batch."""

    def program(_rank: int, native: Any, gpu: PretendedGpu) -> tuple[list[Entry], list[float]]:
        optimizer = Optimizer(native, COUNTS)
        for _ in range(2):
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
        begin, times = gpu.count(), []
        for k in range(len(COUNTS)):
            optimizer.bring(k)
            if k % 10 == 5:
                for tensor in (np.ones(3, np.float32), PretendedTensor(3)):
                    since = time.monotonic()
                    native.allreduce(tensor, tensor, f"blocking {type(tensor)}", engine.Sum, 1.0, 1.0, True).wait()
                    times.append(time.monotonic() - since)
        optimizer.finish()
        return [batch for batch in gpu.travelled(begin, gpu.count()) if batch != (3,)], times

    def measure() -> None:
        with world((0, 0), cycle_time_ms=NEVER, fusion_threshold=64 << 20) as each:
            for batches, times in each.run(program):
                assert batches == [tuple(COUNTS)]
                assert max(times) < SOON, times

    measured(measure)


def test_set_that_has_changed_is_not_waited_for() -> None:
    """A parameter is removed: the pass that shows it ends at once, unfrozen, and the next one is frozen without it."""

    def program(_rank: int, native: Any, gpu: PretendedGpu) -> tuple[Passes, float]:
        found, longest = [], 0.0
        for counts in (COUNTS, COUNTS[:-1], [*COUNTS[:-1], 500]):
            optimizer = Optimizer(native, counts)
            for _ in range(3):
                begin, since = gpu.count(), time.monotonic()
                backward(optimizer, range(len(counts)), lambda: 0.0)
                longest = max(longest, time.monotonic() - since)
                found.append(gpu.travelled(begin, gpu.count()))
        return found, longest

    def measure() -> None:
        with world((0, 0), cycle_time_ms=NEVER, fusion_threshold=64 << 20) as each:
            for found, longest in each.run(program):
                assert found[1] == found[2] == [tuple(COUNTS)]
                assert sorted(found[3]) == [(count,) for count in COUNTS[:-1]]
                assert found[4] == found[5] == [tuple(COUNTS[:-1])]
                assert sorted(found[6]) == sorted([(500,), tuple(COUNTS[:-1])])
                assert found[7] == found[8] == [(*COUNTS[:-1], 500)]
                assert longest < SOON, longest

    measured(measure)


def test_awaited_member_is_not_held() -> None:
    """A caller waits for a single member while others have not come."""

    def program(_rank: int, native: Any, gpu: PretendedGpu) -> tuple[list[Entry], float]:
        optimizer = Optimizer(native, COUNTS)
        for _ in range(2):
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
        begin, since = gpu.count(), time.monotonic()
        tensors = [PretendedTensor(count) for count in COUNTS[:10]]
        handles = [native.allreduce(each, each, f"gradient0.{each.like.size}", 0, 1.0, 1.0) for each in tensors]
        for handle in handles:
            handle.wait()
        return gpu.travelled(begin, gpu.count()), time.monotonic() - since

    def measure() -> None:
        with world((0, 0), cycle_time_ms=NEVER, fusion_threshold=64 << 20) as each:
            for batches, seconds in each.run(program):
                assert sorted(batches) == [(count,) for count in COUNTS[:10]]
                assert seconds < SOON, seconds

    measured(measure)


def test_what_nobody_waits_for_is_not_held_for_ever() -> None:
    """A pass has raised on all ranks: gradients that still come are not held, and the next pass is whole."""

    def program(_rank: int, native: Any, gpu: PretendedGpu) -> tuple[Passes, float]:
        optimizer = Optimizer(native, COUNTS)
        for _ in range(2):
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
        begin = gpu.count()
        for k in range(10):
            optimizer.bring(k)
        until(lambda: gpu.count() == begin + 20, "they have travelled")
        native.barrier("on all ranks").wait()
        since = time.monotonic()
        for k in range(10, 15):
            optimizer.bring(k)
        until(lambda: gpu.count() == begin + 30, "they have travelled, too")
        seconds = time.monotonic() - since
        optimizer.finish()
        middle = gpu.count()
        backward(optimizer, range(len(COUNTS)), lambda: 0.0)
        return [gpu.travelled(begin, middle), gpu.travelled(middle, gpu.count())], seconds

    def measure() -> None:
        with world((0, 0), fusion_threshold=64 << 20) as each:
            for (broken, after), seconds in each.run(program):
                assert sorted(broken) == [(count,) for count in COUNTS[:15]]
                assert after == [tuple(COUNTS)]
                assert seconds < SOON, seconds

    measured(measure)


def test_who_waits_leaves_what_is_held_to_the_engines_thread() -> None:
    """Gradients come while a caller drives and then gets its own result; the engine's thread has slept since before."""

    def program(rank: int, native: Any, gpu: PretendedGpu) -> None:
        optimizer = Optimizer(native, COUNTS)
        for _ in range(2):
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
        native.barrier("begin").wait()
        begin = gpu.count()
        be_late(0.05 * rank)  # rank 0 sleeps in the barrier by then
        for k in range(10):
            optimizer.bring(k)
        native.barrier("end").wait()
        until(lambda: gpu.count() == begin + 20, "they have travelled", 10)
        optimizer.finish()

    with world((0, 0), fusion_threshold=64 << 20) as each:
        each.run(program)


def test_rank_that_is_late_for_seconds_breaks_no_batch() -> None:
    """The others wait for its gradients anyway."""

    def program(rank: int, native: Any, gpu: PretendedGpu) -> list[Entry]:
        optimizer = Optimizer(native, COUNTS)
        for _ in range(2):
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
        begin = gpu.count()
        for k in range(len(COUNTS)):
            if rank == 1 and k == 20:
                be_late(2.0)
            optimizer.bring(k)
        optimizer.finish()
        return gpu.travelled(begin, gpu.count())

    with world((0, 0), fusion_threshold=64 << 20) as each:
        assert each.run(program) == [[tuple(COUNTS)]] * 2


def test_join_in_the_middle_of_a_pass_waits_for_no_gradient() -> None:
    """The pass has raised on every rank; nothing is left in flight."""

    def program(_rank: int, native: Any, _gpu: PretendedGpu) -> float:
        optimizer = Optimizer(native, COUNTS)
        for _ in range(2):
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
        for k in range(10):
            optimizer.bring(k)
        since = time.monotonic()
        native.join()
        return time.monotonic() - since

    def measure() -> None:
        with world((0, 0), cycle_time_ms=NEVER, fusion_threshold=64 << 20) as each:
            assert max(each.run(program)) < SOON

    measured(measure)


def test_rank_that_has_joined_breaks_no_batch() -> None:
    def program(rank: int, native: Any, gpu: PretendedGpu) -> Passes:
        optimizer = Optimizer(native, COUNTS)
        found = []
        for _ in range(3 + 3 * rank):
            begin = gpu.count()
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
            found.append(gpu.travelled(begin, gpu.count()))
        native.join()
        for _ in range(2):
            begin = gpu.count()
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
            found.append(gpu.travelled(begin, gpu.count()))
        return found

    with world((0, 0, 0), cycle_time_ms=NEVER, fusion_threshold=64 << 20) as each:
        for rank, found in enumerate(each.run(program)):
            assert len(found) == 5 + 3 * rank
            assert all(passed == [tuple(COUNTS)] for passed in found[1:])


# ---- what makes them anew --------------------------------------------------------------------------------------------


def test_threshold_that_is_turned() -> None:
    """A new threshold takes effect from the next pass but one at the latest."""

    def program(rank: int, native: Any, gpu: PretendedGpu) -> Passes:
        optimizer = Optimizer(native, COUNTS)
        found = []
        for turn in range(9):
            if turn % 3 == 0 and rank == 0:
                native.set_knobs(fusion_threshold=(64 << 20, 0, SMALL)[turn // 3])
            native.barrier(f"turn {turn}").wait()
            begin = gpu.count()
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
            found.append(sorted(gpu.travelled(begin, gpu.count())))
        return found

    with world((0, 0)) as each:
        for found in each.run(program):
            assert found[2] == [tuple(COUNTS)]
            assert found[5] == [(count,) for count in COUNTS]
            assert 2 < len(found[8]) < len(COUNTS) / 2


def test_gradient_that_changes_its_dtype() -> None:
    """Its batch is broken in that pass, and the next pass has new batches."""

    def program(_rank: int, native: Any, gpu: PretendedGpu) -> Passes:
        optimizer = Optimizer(native, COUNTS)
        found = []
        for turn in range(8):
            begin = gpu.count()
            for k, parameter in enumerate(optimizer.parameters):
                dtype = np.float64 if k == 20 and turn in (3, 4) else np.float32
                parameter.grad = PretendedTensor(parameter.count, dtype)
                optimizer.hooks[k](parameter)
            optimizer.finish()
            found.append(sorted(gpu.travelled(begin, gpu.count())))
        return found

    changed = COUNTS[20]
    without = tuple(count for count in COUNTS if count != changed)
    with world((0, 0), cycle_time_ms=NEVER, fusion_threshold=64 << 20) as each:
        for found in each.run(program):
            assert found[2] == [tuple(COUNTS)]
            assert found[3] == sorted([*((count,) for count in without), (2 * changed,)])
            assert found[4] == sorted([without, (2 * changed,)])
            assert found[5] == sorted([without, (changed,)])
            assert found[6] == found[7] == [tuple(COUNTS)]


def test_names_that_are_evicted() -> None:
    """So many other names are used in between that those of the gradients lose their IDs."""

    def program(_rank: int, native: Any, gpu: PretendedGpu) -> Passes:
        optimizer = Optimizer(native, COUNTS)
        found = []
        for turn in range(5):
            if turn == 2:
                tensor = np.ones(1, np.float32)
                for begin in range(0, 40_000, 1000):
                    names = [f"other {begin + k}" for k in range(1000)]
                    for handle in [native.allreduce(tensor, tensor.copy(), name, 0, 1.0, 1.0) for name in names]:
                        handle.wait()
            begin = gpu.count()
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
            found.append(sorted(gpu.travelled(begin, gpu.count())))
        return found

    with world((0, 0), fusion_threshold=64 << 20) as each:
        for found in each.run(program):
            assert found[1] == [tuple(COUNTS)]
            assert sorted(count for batch in found[2] for count in batch) == COUNTS
            assert found[4] == [tuple(COUNTS)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 1)])
def test_rank_that_is_late_in_the_middle_of_a_batch_is_named(hosts: tuple[int, ...]) -> None:
    """Rank 0, which holds the others' gradients, is not named."""

    def program(rank: int, native: Any, _gpu: PretendedGpu) -> str:
        optimizer = Optimizer(native, COUNTS)
        for _ in range(2):
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
        try:
            if rank == 2:
                for k in range(5):
                    optimizer.bring(k)
                until(lambda: native.failure is not None, "the others have given it up", 30)
                raise native.failure
            backward(optimizer, range(len(COUNTS)), lambda: 0.0)
        except RankStalledError as error:
            return str(error)
        return "nobody is late"

    with world(hosts, stall_limit=2.0) as each:
        found = each.run(program)
    for text in found:
        assert text.startswith("rank 2 stalled: "), found
        assert "gradient0.1" in text
