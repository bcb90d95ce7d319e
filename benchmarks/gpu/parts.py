"""Parts of `python -m benchmarks gpu`, in the order of their runs: all others rely on the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuPart:
    """Part of the benchmark, measured by `benchmarks/gpu/<module>.py`."""

    module: str
    title: str
    weight: float  # share of the time, relative to the weights of the other parts
    needs: tuple[str, ...] = ()  # prerequisites: "nccl", "torch" (with CUDA)

    def find_lack(self, here: dict[str, Any]) -> str:
        """Return why the part cannot be measured here; empty if it can."""
        if "nccl" in self.needs and here["why_no_nccl"]:
            return str(here["why_no_nccl"])
        if "torch" in self.needs and here["why_no_torch"]:
            return str(here["why_no_torch"])
        return ""


PARTS: dict[str, GpuPart] = {
    "litmus": GpuPart("semantics", "whether the driver does what the tests' stand-in does", 100),
    "opening": GpuPart("opening", "the GPU opened by the engine", 40, ("nccl",)),
    "numerics": GpuPart("numerics", "results beside exact ones", 60, ("nccl",)),
    "binding": GpuPart("binding", "PyTorch's operations beside the same in the host's memory", 80, ("nccl", "torch")),
    "costs": GpuPart("costs", "costs of calls", 50),
    "bandwidth": GpuPart("bandwidth", "pack and unpack beside a copy", 30),
    "failure": GpuPart("failure", "a rank that is killed, and worlds one after the other", 50, ("nccl",)),
    "steps": GpuPart("steps", "training steps beside DDP's", 110, ("nccl", "torch")),
    "frozen": GpuPart("frozen", "frozen passes and steps, and graphs that have them", 150, ("nccl",)),
    "overlap": GpuPart("overlap", "device work under the backward pass", 60, ("nccl", "torch")),
}
