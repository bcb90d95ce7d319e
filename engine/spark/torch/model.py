"""`TorchModel`: a trained model of PyTorch, as a stage of a pipeline."""

from __future__ import annotations

from typing import Any

from ..model import TrainedModel


def compute_outputs(model: Any, arrays: list[Any]) -> list[Any]:
    """Return the outputs of a module of PyTorch as arrays, computed in evaluation mode."""
    import torch

    model.eval()
    with torch.no_grad():
        outputs = model(*map(torch.from_numpy, arrays))
    return [output.float().numpy() for output in (outputs if isinstance(outputs, tuple | list) else (outputs,))]


class TorchModel(TrainedModel):
    """Variant of `TrainedModel` whose `model` is a `torch.nn.Module`."""

    compute_outputs = staticmethod(compute_outputs)

    def getHistory(self) -> list[dict[str, Any]]:
        """Return the number, `epoch`, and the average losses over all ranks, `train` and `validation`, of each epoch.

        Each of the two is `{"loss": value}`; without validation rows there is no `validation`.
        """
        found: list[dict[str, Any]] = []
        for number, epoch in enumerate(self._history):
            found.append({"epoch": number, "train": {"loss": epoch["loss"]}})
            if "val_loss" in epoch:
                found[-1]["validation"] = {"loss": epoch["val_loss"]}
        return found
