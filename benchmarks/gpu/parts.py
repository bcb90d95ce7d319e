"""The parts of `python -m benchmarks gpu`, in the order in which they run: all that follows relies on the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A part: `benchmarks/gpu/<module>.py` measures it.

    Attributes
    ----------
    module : str
    title : str
    weight : float
        Its share of the time, beside the weights of the others.
    needs : tuple of str
        "nccl", "torch" (with CUDA).
    """

    module: str
    title: str
    weight: float
    needs: tuple[str, ...] = ()

    def lacks(self, here: dict[str, Any]) -> str:
        """Why it cannot be measured here; empty where it can."""
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
