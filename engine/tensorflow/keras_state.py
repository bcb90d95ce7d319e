"""`TensorFlowKerasState`, in a module of its own since only it needs Keras."""

from __future__ import annotations

from typing import Any

from ..keras.elastic import KerasState


class TensorFlowKerasState(KerasState):
    """Alias of `engine.keras.elastic.KerasState` with Horovod's name and parameters.

    Parameters
    ----------
    model, optimizer, **values
        Same as for `KerasState`.
    backend : optional
        Accepted for existing scripts, and without effect.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any) -> None:
        super().__init__(model, optimizer, **values)
