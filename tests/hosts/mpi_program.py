"""One rank that an MPI launcher has started, which takes every rank to be on a host of its own."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(os.environ["HERE"])
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"])
os.environ |= {
    "ENGINE_RANK": str(RANK),
    "ENGINE_SIZE": str(SIZE),
    "ENGINE_LOCAL_RANK": "0",
    "ENGINE_LOCAL_SIZE": "1",
    "ENGINE_CROSS_RANK": str(RANK),
    "ENGINE_CROSS_SIZE": str(SIZE),
}

import numpy as np  # noqa: E402

import engine  # noqa: E402
from engine.net.rendezvous import mpi_lanes  # noqa: E402
from engine.session import runtime  # noqa: E402

from ..parallel.test_hosts import results  # noqa: E402
from ..waiting import let_pass  # noqa: E402

LARGE = 4 << 20  # elements


def bits() -> None:
    """Compare results over TCP and over MPI, and check that an idle engine uses no processor time."""
    engine.init(lanes="tcp")
    expected = results(RANK, SIZE)
    assert runtime.current_engine().messages == 0
    engine.shutdown()
    engine.init(lanes="mpi")
    assert results(RANK, SIZE) == expected
    assert runtime.current_engine().messages > 100
    engine.barrier()
    before = time.process_time()
    let_pass(2.0)
    spent = time.process_time() - before
    engine.barrier()
    engine.shutdown()
    (HERE / f"idle.{RANK}").write_text(f"{spent:.3f}")


def add_mixed_group() -> None:
    """MPI sums a plain tensor, and not a group beside it that has other dtypes, too: they are no batch."""
    if RANK == 0:
        engine.set_knobs(cycle_time_ms=100.0)
    for _ in range(4):
        plain, counts = np.full(50_000, RANK + 1, np.float32), np.full(100, RANK + 1, np.float32)
        odd = np.full(1000, RANK + 1, np.int32)
        engine.barrier()
        together = [
            engine.allreduce_async_(plain, engine.Sum, "beside a mixed group"),
            engine.grouped_allreduce_async_([counts, odd], engine.Sum, "mixed group"),
        ]
        let_pass(0.02)
        for handle in together:
            engine.synchronize(handle)
        for tensor in (odd, counts, plain):
            assert (tensor == SIZE * (SIZE + 1) / 2).all(), (tensor.dtype, tensor[:3])


def sums() -> None:
    """Check that MPI's sums are right; other operations and process sets go the usual way, with the same bits."""
    engine.init(lanes="mpi")
    usual = results(RANK, SIZE)
    engine.shutdown()
    engine.init(lanes="mpi", between_hosts="mpi")
    found = []
    for dtype in (np.float32, np.float64):
        for count in (16_384, 65_537, 1 << 20):
            ranks = [np.random.default_rng(rank).standard_normal(count).astype(dtype) for rank in range(SIZE)]
            total = np.sum([each.astype(np.float64) for each in ranks], 0)
            for _ in range(3):
                found.append(engine.allreduce(ranks[RANK], engine.Sum, f"sum {count} {dtype}"))
                np.testing.assert_allclose(found[-1], total, rtol=1e-5, atol=1e-5)
                mean = engine.allreduce(ranks[RANK], engine.Average, prescale_factor=4.0, postscale_factor=0.5)
                np.testing.assert_allclose(mean, total / SIZE * 2, rtol=1e-5, atol=1e-5)
    group = engine.grouped_allreduce([np.full(n, RANK, np.float32) for n in (3, 40_000, 100_001)], engine.Sum)
    assert all((each == SIZE * (SIZE - 1) / 2).all() for each in group)
    (HERE / f"bits.{RANK}").write_text(hashlib.sha256(b"".join(each.tobytes() for each in found)).hexdigest())
    done = {row["algorithm"] for row in runtime.current_engine().history() if row["kind"] == "allreduce"}
    assert done - {"one-shot"} == {"mpi"}, done
    add_mixed_group()
    now = results(RANK, SIZE)
    others = sum(one != other for one, other in zip(usual, now, strict=True))
    assert others <= 5, others  # only sums and averages of float32 and float64, and the group, may differ
    if SIZE > 2:
        pair = engine.add_process_set([0, 1])
        if RANK < 2:
            large = np.full(LARGE, RANK + 1.0, np.float32)
            assert (engine.allreduce(large, engine.Sum, process_set=pair) == 3).all()
        engine.remove_process_set(pair)
    engine.shutdown()


def sets() -> None:
    """Check that messages of overlapping process sets do not mix."""
    engine.init(lanes="mpi")
    pair, others = engine.add_process_set([0, 2]), engine.add_process_set([1, 2])
    large = np.full(LARGE, RANK + 1.0, np.float32)
    for _ in range(3):
        handles = [
            (engine.allreduce_async(large, engine.Sum, process_set=each), sum(rank + 1 for rank in ranks))
            for each, ranks in ((pair, (0, 2)), (others, (1, 2)))
            if RANK in ranks
        ]
        assert (engine.allreduce(large, engine.Sum) == 6).all()
        for handle, total in handles:
            assert (engine.synchronize(handle) == total).all()
    engine.remove_process_set(pair)
    engine.shutdown()
    (HERE / f"done.{RANK}").touch()


def killed() -> None:
    """Kill rank 1 in the middle of large entries."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine.init(lanes="mpi", between_hosts=sys.argv[2])
    large = np.ones(LARGE, np.float32)
    if RANK == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            engine.allreduce_(large, engine.Average, "loop")
    except engine.errors.CollectiveError as error:
        (HERE / f"telling.{RANK}").write_text(f"{type(error).__name__}: {error}")
        (HERE / f"telling.{RANK}").rename(HERE / f"error.{RANK}")  # The launcher may end this process at any time.
        raise


def stopped() -> None:
    """Stop rank 1 for a while in the middle of large entries; all ranks go on."""
    engine.init(lanes="mpi")
    large = np.ones(LARGE, np.float32)
    for turn in range(30):
        if RANK == 1 and turn == 10:
            pid = os.getpid()
            subprocess.Popen(["sh", "-c", f"sleep 0.05; kill -STOP {pid}; sleep 3; kill -CONT {pid}"])
        assert (engine.allreduce(large, engine.Sum, "loop") == SIZE).all()
    engine.shutdown()
    (HERE / f"done.{RANK}").touch()


def refused() -> None:
    """Check that an unfit MPI is refused; with "single", one that the program has initialized for one thread."""
    import mpi4py

    if "single" in sys.argv:
        mpi4py.rc.thread_level = "single"
        import mpi4py.MPI

    try:
        engine.init(lanes="mpi")
    except engine.errors.EngineError as error:  # of another rank, if that was first to notice
        (HERE / f"error.{RANK}").write_text(str(error))
    else:
        raise AssertionError("lanes over an MPI that is not fit for them")


def half() -> None:
    """Make one step of the lanes' setup fail on the last rank alone; all ranks get the reason at once and can retry."""
    step = sys.argv[2]
    kept = getattr(mpi_lanes, step)

    def fail(*_: object) -> None:
        raise OSError("a step is broken")

    if RANK == SIZE - 1:
        setattr(mpi_lanes, step, fail)
    begun = time.monotonic()
    try:
        engine.init(lanes="mpi", start_timeout=90)
    except (engine.errors.EngineError, OSError) as error:
        (HERE / f"error.{RANK}").write_text(f"{time.monotonic() - begun:.1f} s: {error}")
    else:
        raise AssertionError("init has not failed")
    setattr(mpi_lanes, step, kept)
    engine.init(lanes="mpi", start_timeout=90)
    large = np.full(LARGE, RANK + 1.0, np.float32)
    assert (engine.allreduce(large, engine.Sum) == SIZE * (SIZE + 1) // 2).all()
    assert runtime.current_engine().messages > 0
    engine.shutdown()
    (HERE / f"done.{RANK}").touch()


def timed() -> None:
    """Measure a large allreduce of the engine and of MPI in turn; print the least time of each."""
    from mpi4py import MPI

    engine.init(lanes=os.environ.get("LANES", "mpi"))  # ENGINE_BETWEEN_HOSTS chooses the algorithm
    for nbytes in (16 << 20, 100 << 20):
        tensor, result = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
        best = [9.0, 9.0]
        for _ in range(12):
            engine.barrier()
            begun = time.perf_counter()
            engine.allreduce(tensor, engine.Sum, f"of {nbytes}")
            best[0] = min(best[0], time.perf_counter() - begun)
            engine.barrier()
            begun = time.perf_counter()
            MPI.COMM_WORLD.Allreduce(tensor, result)
            best[1] = min(best[1], time.perf_counter() - begun)
        print(
            RANK,
            nbytes >> 20,
            "MiB",
            *(f"{each * 1e3:.2f} ms" for each in best),
            f"{best[0] / best[1]:.2f}",
            flush=True,
        )
    engine.shutdown()


if __name__ == "__main__":
    {each.__name__: each for each in (bits, sums, sets, killed, stopped, half, timed, refused)}[sys.argv[1]]()
