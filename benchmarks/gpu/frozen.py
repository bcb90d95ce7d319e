"""Part `frozen`: savings of frozen passes, in which ranks do not negotiate, and of graphs with such passes.

`python -m benchmarks.gpu.frozen DIRECTORY HERE SAMPLES` is a rank. It reduces the same small arrays in three ways that
take turns: submitted normally, by a frozen pass, and by a graph that has captured one. `frozen_steps.py` has steps of
models.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import stats
from benchmarks.gpu import ranks
from benchmarks.gpu.driver import Array, CudaDriver
from benchmarks.gpu.native_calls import make_row
from benchmarks.gpu.part import Skipped, Task

COUNT, MANY = 1024, 100  # float32 numbers of an array, and number of arrays
FACTORS = 2.0, 0.5  # factors before and after the sum, so that a single rank has work, too
UNFROZEN, FROZEN, GRAPH = "unfrozen", "frozen pass", "launch of a graph"
WAYS = (UNFROZEN, FROZEN, GRAPH)
CAPTURES = 5
MODULE = "benchmarks.gpu.frozen"


def measure_part(task: Task) -> dict[str, Any]:
    """Measure worlds of one rank and of two, then models.

    Returns `worlds`: for each size, `where` the ranks were, and the result of `FrozenRank.measure_ways` or why it was
    `skipped`. `workloads` is the result of `frozen_steps.measure_workloads`, or why it was skipped, and `problems` are
    errors.
    """
    worlds: dict[str, Any] = {}
    found: dict[str, Any] = {"worlds": worlds, "problems": []}
    for size in (1, 2):
        try:
            where, variables = ("", {}) if size == 1 else ranks.find_placement(task.here)
            worlds[str(size)] = {"where": where, **_measure_ranks(size, variables, task)}
        except Skipped as error:
            worlds[str(size)] = {"skipped": str(error)}
        except ranks.RankProcessError as error:
            worlds[str(size)] = {"skipped": str(error).partition("\n")[0]}
            found["problems"].append(str(error))
        else:
            found["problems"] += worlds[str(size)].pop("problems")
        task.tell(found)
    if task.here["why_no_torch"]:
        return found | {"workloads": task.here["why_no_torch"]}
    from benchmarks.gpu import frozen_steps

    return found | frozen_steps.measure_workloads(task, found)


def _measure_ranks(size: int, variables: dict[str, str], task: Task) -> dict[str, Any]:
    """Return the results of rank 0, with the problems of all ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        (known := Path(scratch, "here.json")).write_text(json.dumps(task.here), encoding="utf-8")
        with ranks.Ranks(MODULE, size, [scratch, str(known), str(task.pick_amount(4, 100))], variables) as job:
            job.end(0.3 * task.left)
        told = [json.loads(Path(scratch, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    return {**told[0], "problems": [problem for each in told for problem in each["problems"]]}


# ---- the rank --------------------------------------------------------------------------------------------------------


class FrozenRank:
    """This process: arrays on its device, and the ways to reduce them."""

    def __init__(self, ordinal: int) -> None:
        self.device = CudaDriver(ordinal)
        self.arrays = [Array(self.device, np.ones(COUNT, np.float32)) for _ in range(MANY)]
        self.run = ctypes.c_void_p()
        self.pass_: Any = None

    def submit(self) -> None:
        """Reduce each array by a normal submission."""
        how = {"prescale": FACTORS[0], "postscale": FACTORS[1]}
        handles = [ranks.allreduce(each, each, f"array {k}", **how) for k, each in enumerate(self.arrays)]
        for handle in handles:
            handle.wait()

    def freeze(self) -> Any:
        """Create a frozen pass. Collective."""
        from engine.gpu.freezing import Frozen, Reduction
        from engine.session import runtime

        tensors = [Frozen(f"array {k}", "float32", COUNT, each.at) for k, each in enumerate(self.arrays)]
        return runtime.current_device().freeze(
            self.device.ordinal, tensors, Reduction(ranks.OPS["sum"], *FACTORS, None)
        )

    def enqueue_pass(self) -> None:
        """Reduce the arrays by the frozen pass."""
        self.pass_.enqueue_pass(self.device.stream.value)

    def capture_pass(self) -> None:
        """Capture the frozen pass into a graph."""
        graph, call = ctypes.c_void_p(), self.device.call_driver
        if self.run.value:
            call("cuGraphExecDestroy", self.run)
        call("cuStreamBeginCapture_v2", self.device.stream, 0)
        self.enqueue_pass()
        call("cuStreamEndCapture", self.device.stream, ctypes.byref(graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(self.run), graph, ctypes.c_ulonglong(0))
        call("cuGraphDestroy", graph)

    def launch_graph(self) -> None:
        """Reduce the arrays by the graph."""
        self.device.call_driver("cuGraphLaunch", self.run, self.device.stream)

    def time_action(self, act: Callable[[], Any]) -> tuple[float, float]:
        """Return the seconds until an action has returned, and until the device has done its work."""
        self.device.synchronize()
        begun = time.perf_counter()
        act()
        returned = time.perf_counter()
        self.device.synchronize()
        return returned - begun, time.perf_counter() - begun

    def measure_freezing(self) -> dict[str, Any]:
        """Freeze twice and capture; return the `memory` that each freeze takes in bytes, and `rows` of seconds."""
        self.submit()  # opens the GPU
        self.device.wait_for_device()
        memory, seconds = [], []
        for _ in range(2):
            before, _ = self.device.read_memory()
            begun = time.perf_counter()
            self.pass_ = self.freeze()
            seconds.append(time.perf_counter() - begun)
            memory.append(before - self.device.read_memory()[0])
        captures = np.array([self.time_action(self.capture_pass)[0] for _ in range(CAPTURES)])
        rows = [make_row("the first freeze, which connects the ranks", np.array(seconds[:1]))]
        rows += [
            make_row("another freeze", np.array(seconds[1:])),
            make_row("capture, and the graph instantiated", captures),
        ]
        return {"memory": memory, "rows": rows}

    def measure_ways(self, samples: int) -> dict[str, Any]:
        """Measure the ways in turns.

        Returns `memory` and `rows`, as in `measure_freezing`. `ratios` is by way the time until the device is done
        relative to the unfrozen way, with intervals.
        """
        made = self.measure_freezing()
        ways = dict(zip(WAYS, (self.submit, self.enqueue_pass, self.launch_graph), strict=True))
        taken = {way: np.empty((2, samples)) for way in WAYS}
        for sample in range(-2, samples):  # the first two are not counted
            for turn in range(len(WAYS)):
                way = WAYS[(turn + sample) % len(WAYS)]
                both = self.time_action(ways[way])
                if sample >= 0:
                    taken[way][:, sample] = both
        rows = made["rows"]
        for way, (returned, passed) in taken.items():
            rows += [
                make_row(f"{way}, until it is enqueued", returned),
                make_row(f"{way}, until the device has passed", passed),
            ]
        ratios = {way: stats.estimate_ratio(list(taken[way][1]), list(taken[UNFROZEN][1])).record() for way in WAYS[1:]}
        return made | {"ratios": ratios}

    def find_errors(self, size: int, rank: int) -> list[str]:
        """Reduce new values in each way, and describe wrong sums."""
        problems = []
        for way, act in zip(WAYS, (self.submit, self.enqueue_pass, self.launch_graph), strict=True):
            for k, each in enumerate(self.arrays):
                self.device.put(each.at, np.full(COUNT, k + rank, np.float32))
            act()
            for k, each in enumerate(self.arrays):
                if not (each.to_numpy() == size * k + sum(range(size))).all():
                    problems.append(f"{way}, {size} ranks: array {k} is not the sum")
                    break
        return problems


def main() -> None:
    """Run as a rank."""
    where, known, samples = sys.argv[1:]
    here = json.loads(Path(known).read_text(encoding="utf-8"))
    import engine

    engine.init()
    rank, size = engine.rank(), engine.size()
    me = FrozenRank(ranks.get_ordinal(rank, here))
    told = me.measure_ways(int(samples))
    told["problems"] = me.find_errors(size, rank)
    me.device.call_driver("cuGraphExecDestroy", me.run)
    engine.shutdown()
    told["problems"] += me.device.read_reports()
    Path(where, f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
