"""`KerasModel`: a trained model of Keras, as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model import TrainedModel
from .packed import Packed


def compute_outputs(model: Any, arrays: list[Any]) -> list[Any]:
    """Return the outputs of a model of Keras as arrays, computed in inference mode."""
    found = model.predict_on_batch(arrays[0] if len(arrays) == 1 else tuple(arrays))
    return (
        list(found.values()) if isinstance(found, dict) else list(found) if isinstance(found, list | tuple) else [found]
    )


class KerasModel(TrainedModel):
    """Variant of `TrainedModel` whose `model` is a `keras.Model`; `custom_objects` are those of `KerasEstimator`."""

    OBJECT_NAMES = (*TrainedModel.OBJECT_NAMES, "custom_objects")
    compute_outputs = staticmethod(compute_outputs)

    def __init__(self, *, custom_objects: Mapping[str, Any] | None = None, **common: Any) -> None:
        super().__init__(**common)
        self._set_values({"custom_objects": custom_objects})

    def getHistory(self) -> dict[str, list[float]]:
        """Return the values of each loss and metric by epoch, averaged over all ranks, like a Keras `History`."""
        names = dict.fromkeys(name for epoch in self._history for name in epoch)
        return {name: [epoch[name] for epoch in self._history if name in epoch] for name in names}

    def _pack_objects(self) -> Any:
        return Packed(super()._pack_objects(), self._custom_objects)

    def _pack_model(self) -> Any:
        return Packed(self._model, self._custom_objects)
