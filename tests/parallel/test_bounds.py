"""Sizes at their upper limits: names, knobs, shared memory of many ranks."""

from __future__ import annotations

import pytest

from ..ranks import run_ranks

LONG_NAME = """
import sys, numpy, engine
engine.init()
if engine.rank() == 0:
    engine.allreduce(numpy.ones(3, "f4"), name="x" * {length})
else:
    engine.allreduce(numpy.ones(3, "f4"), name="y")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("length", [1001, 1002, 1003, 1024])
def test_a_long_name_that_is_withheld_is_told_as_far_as_there_is_room(length: int) -> None:
    # Another rank reports a name that has an ID, rank 0 one without; here neither rank has an ID.
    done = run_ranks(2, LONG_NAME.format(length=length), check=False, env={"ENGINE_STALL_LIMIT": "0.5"})
    assert done.code != 0
    for rank in done.ranks:
        assert "RankStalledError" in rank.stderr and "x" * 150 in rank.stderr, done


KNOBS = """
import engine
engine.init()
native = engine.session.runtime.current_engine()
for knob, value in {
    "fusion_threshold": 1 << 64, "cycle_time_ms": 1e300, "chunk_bytes": 1 << 64, "stores": "no", "compression": 3,
}.items():
    before = native.knobs()
    for call in (native.set_knobs, engine.set_knobs):
        try:
            call(**{knob: value})
        except (ValueError, TypeError) as error:
            assert str(value) in str(error), error
        else:
            raise AssertionError(f"{knob} was taken")
    engine.barrier()  # The lock is free, and nothing has changed.
    assert native.knobs() == before
nobodys = ("three", "1_000", "4096", b"4096", [], True, 1j, float("nan"), float("inf"), -1)
for knob, values in {
    "cycle_time_ms": nobodys, "fusion_threshold": (*nobodys, 65536.5, 65536.0), "chunk_bytes": (*nobodys, 65536.5),
    "sockets_per_lane": (*nobodys, 1.5, 1.0), "stores": (1, None, ["auto"]), "compression": (b"none", True),
}.items():
    for value in values:
        try:
            native.set_knobs(**{knob: value})
        except (ValueError, TypeError) as error:
            assert knob in str(error), error
        else:
            raise AssertionError(f"{knob} = {value!r} was taken")
# As text, as in the environment; None leaves a knob as it is.
before = native.knobs()
engine.set_knobs(chunk_bytes="64K", fusion_threshold="2 MiB", cycle_time_ms="1.5", stores=None)
engine.barrier()
turned = {"chunk_bytes": 64 << 10, "fusion_threshold": 2 << 20, "cycle_time_ms": 1.5}
assert {name: value for name, value in native.knobs().items() if value != before[name]} == {
    **turned, "version": native.knobs()["version"], "entry": native.knobs()["entry"]
}
for call in (native.set_knobs, engine.set_knobs):
    try:
        call(kernels="plain")
    except (ValueError, TypeError) as error:
        assert "there is no knob 'kernels'; there are: fusion_threshold, cycle_time_ms" in str(error), error
    else:
        raise AssertionError("a setting that is no knob was taken")
version = native.set_knobs(fusion_threshold=1 << 60, cycle_time_ms=2)
engine.barrier()
assert native.knobs()["version"] == version and native.knobs()["fusion_threshold"] == 1 << 60
"""


def test_a_knob_that_cannot_be_is_refused_and_the_engine_goes_on() -> None:
    run_ranks(1, KNOBS)


PAGE_TABLES = """
import engine
def page_tables():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmPTE"))
engine.init()
before = page_tables()
memory = engine.session.runtime.current_engine().share(32 << 20)
grown = page_tables() - before
engine.barrier("all have looked")
print(grown)
"""


def test_shared_memory_costs_page_tables_of_what_a_rank_touches() -> None:
    # Of 32 MiB: 64 KiB for its own part, as much for its share of all others', and 4 KiB at each end of a mapping.
    ranks = 4
    for rank in run_ranks(ranks, PAGE_TABLES).ranks:
        assert int(rank.stdout) < 2 * 64 + 16 * ranks, rank


TWO_THREADS = """
import threading, engine
engine.init()
native = engine.session.runtime.current_engine()
first = native.knobs()["version"]

class Late(float):
    # A value that is converted only when another thread has set another knob.
    def __float__(self):
        if not versions:
            other = threading.Thread(target=lambda: versions.append(native.set_knobs(chunk_bytes=8192)))
            other.start()
            other.join()
        return 3.0

versions = []
versions.append(native.set_knobs(cycle_time_ms=Late(3.0)))
assert versions == [first + 1, first + 2], versions
engine.barrier()
assert native.knobs()["chunk_bytes"] == 8192 and native.knobs()["cycle_time_ms"] == 3.0, native.knobs()
"""


def test_knobs_set_by_two_threads_at_once_are_both_in_force_and_have_two_versions() -> None:
    run_ranks(1, TWO_THREADS)
