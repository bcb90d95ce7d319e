"""Scripts for other launchers and for little memory; a rank prints its results, each as a line of JSON."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

import engine

from .programs import observe, ones, touch, touch_when_pending, wait_for


def say(**what: Any) -> None:
    """Print one line by one write, because several ranks may share the stream."""
    os.write(1, (json.dumps(what) + "\n").encode())


def under_torchrun() -> None:
    """Sum a tensor, and print rank, size and sum."""
    engine.init()
    total = engine.allreduce(np.full(10, engine.rank() + 1.0), engine.Sum)
    say(rank=engine.rank(), size=engine.size(), total=float(total[0]))


def restarted() -> None:
    """Fail on rank 1 in the middle of the first attempt; succeed in the second."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    engine.init()
    engine.barrier()
    if attempt == 0 and engine.rank() == 1:
        raise RuntimeError("first attempt")
    seen = observe(lambda: [engine.allreduce(ones(), name="x") for _ in range(1000 if attempt == 0 else 3)])
    say(rank=engine.rank(), attempt=attempt, type=seen["type"], text=seen["text"])
    if seen["type"]:
        sys.exit(9)


def beside_gloo(first: str) -> Any:
    """Use the engine and gloo in one process, started in either order, in turns and from two threads at once."""
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if first == "engine":
        engine.init()
    dist.init_process_group("gloo")
    engine.init()
    rank, size = engine.rank(), engine.size()
    assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    expected = sum(range(1, size + 1))

    def gloo() -> float:
        values = torch.full((50_000,), float(rank + 1))
        dist.all_reduce(values)
        return float(values[-1])

    def ours() -> float:
        return float(engine.allreduce(torch.full((50_000,), float(rank + 1)), engine.Sum)[-1])

    for _ in range(5):
        assert gloo() == ours() == expected
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            assert [each.result() for each in (pool.submit(gloo), pool.submit(ours))] == [expected] * 2
    dist.destroy_process_group()
    assert ours() == expected
    engine.shutdown()
    return True


def large_work() -> Any:
    """Reduce more than 64 MiB in private and shared tensors."""
    engine.init()
    rank, size = engine.rank(), engine.size()
    values = np.full(24 << 20, rank + 1, np.float32)
    engine.allreduce_(values, engine.Sum)
    assert values[0] == values[-1] == size * (size + 1) // 2
    shared = np.frombuffer(engine.session.runtime.current_engine().share(96 << 20), np.float32)
    shared[:] = rank + 1
    engine.allreduce_(shared, engine.Sum)
    assert shared[0] == shared[-1] == size * (size + 1) // 2
    gathered = engine.allgather(np.full(1 << 20, rank, np.float32))
    assert gathered[-1] == size - 1
    with open("/proc/self/mounts") as mounts:
        return [line for line in mounts if line.split()[1] == "/dev/shm"][-1]


def hungry(victim: int, limited: bool) -> Any:
    """Have `victim` take memory until there is none: it gets an exception, or the kernel kills it."""
    engine.init()
    rank = engine.rank()
    engine.barrier()
    if rank != victim:
        touch_when_pending(f"ready.{rank}")
        return observe(lambda: engine.allreduce(ones(), name="x"))
    wait_for(*(f"ready.{other}" for other in range(engine.size()) if other != victim))
    if limited:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
    else:
        Path("/proc/self/oom_score_adj").write_text("1000")
    touch("eats")
    taken = []
    while True:
        taken.append(np.ones(4 << 20))  # 32 MiB, written to


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
