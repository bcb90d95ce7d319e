"""One rank of a job on hosts whose clocks differ: it reduces until it is told to stop. OBSERVED holds options as JSON.

`late` is the rank that submits its tensors 150 ms after the others in each step, or -1. Rank 0 touches `going` after
`steps` steps. `joins` is the order in which ranks join at the end, or empty. Files are in `home`; `stop` is the last.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

import engine
from tests.waiting import be_late, until


def main() -> None:
    """Reduce, and print the outcome as JSON."""
    given = json.loads(os.environ["OBSERVED"])
    engine.init()
    rank, home = engine.rank(), Path(given["home"])
    if given["joins"]:  # a stall that rank 0 warns of
        if rank == given["joins"][0]:
            until((home / "warned").exists, "rank 0 has warned", 120.0)
        engine.allreduce(np.ones(5), name="first")
    pair = engine.add_process_set([1, 2] if engine.size() < 5 else [2, 4])  # on two hosts, without rank 0
    tensors, flag, steps = [np.ones(16_384, np.float32)] * 4, np.zeros(1), 0
    while not flag[0]:
        if rank == given["late"]:
            be_late(0.15)
        handles = [engine.allreduce_async(each, name=f"t{k}", op=engine.Sum) for k, each in enumerate(tensors)]
        for handle in handles:
            assert engine.synchronize(handle)[0] == engine.size()
        if pair.included():
            engine.allreduce(np.ones(1000), name="in_set", op=engine.Sum, process_set=pair)
        steps += 1
        if rank == 0 and steps == given["steps"]:
            (home / "going").touch()
        flag = engine.allreduce(np.full(1, float(rank == 0 and (home / "stop").exists())), name="stop", op=engine.Max)
    last = join_in_order(given["joins"], rank, home) if given["joins"] else None
    cross = engine.cross_rank(), engine.cross_size(), engine.local_rank(), engine.local_size()
    told = {"rank": rank, "clock": engine.session.runtime.current_engine().clock(), "last": last, "cross": cross}
    print(json.dumps(told), flush=True)
    engine.shutdown()


def join_in_order(order: list[int], rank: int, home: Path) -> int:
    """Join after the previous rank has begun to; return the rank that was last, as the engine reports it."""
    if before := order[: order.index(rank)]:
        until((home / f"joins.{before[-1]}").exists, "the rank before joins", 120.0)
        be_late(0.15)  # the rank before has touched its file, and is about to join
    (home / f"joins.{rank}").touch()
    return engine.join()


if __name__ == "__main__":
    main()
