"""`TorchModel`: a trained model of PyTorch, as a stage of a pipeline."""

from __future__ import annotations

from typing import Any

from ..model import TrainedModel


def compute(model: Any, arrays: list[Any]) -> list[Any]:
    """The outputs of a module of PyTorch as arrays, with whatever it does in training switched off."""
    import torch

    model.eval()
    with torch.no_grad():
        outputs = model(*map(torch.from_numpy, arrays))
    return [output.float().numpy() for output in (outputs if isinstance(outputs, tuple | list) else (outputs,))]


class TorchModel(TrainedModel):
    """As `TrainedModel`; its `model` is a `torch.nn.Module`."""

    compute = staticmethod(compute)
