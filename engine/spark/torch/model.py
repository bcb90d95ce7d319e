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

    def getHistory(self) -> list[dict[str, Any]]:
        """By epoch its number, `epoch`, and the losses of `train` and `validation`, averaged over all ranks.

        Each of the two is `{"loss": value}`; without rows that validate there is no `validation`.
        """
        found: list[dict[str, Any]] = []
        for number, epoch in enumerate(self._history):
            found.append({"epoch": number, "train": {"loss": epoch["loss"]}})
            if "val_loss" in epoch:
                found[-1]["validation"] = {"loss": epoch["val_loss"]}
        return found
