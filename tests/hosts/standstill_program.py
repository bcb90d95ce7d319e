"""One rank of a job in which a rank is stopped by a signal, or submits its tensors late; prints how it ended.

MODE is one of:

- `large`: large entries, one after the other, until SEEN/stop exists;
- `late`: idles and measures its processor time; then each rank of LATE in turn submits a tensor later than the others,
  under a known name and under a new one;
- `standoff`: in one world for each rank of LATE, that rank waits for another tensor than the others do;
- `names`: some ranks submit NAMES new names when SEEN/bring exists, and the others when SEEN/go exists.

Prints the process ID when all ranks have started. The log of rank r is SEEN/<r>.log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import engine

from ..waiting import be_late, let_pass, until

SEEN = Path(os.environ.get("SEEN", ""))
LARGE = 4 << 20  # elements of four bytes
NAMES = int(os.environ.get("NAMES", 0))
BRINGERS = (1, 3, 4)  # ranks that submit new names at once: not rank 0, which is observed, nor rank 2, which is stopped
IDLE = 1.0  # seconds in which nothing is submitted
LATER = 1.0  # delay of a late tensor in seconds: above the stall warning


def large() -> str:
    """Run large entries of all kinds until told to stop; check the values on every rank."""
    rank, size = engine.rank(), engine.size()
    rows = LARGE // size // 4
    flag, steps = np.zeros(1, np.int8), 0
    while not flag[0]:
        handles = [
            engine.allreduce_async(np.ones(LARGE, np.float32), engine.Sum, "large"),
            engine.broadcast_async(np.full(LARGE // 4, rank, np.float32), size - 1, name="from the last"),
            engine.allgather_async(np.full(rows, rank, np.float32), name="of all"),
            engine.alltoall_async(np.full(rows // 2 * size, rank, np.float32), name="to all"),
        ]
        total, last, gathered, sent = (np.asarray(engine.synchronize(each)).ravel() for each in handles)
        assert total[0] == total[-1] == size and last[0] == last[-1] == size - 1
        assert gathered[0] == 0 and gathered[-1] == size - 1 and sent[0] == 0 and sent[-1] == size - 1
        steps += 1
        if steps == 2:
            print("works", flush=True)
        flag = engine.allreduce(np.array([(SEEN / "stop").exists()], np.int8), engine.Max, "stop")
    return "done"


def late() -> str:
    """Idle first; then each rank in turn is late, with a known name and with a new one."""
    engine.barrier()
    let_pass(IDLE / 2)
    used = time.process_time()
    let_pass(IDLE)
    print(time.process_time() - used, flush=True)
    for turn in json.loads(os.environ["LATE"]):
        engine.allreduce(np.ones(10), engine.Sum, f"known.{turn}")
        for name in (f"known.{turn}", f"new.{turn}"):
            engine.barrier()
            if engine.rank() == turn:
                be_late(LATER)
            engine.allreduce(np.ones(10), engine.Sum, name)
    return "done"


def standoff() -> str:
    """Run a world for each rank that waits for another tensor than the others; return the errors."""
    told = []
    for number, turn in enumerate(json.loads(os.environ["LATE"])):
        if number:
            engine.init()
        engine.grouped_allreduce([np.ones(10)] * 2, engine.Sum, "here")
        for name in ("odd", "even"):
            engine.allreduce(np.ones(10), engine.Sum, name)
        engine.barrier()
        try:
            engine.allreduce(np.ones(10), engine.Sum, "odd" if engine.rank() == turn else "even")
        except engine.errors.CollectiveError as error:
            told.append(f"{type(error).__name__}: {error}")
        engine.shutdown()
    return json.dumps(told)


def names() -> str:
    """Submit many new names on some ranks while another rank is stopped."""
    engine.barrier()
    if engine.rank() in BRINGERS:
        until((SEEN / "bring").exists, "rank 2 is stopped", 120.0)
    else:
        print("waits", flush=True)
        until((SEEN / "go").exists, "the others have brought their names", 120.0)
    tensor = np.ones(1, np.float32)
    handles = [engine.allreduce_async(tensor, engine.Sum, f"layer.{k}") for k in range(NAMES)]
    print("brought", flush=True)
    assert all(engine.synchronize(handle)[0] == engine.size() for handle in handles)
    return "done"


def main() -> None:
    """Run MODE."""
    os.dup2(os.open(SEEN / f"{os.environ['ENGINE_RANK']}.log", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    engine.init()
    engine.barrier()
    print(os.getpid(), flush=True)
    modes: dict[str, Callable[[], str]] = {"large": large, "late": late, "standoff": standoff, "names": names}
    try:
        print(modes[os.environ["MODE"]](), flush=True)
    except engine.errors.CollectiveError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
