"""Parts of `python -m benchmarks gpu`, in the order of their runs: all others rely on the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """Part of the benchmark, measured by `benchmarks/gpu/<module>.py`.

    Attributes
    ----------
    module : str
    title : str
    weight : float
        Share of the time, relative to the weights of the other parts.
    needs : tuple of str
        Prerequisites: "nccl", "torch" (with CUDA).
    """

    module: str
    title: str
    weight: float
    needs: tuple[str, ...] = ()

    def lacks(self, here: dict[str, Any]) -> str:
        """Return why the part cannot be measured here; empty if it can."""
        if "nccl" in self.needs and here["why_no_nccl"]:
            return str(here["why_no_nccl"])
        if "torch" in self.needs and here["why_no_torch"]:
            return str(here["why_no_torch"])
        return ""


PARTS: dict[str, Part] = {
    "litmus": Part("semantics", "whether the driver does what the tests' stand-in does", 100),
    "opening": Part("opening", "the GPU opened by the engine", 40, ("nccl",)),
    "numerics": Part("numerics", "results beside exact ones", 60, ("nccl",)),
    "binding": Part("binding", "PyTorch's operations beside the same in the host's memory", 80, ("nccl", "torch")),
    "costs": Part("costs", "costs of calls", 50),
    "bandwidth": Part("bandwidth", "pack and unpack beside a copy", 30),
    "failure": Part("failure", "a rank that is killed, and worlds one after the other", 50, ("nccl",)),
    "steps": Part("steps", "training steps beside DDP's", 110, ("nccl", "torch")),
    "frozen": Part("frozen", "frozen passes and steps, and graphs that have them", 150, ("nccl",)),
    "overlap": Part("overlap", "device work under the backward pass", 60, ("nccl", "torch")),
}
