"""Training steps of frozen optimizers, eager and replayed, beside unfrozen ones and DDP's, for the part `frozen`.

`python -m benchmarks.gpu.frozen_steps DIRECTORY SECONDS ROUNDS WORKLOAD` is the rank of a world of one. So it measures
the cost of a step for the host and the device besides the model itself, without a network. Each variant has a model of
its own; they take turns.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import stats
from benchmarks.gpu import ranks, steps, training
from benchmarks.gpu.part import Task
from benchmarks.training.worker import TrainingVariant

FLOOR, PEER, UNFROZEN = steps.FLOOR, steps.PEER, steps.OURS
FROZEN, REPLAY, BARE_REPLAY = "engine_frozen", "engine_replay", "floor_replay"
VARIANTS = (FLOOR, PEER, UNFROZEN, FROZEN, REPLAY, BARE_REPLAY)
RATIOS = ((FROZEN, UNFROZEN), (FROZEN, PEER), (REPLAY, UNFROZEN), (REPLAY, PEER), (REPLAY, BARE_REPLAY))
WARMUP = 3  # steps before a freeze or a capture
MODULE = "benchmarks.gpu.frozen_steps"


def measure_workloads(task: Task, found: dict[str, Any]) -> dict[str, Any]:
    """Measure every workload in a process of its own: `workloads` has the results of `measure_workload`, by name."""
    workloads: dict[str, Any] = {}
    problems: list[str] = found["problems"]
    for number, name in enumerate(training.WORKLOADS):
        seconds = task.left / (len(training.WORKLOADS) - number)
        with tempfile.TemporaryDirectory() as scratch:
            arguments = [scratch, str(0.6 * seconds), str(task.pick_amount(4, 12)), name]
            try:
                with ranks.Ranks(MODULE, 1, arguments) as job:
                    job.end(seconds)
            except ranks.RankProcessError as error:
                problems.append(f"{name}: {error}")
                continue
            workloads[name] = told = json.loads(Path(scratch, "0.json").read_text(encoding="utf-8"))
        for variant, off in told["differences"].items():
            if not off <= steps.TOLERANCE:
                problems.append(f"{name}: the parameters of {variant} differ from DDP's by {off:.2g} of their size")
        task.tell({"workloads": workloads, "problems": problems})
    return {"workloads": workloads, "problems": problems}


class GraphRecording:
    """Captured steps of torch on a GPU, replayed on the current stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()

    def run_on_stream(self, act: Callable[[], None]) -> None:
        """Run on the stream of the later capture, as torch requires."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            act()
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture_action(self, act: Callable[[], None]) -> None:
        """Capture the work that an action enqueues."""
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            act()

    def replay_graph(self) -> None:
        """Replay the captured work."""
        self.graph.replay()


class FixedBatch(TrainingVariant):
    """Variant whose steps read one batch, into which the next ones are copied; frozen, or replayed, or both.

    If steps are replayed, `recording` is their capture.
    """

    def __init__(self, name: str, workload: Any, batches: Any, device: str, recording: Any = None) -> None:
        super().__init__(name, workload, batches, device)
        self.given, self.turn, self.recording = batches, 0, recording
        self.frozen = name.startswith("engine")
        self.place = tuple(each.clone() for each in batches[0])
        self._batches = [self.place]
        if recording is None:
            self.prepare()
            return
        recording.run_on_stream(self.prepare)
        recording.capture_action(super().step)

    def prepare(self) -> None:
        """Take warm-up steps; then freeze if required, with one more step."""
        for _ in range(WARMUP):
            self.step_as_ever()
        if self.frozen:
            self._optimizer.zero_grad(set_to_none=False)
            self._optimizer.freeze()
            self.step_as_ever()
        else:
            self._zero = {"set_to_none": False}

    def load_batch(self) -> None:
        """Copy the next batch to the memory from which steps read."""
        for place, given in zip(self.place, self.given[self.turn % len(self.given)], strict=True):
            place.copy_(given)
        self.turn += 1

    def step_as_ever(self) -> None:
        """Take one eager step."""
        self.load_batch()
        super().step()

    def step(self) -> None:
        """Take one step, or replay one."""
        if self.recording is None:
            self.step_as_ever()
        else:
            self.load_batch()
            self.recording.replay_graph()


class FrozenBench(training.WorkloadBench):
    """All variants of a workload."""

    def __init__(self, workload: Any, device: str, recording: Callable[[], Any]) -> None:
        super().__init__(workload, (FLOOR, PEER, UNFROZEN), device)
        batches = next(iter(self.variants.values()))._batches
        for name in (FROZEN, REPLAY, BARE_REPLAY):
            replayed = recording() if name != FROZEN else None
            self.variants[name] = FixedBatch(name, workload, batches, device, replayed)


def measure_workload(
    name: str,
    where: Path,
    rounds: int,
    seconds: float,
    device: str = "cuda:0",
    recording: Callable[[], Any] = GraphRecording,
) -> dict[str, Any]:
    """Measure one workload in this process.

    Returns a description of the workload; `rounds`: seconds of a step, by variant; `ratios`: ratios of two variants'
    medians; `differences`: differences of variants' parameters from DDP's after equally many steps.
    """
    end = time.monotonic() + seconds
    engine = training.join(where, device)
    workload = training.WORKLOADS[name]
    bench = FrozenBench(workload, device, recording)
    for variant in (FLOOR, PEER, UNFROZEN):
        bench.time_block(variant, WARMUP + 1)
    bench.time_block(BARE_REPLAY, 1)
    print(f"{name}: ready with {end - time.monotonic():.1f} s left", flush=True)
    warm = max(bench.time_block(variant, 1) for variant in VARIANTS)
    differences = {variant: bench.compute_difference(variant, PEER) for variant in VARIANTS if variant != PEER}
    each = int(min(steps.MOST, max(2, steps.BLOCK / warm)))
    taken: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds):
        if number >= 2 and time.monotonic() > end:
            break
        for turn in range(len(VARIANTS)):
            variant = VARIANTS[(turn + number) % len(VARIANTS)]
            bench.time_block(variant, 1)
            taken[variant].append(bench.time_block(variant, each))
    print(f"{name}: measured with {end - time.monotonic():.1f} s left", flush=True)
    ratios = {f"{of} to {to}": stats.estimate_ratio(taken[of], taken[to]).record() for of, to in RATIOS}
    size = bench.size()
    bench.variants.clear()  # the graphs must be destroyed before the communicator that they use
    engine.shutdown()
    print(f"{name}: closed with {end - time.monotonic():.1f} s left", flush=True)
    return {"title": workload.title, **size, "differences": differences, "rounds": taken, "ratios": ratios}


if __name__ == "__main__":
    steps.run_rank(measure_workload)
