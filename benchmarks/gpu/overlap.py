"""Part `overlap`: share of the engine's work on the device that runs during the backward pass.

`python -m benchmarks.gpu.overlap DIRECTORY WORKLOAD STEPS` is the rank. The share comes from a trace of torch's
profiler, if CUPTI may be used. Events of the device show by how much a backward pass is longer with the engine than
without: that is the exposed part.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import ranks
from benchmarks.gpu.part import Task

WORKLOADS = ("resnet50", "gpt")
FLOOR = "floor"
VARIANTS = ("engine", "engine_fp16")
BACKWARD = "the backward pass"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
OURS = re.compile(r"(?:un)?pack_\w+|reduce_(?:b?float|u?int|bool)\w*")
"""Kernels of the engine (engine_ext/gpu/kernels.cu). Everything on their stream counts as the engine's work."""
Interval = tuple[float, float]


def measure_part(task: Task) -> dict[str, Any]:
    """Measure workloads in own processes: `workloads` has results of `measure_workload` by name; `problems`."""
    found: dict[str, Any] = {"workloads": {}, "problems": []}
    for number, name in enumerate(WORKLOADS):
        seconds = task.left / (len(WORKLOADS) - number)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                with ranks.Ranks("benchmarks.gpu.overlap", 1, [scratch, name, str(task.pick_amount(3, 8))]) as job:
                    job.end(seconds)
            except ranks.RankProcessError as error:
                found["problems"].append(f"{name}: {error}")
                continue
            found["workloads"][name] = json.loads(Path(scratch, "0.json").read_text(encoding="utf-8"))
        task.tell(found)
    return found


# ---- the trace -------------------------------------------------------------------------------------------------------


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals, and return them in order.

    >>> merge_intervals([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5)])
    [(0.0, 2.5), (3.0, 4.0)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def get_common_time(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Return the time that is common to both; each is a result of `merge_intervals`.

    >>> get_common_time([(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0)])
    2.0
    """
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def analyse_trace(events: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Analyse a trace of torch's profiler, in which backward passes are marked by `BACKWARD`.

    `events` is the trace's `traceEvents`, with times in us. Returns None for a trace without device events. Otherwise
    `work` is seconds of the engine's work on the device in a step. `backward` is its share during the backward pass as
    the device sees it. That pass lasts from the first kernel launched in it to the end of the last. `computing` is the
    share while one of the pass's kernels ran.
    """
    device = [each for each in events if each.get("cat") in DEVICE]
    if not device:
        return None
    passes = [
        _get_interval(each) for each in events if each.get("name") == BACKWARD and each.get("cat") == "user_annotation"
    ]
    launched = {
        each["args"]["correlation"]: float(each["ts"])
        for each in events
        if each.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in each.get("args", {})
    }
    streams = {_get_stream(each) for each in device if OURS.fullmatch(each["name"])}
    ours = merge_intervals(_get_interval(each) for each in device if _get_stream(each) in streams)
    theirs = [each for each in device if _get_stream(each) not in streams]
    windows, computing = [], []
    for begin, end in passes:
        inside = [
            _get_interval(each)
            for each in theirs
            if begin <= launched.get(each.get("args", {}).get("correlation"), -1.0) <= end
        ]
        computing += inside
        if inside:
            windows.append((min(first for first, _ in inside), max(last for _, last in inside)))
    work = sum(end - begin for begin, end in ours)
    if not work:
        return {"work": 0.0}
    hidden = {
        "backward": get_common_time(ours, merge_intervals(windows)) / work,
        "computing": get_common_time(ours, merge_intervals(computing)) / work,
    }
    return {"work": work / 1e6 / max(len(passes), 1), **hidden}


def _get_stream(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("stream")


def _get_interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


# ---- the rank --------------------------------------------------------------------------------------------------------


def measure_workload(name: str, where: Path, steps: int, device: str = "cuda:0") -> dict[str, Any]:
    """Trace and time a workload: its `title`, and by variant `traced` (`shares`, or why not) and `exposed` seconds."""
    from benchmarks.gpu import training

    engine = training.join(where, device)
    workload = training.WORKLOADS[name]
    bench = training.WorkloadBench(workload, (FLOOR, *VARIANTS), device)
    for variant in bench.variants:
        bench.time_block(variant, 5)
    found: dict[str, Any] = {"title": workload.title, "variants": {}}
    passes: dict[str, list[float]] = {variant: [] for variant in bench.variants}
    for _ in range(steps):
        for variant in bench.variants:
            passes[variant].append(_backward(bench, variant))
    for variant in VARIANTS:
        exposed = median(a - b for a, b in zip(passes[variant], passes[FLOOR], strict=True))
        traced = _trace_workload(bench, variant, min(steps, 3), where)
        found["variants"][variant] = {"exposed": exposed, "backward": median(passes[FLOOR]), "traced": traced}
    engine.shutdown()
    return found


def _backward(bench: Any, name: str) -> float:
    """Return the seconds of a backward pass, by the device's clock; 0 on the CPU."""
    import torch

    variant = bench.variants[name]
    loss = variant.forward()
    if bench.device == "cpu":
        variant.backward(loss), variant.update()
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    variant.backward(loss)
    end.record()
    variant.update()
    bench.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _trace_workload(bench: Any, name: str, steps: int, where: Path) -> dict[str, float] | str:
    """Return the shares from a trace, or the reason why there are none."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    variant = bench.variants[name]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.device != "cpu" else [])]
    try:
        with profile(activities=activities) as profiler:
            for _ in range(steps):
                loss = variant.forward()
                with record_function(BACKWARD):
                    variant.backward(loss)
                variant.update()
            bench.synchronize()
        file = where / f"{name}.trace.json"
        profiler.export_chrome_trace(str(file))
    except RuntimeError as error:
        return f"torch's profiler does not work here: {error}"
    torch.cuda.empty_cache() if bench.device != "cpu" else None
    told = analyse_trace(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])
    return told or "the trace has nothing of the device: CUPTI may not be used here"


def main() -> None:
    """Run as the rank."""
    where, name, steps = sys.argv[1:]
    told = measure_workload(name, Path(where), int(steps))
    Path(where, "0.json").write_text(json.dumps(told), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
