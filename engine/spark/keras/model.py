"""`KerasModel`: a trained model of Keras, as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model import TrainedModel
from .packed import Packed


def compute(model: Any, arrays: list[Any]) -> list[Any]:
    """The outputs of a model of Keras as arrays, with whatever it does in training switched off."""
    found = model.predict_on_batch(arrays[0] if len(arrays) == 1 else tuple(arrays))
    return (
        list(found.values()) if isinstance(found, dict) else list(found) if isinstance(found, list | tuple) else [found]
    )


class KerasModel(TrainedModel):
    """As `TrainedModel`; its `model` is a `keras.Model`.

    Parameters
    ----------
    custom_objects : mapping of str to object, optional
        As of `KerasEstimator`.
    **common
        As of `TrainedModel`.
    """

    OBJECT_NAMES = (*TrainedModel.OBJECT_NAMES, "custom_objects")
    compute = staticmethod(compute)

    def __init__(self, *, custom_objects: Mapping[str, Any] | None = None, **common: Any) -> None:
        super().__init__(**common)
        self._fill({"custom_objects": custom_objects})

    def getHistory(self) -> dict[str, list[float]]:
        """Values by epoch of each loss and metric, averaged over all ranks, as of `keras.callbacks.History`."""
        names = dict.fromkeys(name for epoch in self._history for name in epoch)
        return {name: [epoch[name] for epoch in self._history if name in epoch] for name in names}

    def _packed(self) -> Any:
        return Packed(super()._packed(), self._custom_objects)

    def _kept(self) -> Any:
        return Packed(self._model, self._custom_objects)
