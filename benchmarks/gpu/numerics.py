"""Part `numerics`: results of the engine for each dtype and reduction on the device, compared with exact ones.

`python -m benchmarks.gpu.numerics FILE HERE SECONDS LARGEST` is a rank. With one rank, NCCL is not called: this covers
pack, cast, factor and unpack. With two ranks, it covers NCCL's sums, and the reduction in rank order.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import ranks, reference
from benchmarks.gpu.driver import BFLOAT16, Array, CudaDriver
from benchmarks.gpu.part import Task

COUNTS = (1, 3, 1000)
LIMITS = {"plain": 0.5, "factors": 1.5, "compressed": 1.5}
"""Maximum errors in units in the last place: one rounding; of the sum and the factor; of each rank and the sum."""
SLACK = 1e-3
WRONG = "wrong"
"""Text for an error that is not a number of units: an inexact whole number, or a lost NaN."""
BEYOND = 20_000_000  # number of float32 elements: more than a slab


def measure_part(task: Task) -> dict[str, Any]:
    """Run the cases with one rank, and with two if possible.

    Returns `worlds`: for each number of ranks, `where` they were, and `rows` with an error for each column; or
    `skipped`.
    """
    found: dict[str, Any] = {"worlds": {}, "problems": []}
    for size, where, variables in ranks.list_worlds(task.here, (1, 2), found["worlds"]):
        seconds = task.left * (0.4 if size == 1 else 0.9)
        largest = task.pick_amount(0, BEYOND if size == 1 else 100_000)
        with tempfile.TemporaryDirectory() as scratch:
            (known := Path(scratch, "here.json")).write_text(json.dumps(task.here), encoding="utf-8")
            arguments = [scratch, str(known), str(0.8 * seconds), str(largest)]
            with ranks.Ranks("benchmarks.gpu.numerics", size, arguments, variables) as job:
                job.end(seconds)
            told = [json.loads(Path(scratch, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
        found["worlds"][str(size)] = {"where": where, "rows": told[0]["rows"], "unfinished": told[0]["unfinished"]}
        for rank, each in enumerate(told):
            found["problems"] += [f"{size} ranks, rank {rank}: {problem}" for problem in each["problems"]]
        task.tell(found)
    return found


# ---- a rank ----------------------------------------------------------------------------------------------------------


class NumericsRank:
    """This process in an initialized world."""

    def __init__(self, rank: int, size: int, device: CudaDriver) -> None:
        self.rank, self.size, self.device = rank, size, device

    def try_floats(self, dtype: str, op: str, count: int, **how: Any) -> float:
        """Return the error of one reduction."""
        given = [reference.draw_values(rank, count, dtype) for rank in range(self.size)]
        got = self.reduce_values(given[self.rank], dtype, op, **how)
        return reference.error(got, given, dtype, op, **(how | {"wire": how.get("wire") or ""}))

    def try_whole(self, dtype: str, op: str, count: int) -> float:
        """Return 0 if the result is right, else infinity."""
        given = [reference.draw_values(rank, count, dtype) for rank in range(self.size)]
        got = self.reduce_values(given[self.rank], dtype, op)
        return 0.0 if np.array_equal(got, reference.reduce_whole(given, op)) else inf

    def reduce_values(self, mine: reference.Values, dtype: str, op: str, **how: Any) -> reference.Values:
        """Return the engine's result for this rank's values and the others'."""
        array, target = Array(self.device, mine, dtype), Array(self.device, np.zeros_like(mine), dtype)
        ranks.allreduce(array, target, op=op, **how).wait()
        result = target.to_numpy()
        for each in (array, target):
            each.free_memory()
        return result

    def try_broadcast(self, dtype: str, count: int) -> float:
        """Return 0 if all ranks have the bytes of the last rank, else infinity."""
        from engine.session import runtime

        root = self.size - 1
        array = Array(self.device, reference.draw_values(self.rank, count, dtype), dtype)
        runtime.current_engine().broadcast(array, array, None, root).wait()
        right = np.array_equal(array.to_numpy(), reference.draw_values(root, count, dtype))
        array.free_memory()
        return 0.0 if right else inf

    def try_nan(self, dtype: str, op: str) -> float:
        """Return 0 if a NaN and infinities of one rank arrive, else infinity."""
        odd = np.array([np.nan, np.inf, -np.inf, 1.0, 0.0])
        given = [reference.round_values(odd if rank == 0 else np.ones(5), dtype) for rank in range(self.size)]
        got = self.reduce_values(given[self.rank], dtype, op)
        return 0.0 if reference.error(got, given, dtype, op) == 0 else inf

    def list_cases(self, largest: int) -> Iterator[tuple[str, str, Callable[[], float], float]]:
        """Yield row, column, the attempt, and the largest error allowed."""
        counts = (*COUNTS, largest) if largest else COUNTS
        for count in counts:
            small = count < BEYOND  # for sizes beyond a slab, a few cases suffice: each takes a second
            for dtype in reference.DTYPES if small else ("float32",):
                for op in reference.OPS if small else ("sum",):
                    if dtype in reference.FLOATS:
                        yield dtype, op, partial(self.try_floats, dtype, op, count), LIMITS["plain"]
                    elif dtype != "bool" or op != "average":
                        yield dtype, op, partial(self.try_whole, dtype, op, count), 0.0
                yield dtype, "broadcast", partial(self.try_broadcast, dtype, count), 0.0
            for dtype in reference.FLOATS if small else ("float32",):
                how = {"prescale": 0.5, "postscale": 3.0}
                row = f"{dtype}, times 0.5 before and 3 behind"
                yield row, "sum", partial(self.try_floats, dtype, "sum", count, **how), LIMITS["factors"]
            for wire in ("float16", BFLOAT16) if small else ("float16",):
                for op in ("sum", "average") if small else ("sum",):
                    row = f"float32 as {wire}"
                    yield row, op, partial(self.try_floats, "float32", op, count, wire=wire), LIMITS["compressed"]
        for dtype in reference.FLOATS:
            for op in reference.OPS:
                yield f"{dtype}, with NaN and infinities", op, partial(self.try_nan, dtype, op), 0.0


def main() -> None:
    """Run all cases as one rank of the world."""
    where, known, seconds, largest = sys.argv[1:]
    here = json.loads(Path(known).read_text(encoding="utf-8"))
    import engine

    end = time.monotonic() + float(seconds)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = CudaDriver(ranks.get_ordinal(rank, here))
    rows: dict[str, dict[str, float]] = {}
    problems: list[str] = []
    unfinished = False
    engine.init()
    me = NumericsRank(rank, size, device)
    for row, column, attempt, limit in me.list_cases(int(largest)):
        if is_time_over(time.monotonic() > end):
            unfinished = True
            break
        off = attempt()
        columns = rows.setdefault(row, {})
        columns[column] = max(columns.get(column, 0.0), off)
        if not off <= limit + SLACK * (limit > 0):
            problems.append(f"{row}, {column}: off by {off:.3g} units in the last place, more than {limit:g}")
    engine.shutdown()
    shown = {row: {name: off if off < inf else WRONG for name, off in columns.items()} for row, columns in rows.items()}
    told = {"rows": shown, "problems": problems + device.read_reports(), "unfinished": unfinished}
    Path(where, f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def is_time_over(over: bool) -> bool:
    """Return whether the time is over on some rank, so that all end at the same case."""
    import engine

    return bool(engine.allreduce(np.array([over]), op=engine.Max, name="enough")[0])


if __name__ == "__main__":
    main()
