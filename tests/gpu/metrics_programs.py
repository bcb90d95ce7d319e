"""Programs of ranks for tests of counters and times on GPUs, which are stand-ins.

python -m tests.gpu.metrics_programs NAME RANK SIZE KERNELS ...

The durations of computation and kernels are declared, so measured durations have known bounds. The first submitted
tensor is a sample, and after it one in MANY is.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from engine.metrics import own_page, page
from engine.native import gradients

from ..waiting import until
from .allreduce_programs import OPS, Binding, Parameter, allreduce, compare, core, main, values
from .device_tensors import DeviceTensor, Framework
from .plane_programs import Rank, planes

KERNEL = 0.02  # seconds of a kernel
LATE = 0.3  # seconds by which a computation on rank 1 is late
MANY = 32  # number of tensors that contain at least one sample: samples are at most 31 apart
STEPS = 4


def counted() -> page.Snapshot:
    """Return the counters page of this process."""
    snapshot = page.read(own_page.open_page(os.environ))
    assert snapshot is not None
    return snapshot


def tell(**told: Any) -> None:
    print(json.dumps(told))


def device_fields() -> dict[str, Any]:
    snapshot = counted()
    stages = {stage: snapshot.get_samples(stage) for stage in snapshot.names["stages"]}
    fields = {name: snapshot[name] for name in snapshot.fields if name.startswith("device_")}
    return {**fields, "gpu": snapshot["gpu"], "stages": stages}


def stages(me: Rank) -> None:
    """Reduce a tensor that kernels pack and unpack, and that is late on rank 1; then queue many tensors."""
    with me.world("stages", metrics=True, cycle_time_ms=0.0, fusion_threshold=0):
        open_gpu()
        me.slow(KERNEL)
        late = DeviceTensor(values(me.rank, 1000, "float32"))
        late.compute(values(me.rank, 1000, "float32"), 1000 * LATE * me.rank)
        allreduce(late, late, "late", prescale=2.0, postscale=3.0).wait()
        compare(late.numpy(), 6 * sum(values(rank, 1000, "float32") for rank in range(me.size)), "late")
        core().barrier("first").wait()
        first = device_fields_after(1)
        tensors = [DeviceTensor(values(me.rank, 10, "float32")) for _ in range(MANY)]
        ours, Framework.stream = Framework.stream, Framework.device.new_stream()
        handles = [allreduce(each, each, f"tensor {k}", prescale=2.0) for k, each in enumerate(tensors)]
        for handle in handles:
            handle.wait()
        for each in tensors:
            each.numpy()
        Framework.stream = ours
    tell(first=first, last=device_fields())


def open_gpu() -> None:
    """Open the GPU, which runs its own kernels, before kernels are slow; no tensor of the program is submitted."""
    core().opener(0)


def device_fields_after(passed: int) -> dict[str, Any]:
    """Wait until the CUDA thread has seen the device pass so many entries, and has read a sample; return the fields."""

    def is_read() -> bool:
        found = device_fields()
        return found["device_passed"] >= passed and found["stages"]["queue"][0] >= 1

    until(is_read, "the CUDA thread has read a sample")
    return device_fields()


def steps(me: Rank) -> None:
    """Check that a step's stream waits for the kernels' time, unless the program computes meanwhile."""
    with me.world("steps", metrics=True):
        parameters = [Parameter(100 * k + 1) for k in range(3)]
        group = gradients.GradientGroup(core(), Binding(parameters), OPS["average"])
        native = [group.add(each, f"parameter {k}", None) for k, each in enumerate(parameters)]
        told = []
        for hidden in (False, True):
            before = device_fields()["stages"]["exposed"]
            for step in range(STEPS):
                if step == 0:
                    core().barrier(f"hidden {hidden}").wait()
                for k, parameter in enumerate(parameters):
                    parameter.grad = DeviceTensor(values(me.rank, parameter.count, "float32"), late=0.5)
                    native[k](parameter)
                if told or step:
                    me.slow(KERNEL)
                other = DeviceTensor(values(me.rank, 10, "float32"))
                if hidden:
                    other.compute(other.like, 1000 * 20 * KERNEL)
                group.finish()
                for parameter in parameters:
                    compare(
                        parameter.grad.numpy(),
                        sum(values(rank, parameter.count, "float32") for rank in range(me.size)) / me.size,
                        f"{hidden} {step}",
                    )
                    parameter.grad = None
            until_read(before[0] + STEPS)
            told.append(
                [after - earlier for after, earlier in zip(device_fields()["stages"]["exposed"], before, strict=True)]
            )
    tell(bare=told[0], hidden=told[1])


def until_read(stands: int) -> None:
    """Wait until the CUDA thread has read all waits; it polls ten times a second while one is unread."""
    until(lambda: device_fields()["stages"]["exposed"][0] >= stands, "the CUDA thread has read how long streams stood")


def pieces(me: Rank) -> None:
    """Reduce in pieces: all pieces count, too many give no sample, and no mark is lost."""
    planes.SLAB = 1 << 16
    with me.world("pieces", metrics=True, cycle_time_ms=0.0, fusion_threshold=0):
        told = []
        for count in (40000, 1 << 17, 10):
            for turn in range(MANY):
                tensor = DeviceTensor(values(me.rank, count, "float32"))
                allreduce(tensor, tensor, f"{count} {turn}", op="max").wait()
                tensor.numpy()
            told.append(device_fields())
    tell(first=told[0], last=device_fields())


def timeline(me: Rank, where: str) -> None:
    """Check that slices of the timeline lie where the host saw the work."""
    with me.world("timeline", timeline=where, cycle_time_ms=0.0, fusion_threshold=0):
        open_gpu()
        me.slow(KERNEL)
        begun = time.monotonic()
        for turn in range(3):
            tensor = DeviceTensor(values(me.rank, 1000, "float32"))
            allreduce(tensor, tensor, f"tensor {turn}", prescale=2.0, postscale=3.0).wait()
            tensor.numpy()
        ended = time.monotonic()
    tell(begun=begun, ended=ended)


if __name__ == "__main__":
    main({program.__name__: program for program in (stages, steps, pieces, timeline)})
