"""What ranks do in tests of what is counted and timed on GPUs, which are the stand-ins.

python -m tests.gpu.metrics_programs NAME RANK SIZE KERNELS ...

Delays of computing and of kernels are declared, so that durations have bounds that are known. The first tensor that is
submitted is a sample, and of as many as follow here one is.
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

KERNEL = 0.02  # seconds that a kernel takes
LATE = 0.3  # seconds for which what is computed on rank 1 is late
MANY = 32  # tensors of which one is a sample: they are 31 apart at most
STEPS = 4


def counted() -> page.Snapshot:
    """This process's page."""
    snapshot = page.read(own_page.open_page(os.environ))
    assert snapshot is not None
    return snapshot


def tell(**told: Any) -> None:
    print(json.dumps(told))


def device_fields() -> dict[str, Any]:
    snapshot = counted()
    stages = {stage: snapshot.sampled(stage) for stage in snapshot.names["stages"]}
    fields = {name: snapshot[name] for name in snapshot.fields if name.startswith("device_")}
    return {**fields, "gpu": snapshot["gpu"], "stages": stages}


def stages(me: Rank) -> None:
    """One tensor, packed and unpacked by kernels, and late on rank 1; then many, one behind the other in the queue."""
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
    """Open the GPU, which takes kernels of its own, before they are slow. That submits no tensor of the program's."""
    core().opener(0)


def device_fields_after(passed: int) -> dict[str, Any]:
    """As soon as the lane has seen the device pass so many, and has read a sample of them."""

    def is_read() -> bool:
        found = device_fields()
        return found["device_passed"] >= passed and found["stages"]["queue"][0] >= 1

    until(is_read, "the lane has read a sample")
    return device_fields()


def steps(me: Rank) -> None:
    """The stream of a step stands for what kernels take, and not where the program computes meanwhile."""
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
    """The lane looks ten times a second as long as something is not read."""
    until(lambda: device_fields()["stages"]["exposed"][0] >= stands, "the lane has read how long streams stood")


def pieces(me: Rank) -> None:
    """What is larger than the slab: all pieces count; of too many there is no sample, and nothing is lost."""
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
    """Slices lie where the host saw the work."""
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
