"""Part `costs`: time that calls of the driver, PyTorch, NCCL and the engine take in the calling thread."""

from __future__ import annotations

import ctypes
import json
import tempfile
import timeit
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import native_calls, ranks
from benchmarks.gpu.driver import CudaDriver, ExchangeTable
from benchmarks.gpu.part import Skipped, Task

BATCH = 50
Rows = list[dict[str, Any]]


def measure_part(task: Task) -> dict[str, Any]:
    """Measure all groups of calls.

    Returns `groups`: for each group, a list of rows with `name` and a `Summary` in seconds; or a text why it was
    skipped.
    """
    groups: dict[str, Rows | str] = {}
    found: dict[str, Any] = {"groups": groups, "problems": []}
    device = CudaDriver()
    calls = native_calls.Calls(device)
    samples = task.pick_amount(20, 1000)
    groups["driver"] = [
        native_calls.make_row(name, calls.time_driver_call(which, BATCH, samples))
        for which, name in enumerate(calls.list_calls())
    ]
    task.tell(found)
    woken, rung = calls.wake(task.pick_amount(50, 2000))
    groups["CUDA thread"] = [
        native_calls.make_row("a ring of its door, until it runs", woken),
        native_calls.make_row("the ring, for the thread that rings", rung),
    ]
    task.tell(found)
    found["problems"] += device.read_reports()
    groups["engine"] = _measure_ranks("benchmarks.gpu.engine_calls", 1, {}, task, found, 0.4)
    for size in (1, 2):
        name = f"NCCL, {size} rank{'s' if size > 1 else ''}"
        try:
            where, variables = ("", {}) if size == 1 else ranks.find_placement(task.here)
            name += f" {where}" if where else ""
            groups[name] = _measure_ranks("benchmarks.gpu.nccl_calls", size, variables, task, found, 0.7)
        except Skipped as error:
            groups[name] = str(error)
        task.tell(found)
    groups["torch"] = task.here["why_no_torch"] or _measure_torch(task.pick_amount(1000, 100_000))
    return found


def _measure_ranks(
    module: str, size: int, variables: dict[str, str], task: Task, found: dict[str, Any], share: float
) -> Rows | str:
    """Return the rows of the ranks of a module, and add their problems to `found`; without NCCL, the reason."""
    if task.here["why_no_nccl"]:
        return str(task.here["why_no_nccl"])
    samples = task.pick_amount(10, 500 if size == 1 else 100)
    with tempfile.TemporaryDirectory() as scratch:
        (known := Path(scratch, "here.json")).write_text(json.dumps(task.here), encoding="utf-8")
        with ranks.Ranks(module, size, [scratch, str(known), str(samples)], variables) as job:
            try:
                job.end(share * task.left)
            except ranks.RankProcessError as error:  # the rest is measured nevertheless
                found["problems"].append(str(error))
                return str(error).partition("\n")[0]
        told = [json.loads(Path(scratch, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    found["problems"] += [problem for each in told for problem in each["problems"]]
    rows: Rows = told[0]["rows"]
    return rows


def _measure_torch(calls: int) -> Rows:
    """Measure three ways by which PyTorch reports its current stream."""
    import torch

    torch.cuda.init()
    capsule = torch.Tensor.__dlpack_c_exchange_api__
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = pointer(capsule, b"dlpack_exchange_api")
    current_work_stream = ctypes.c_void_p.from_address(table + ExchangeTable.current_stream.offset)
    tell = ctypes.PyDLL(native_calls.load_library()._name).calls_current_stream
    tell.restype = ctypes.c_double
    tell.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int]
    seconds = np.array([tell(current_work_stream, 0, calls // 10) for _ in range(10)])
    if (seconds < 0).any():
        raise RuntimeError("torch's current_work_stream has failed")
    raw, current = torch._C._cuda_getCurrentRawStream, torch.cuda.current_stream
    ways = {
        "current_work_stream of DLPack's exchange table, from C": seconds,
        "torch._C._cuda_getCurrentRawStream, from Python": _time_calls(lambda: raw(0), calls),
        "torch.cuda.current_stream, from Python": _time_calls(current, calls),
    }
    return [native_calls.make_row(name, each) for name, each in ways.items()]


def _time_calls(function: Any, calls: int) -> np.ndarray:
    return np.array(timeit.repeat(function, number=calls // 10, repeat=10)) / (calls // 10)
